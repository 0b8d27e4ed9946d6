"""What a load test found, on the terminal."""

from collections.abc import Iterator

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.engine.shortage import size
from jaxpaged.plan import plan_table
from jaxpaged.plan.survey import Lens
from jaxpaged.stress.check import Check
from jaxpaged.stress.load import Latency, Load
from jaxpaged.stress.sweep import StressReport


def show(report: StressReport, console: rich.console.Console) -> None:
    """Prints the requests, the loads side by side, what paging gains, and the comparison."""
    facts = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(report):
        facts.add_row(rich.text.Text(name), rich.text.Text(value))
    console.print(facts)
    loads = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    loads.add_column("", no_wrap=True)
    for load in report.loads:
        loads.add_column(f"{load.concurrency} {load.reservation}", justify="right", no_wrap=True)
    columns = [figures(load) for load in report.loads]
    for name in columns[0]:
        loads.add_row(name, *(column[name] for column in columns))
    console.print(loads)
    for line in verdict(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def figures(load: Load) -> dict[str, str]:
    """A load's figures as texts, by name."""
    found = {
        "requests at once, mean": f"{load.mean_running:.1f}",
        "requests at once, most": f"{load.peak_running:,}",
        "tokens/s in and out": f"{load.tokens_per_second:,.0f}",
        "seconds": f"{load.seconds:,.1f}",
        **_latencies("first token", load.first_token),
        **_latencies("between tokens", load.between_tokens),
        "preemptions": f"{load.preemptions:,}",
        "pool in use, mean": f"{load.mean_used_share:.0%}",
        "pool in use, most": f"{load.peak_used_blocks / load.num_blocks:.0%}",
        "KV memory held and not used": plan_table.waste(load.kv_waste_share),
        "prompt tokens from the cache": f"{load.cached_tokens:,}",
        "padding": f"{load.padding_share:.0%}",
        "steps": f"{load.steps:,}",
        "peak memory": size(load.peak_bytes),
    }
    if load.failed:
        found["failed"] = ", ".join(f"{code} {count:,}" for code, count in load.failed.items())
    return found


def verdict(report: StressReport) -> Iterator[str]:
    """What paging gains at the highest concurrency, the comparison, and what was not tried."""
    widest = report.widest
    paged, static = widest.get("paged"), widest.get("static")
    if paged and static and static.mean_running and static.tokens_per_second:
        yield (
            f"in {size(report.pool_bytes)} of KV memory, with {paged.concurrency:,} requests in "
            f"flight: {paged.mean_running:.1f} at once with blocks on demand, "
            f"{static.mean_running:.1f} with {report.max_model_len:,} tokens reserved for each "
            f"({paged.mean_running / static.mean_running:.1f} times as many; "
            f"{paged.tokens_per_second / static.tokens_per_second:.2f} times the tokens/s)"
        )
    if report.check is not None:
        yield comparison(report.check)
    for load in report.loads:
        if not load.requests:
            yield f"NO REQUEST COMPLETED at {load.concurrency:,} in flight, {load.reservation}"
    yield from report.notes


def comparison(found: Check) -> str:
    """What comparing with the decoder without a pool came to."""
    outcome = "all" if found.equal == found.tokens else f"{found.equal:,}"
    told = {
        True: "",
        False: f", more than {found.tolerance}: THEY DIFFER",
        None: "; with keys and values stored so narrowly nothing is promised",
    }[found.is_good]
    return (
        f"{outcome} of {found.tokens:,} tokens of {found.requests:,} requests are the likeliest of "
        f"the decoder without a pool; largest gap of a logit {found.largest_gap:.2g}{told}"
    )


def _facts(report: StressReport) -> Iterator[tuple[str, str]]:
    yield "model", report.model
    yield "engine", report.engine
    yield "KV pool", f"{size(report.pool_bytes)}, {report.block_size} tokens a block"
    yield "requests", f"{len(report.prompt_lens):,}"
    yield "prompt tokens", _lens(report.prompt_lens)
    yield "new tokens", _lens(report.new_lens)


def _lens(lens: Lens) -> str:
    quantiles = ", ".join(f"{name} {value:,}" for name, value in lens.quantiles().items())
    return f"{lens.total:,}; {quantiles}"


def _latencies(name: str, found: Latency) -> dict[str, str]:
    return {
        f"{name}, median": _time(found.median),
        f"{name}, 95 of 100": _time(found.p95),
        f"{name}, longest": _time(found.most),
    }


def _time(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:,.1f} s"
