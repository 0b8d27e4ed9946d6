"""What a load test found as one HTML page and as JSON, in a folder."""

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence

from jaxpaged.errors import StorageError
from jaxpaged.pages import charts, numbers, page
from jaxpaged.pages.charts import Line
from jaxpaged.pages.page import (
    Chart,
    Charts,
    Facts,
    Figure,
    Messages,
    Page,
    Section,
    Table,
    Tables,
)
from jaxpaged.plan import plan_table
from jaxpaged.plan.survey import Lens
from jaxpaged.stress import stress_table
from jaxpaged.stress.load import Load
from jaxpaged.stress.sweep import StressReport

_NAMES = {"paged": "blocks on demand", "static": "static reservation"}
# Shorter runs have too few intervals to be a picture.
_LEAST_INTERVALS = 3


def prepare(folder: str) -> pathlib.Path:
    """The folder, made; asked for before minutes are spent on what goes there.

    Raises:
        ConfigError: matplotlib, which draws the charts, is not installed.
        StorageError: The folder cannot be made.
    """
    charts.require()
    place = pathlib.Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"--out: {place} cannot be made: {error.strerror}") from None
    return place


def write(report: StressReport, place: pathlib.Path) -> list[pathlib.Path]:
    """Writes `stress.json` and `stress.html`; returns where they are.

    Raises:
        StorageError: The folder cannot be written.
    """
    texts = {
        "stress.json": json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n",
        "stress.html": render(report),
    }
    try:
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--out: {place} cannot be written: {error.strerror}") from None
    return [place / name for name in texts]


def render(report: StressReport) -> str:
    """The page.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    charts.require()
    return page.render(
        Page(
            title="Load test",
            state=_state(report),
            is_good=not report.is_failed,
            lead=report.model,
            figures=list(_figures(report)),
            sections=_sections(report),
            foot=f"jaxpaged {report.versions.get('jaxpaged', '')}",
        )
    )


def _state(report: StressReport) -> str:
    """What is known of the completions, in a few words."""
    if any(not load.requests for load in report.loads):
        return "no request completed"
    if report.check is None:
        return "not compared"
    if report.check.is_good is None:
        return "compared, nothing promised"
    return "as without a pool" if report.check.is_good else "differs from that without a pool"


def _figures(report: StressReport) -> Iterator[Figure]:
    memory = numbers.memory(report.pool_bytes)
    for reservation, load in report.widest.items():
        yield Figure(
            name=f"requests at once, {_NAMES[reservation]}",
            value=f"{load.mean_running:.1f}",
            note=f"of {load.concurrency:,} in flight, in {memory}",
        )
    paged = report.widest["paged"]
    yield Figure(
        name="speed",
        value=f"{numbers.short(paged.tokens_per_second)}/s",
        note="tokens in and out, blocks on demand",
    )
    yield Figure(
        name="KV waste",
        value=plan_table.waste(paged.kv_waste_share),
        note="of the slots of blocks in use, blocks on demand",
    )


def _sections(report: StressReport) -> list[Section]:
    return [
        Section(
            title="What paging gains", blocks=[Messages(texts=list(stress_table.verdict(report)))]
        ),
        Section(title="By requests in flight", blocks=[*_by_concurrency(report), _tables(report)]),
        Section(title="Over time", blocks=_over_time(report)),
        Section(title="The requests", blocks=_lengths(report)),
        Section(
            title="What ran",
            blocks=[
                Facts(
                    rows=[
                        ("model", report.model),
                        ("engine", report.engine),
                        *((name, version) for name, version in report.versions.items()),
                    ]
                )
            ],
        ),
    ]


def _by_concurrency(report: StressReport) -> Iterator[Charts]:
    """How the figures change with the requests in flight."""
    if len({load.concurrency for load in report.loads}) < 2:
        return
    looks: list[tuple[str, Callable[[Load], float]]] = [
        ("Requests at once, on average", lambda load: load.mean_running),
        ("Tokens in and out per second", lambda load: load.tokens_per_second),
        ("First token, 95th percentile, ms", lambda load: load.first_token.p95),
        ("Between tokens, 95th percentile, ms", lambda load: load.between_tokens.p95),
    ]
    yield Charts(charts=[_concurrency_chart(report, title, value) for title, value in looks])


def _concurrency_chart(report: StressReport, title: str, value: Callable[[Load], float]) -> Chart:
    places = sorted({load.concurrency for load in report.loads})
    lines = []
    for reservation, name in _NAMES.items():
        known = {load.concurrency: value(load) for load in _of(report, reservation)}
        if known:
            values = [known.get(place, float("nan")) for place in places]
            style = "solid" if reservation == "paged" else "dashed"
            lines.append(Line(name=name, values=values, style=style))
    return Chart(
        title=title, svg=charts.line_chart(places, lines, title=title, x_label="requests in flight")
    )


def _tables(report: StressReport) -> Tables:
    """A table for each number of requests in flight, the reservations side by side."""
    tables = []
    for concurrency in sorted({load.concurrency for load in report.loads}):
        loads = [load for load in report.loads if load.concurrency == concurrency]
        columns = [stress_table.figures(load) for load in loads]
        names = dict.fromkeys(name for column in columns for name in column)
        tables.append(
            Table(
                title=f"{concurrency:,} requests in flight",
                head=["", *(_NAMES[load.reservation] for load in loads)],
                rows=[[name, *(column.get(name, "") for column in columns)] for name in names],
                numeric=frozenset(range(1, len(loads) + 1)),
            )
        )
    return Tables(tables=tables)


def _over_time(report: StressReport) -> list[Charts]:
    """The loads at the highest concurrency, each over its own time."""
    found = []
    for reservation, load in report.widest.items():
        timeline, block = load.timeline, report.block_size
        if len(timeline) < _LEAST_INTERVALS:
            continue
        held = [blocks * block for blocks in timeline.used_blocks]
        name = _NAMES[reservation]
        pool = charts.line_chart(
            timeline.edges,
            [
                Line(name="slots of blocks in use", values=held),
                Line(name="tokens in them", values=timeline.live_tokens, style="area"),
            ],
            title=f"KV pool, {name}",
            x_label="seconds",
            y_max=1.08 * load.num_blocks * block,
            limit=("pool", load.num_blocks * block),
        )
        running = charts.line_chart(
            timeline.edges,
            [
                Line(name="at once", values=timeline.running),
                Line(name="waiting", values=timeline.waiting, style="dashed"),
            ],
            title=f"Requests, {name}",
            x_label="seconds",
        )
        found += [
            Chart(title=f"KV pool, {name}", svg=pool),
            Chart(title=f"Requests, {name}", svg=running),
        ]
    return [Charts(charts=found)] if found else []


def _lengths(report: StressReport) -> list[Charts]:
    return [
        Charts(
            charts=[
                _histogram("Prompt tokens", report.prompt_lens),
                _histogram("New tokens", report.new_lens),
            ]
        )
    ]


def _histogram(title: str, lens: Lens) -> Chart:
    bins = lens.histogram()
    bars = [
        charts.Bar(name=f"{first:,} to {last:,}", value=count, text=f"{count:,}")
        for first, last, count in bins
    ]
    return Chart(title=title, svg=charts.bar_chart(bars, title=title))


def _of(report: StressReport, reservation: str) -> Sequence[Load]:
    return [load for load in report.loads if load.reservation == reservation]
