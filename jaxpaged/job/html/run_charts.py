"""What a run did over time, as charts. Needs an engine's counters; without them there are none."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxpaged.cache.capacity import blocks_for
from jaxpaged.job.report import RunFacts
from jaxpaged.pages import charts, numbers
from jaxpaged.pages.charts import Bar, Line, Shade
from jaxpaged.pages.numbers import Number
from jaxpaged.pages.page import Chart

# Fewer are a few numbers, no picture.
_LEAST_INTERVALS = 3
_UNITS = ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (float("inf"), 3600.0, "hours"))


def speed(run: RunFacts) -> list[Chart]:
    """Tokens a second, and where the time went."""
    if len(run.timeline) < _LEAST_INTERVALS:
        return []
    return [_tokens_per_second(run), _where_time_went(run)]


def batches(run: RunFacts) -> list[Chart]:
    """Who ran and who waited, and how full steps were."""
    if len(run.timeline) < _LEAST_INTERVALS:
        return []
    fill = _batch_fill(run)
    return [_running_and_waiting(run), *([fill] if fill else [])]


def pool(run: RunFacts) -> list[Chart]:
    """What the pool held, beside what a static reservation would have held."""
    held = Occupancy.of(run)
    if held is None or len(run.timeline) < _LEAST_INTERVALS:
        return []
    title = "Tokens in the KV pool"
    x, label = _time(run)
    svg = charts.line_chart(
        x,
        [
            Line(name="slots of blocks in use", values=held.used, style="area"),
            Line(name="if max_model_len were reserved", values=held.static, style="dashed"),
            Line(name="live tokens, shared ones more than once", values=held.live),
        ],
        title=title,
        x_label=label,
        limit=("the whole pool", held.size),
        shade=Shade(name="such a reservation does not fit", where=held.exceeds),
    )
    return [Chart(title=title, svg=svg, note=held.in_words())]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What a pool held over time, in tokens, an entry for each interval.

    Attributes:
        seconds: How long the interval was.
        used: Slots of the blocks in use.
        live: Computed tokens of running sequences.
        static: What `max_model_len` for each running sequence would take.
        size: Of the pool.
        max_model_len: Most tokens of a sequence.
    """

    seconds: Sequence[Number]
    used: Sequence[Number]
    live: Sequence[Number]
    static: Sequence[Number]
    size: int
    max_model_len: int

    @classmethod
    def of(cls, run: RunFacts) -> "Occupancy | None":
        """That of a run; None if its engine does not tell enough."""
        engine, line = run.engine, run.timeline
        length, block_size = engine.get("max_model_len"), engine.get("block_size")
        if not (length and block_size and len(line)):
            return None
        each = blocks_for(length, block_size) * block_size
        return cls(
            seconds=[stop - start for start, stop in itertools.pairwise(line.edges)],
            used=[blocks * block_size for blocks in line.used_blocks],
            live=line.live_tokens,
            static=[running * each for running in line.running],
            size=engine["num_blocks"] * block_size,
            max_model_len=length,
        )

    @property
    def exceeds(self) -> list[bool]:
        """Where the static reservation would be more than the pool."""
        return [tokens > self.size for tokens in self.static]

    def in_words(self) -> str:
        """What that comes to."""
        used, static = self._mean(self.used), self._mean(self.static)
        if not used:
            return ""
        text = (
            f"On average {numbers.short(used)} of {numbers.short(self.size)} slots were in blocks "
            f"in use. Reserving max_model_len ({self.max_model_len:,} tokens) for each running "
            f"sequence would have taken {numbers.short(static)}, {static / used:.1f} times as much."
        )
        share = self._mean([float(is_over) for is_over in self.exceeds])
        if share:
            text += f" For {share:.0%} of the time that is more than the whole pool."
        return text

    def _mean(self, values: Sequence[Number]) -> float:
        """Over time."""
        total = sum(self.seconds)
        pairs = zip(values, self.seconds, strict=True)
        return sum(value * seconds for value, seconds in pairs) / total if total else 0.0


def _tokens_per_second(run: RunFacts) -> Chart:
    line, title = run.timeline, "Tokens per second"
    x, label = _time(run)
    lengths = [max(1e-3, stop - start) for start, stop in itertools.pairwise(line.edges)]
    tokens = zip(line.computed_tokens, line.sampled_tokens, lengths, strict=True)
    rates = [
        (max(0, computed - sampled) / seconds, sampled / seconds)
        for computed, sampled, seconds in tokens
    ]
    svg = charts.line_chart(
        x,
        [
            Line(name="of prompts", values=[prompt for prompt, _ in rates]),
            Line(name="of completions", values=[new for _, new in rates]),
        ],
        title=title,
        x_label=label,
    )
    return Chart(title=title, svg=svg)


def _where_time_went(run: RunFacts) -> Chart:
    title, engine = "Where the time went", run.engine
    parts = {
        "loading the model": run.load_seconds,
        "compiling": engine.get("compile_seconds", 0.0),
        "steps with prompts in them": engine.get("prefill_seconds", 0.0),
        "steps that only decode": engine.get("decode_seconds", 0.0),
    }
    inside = sum(parts.values()) - run.load_seconds
    parts["the rest: reading, writing, waiting"] = max(0.0, run.seconds - inside)
    bars = [
        Bar(name=name, value=seconds, text=numbers.duration(seconds))
        for name, seconds in parts.items()
    ]
    return Chart(title=title, svg=charts.bar_chart(bars, title=title))


def _running_and_waiting(run: RunFacts) -> Chart:
    title = "Sequences running and waiting"
    x, label = _time(run)
    lines = [
        Line(name="running", values=run.timeline.running, style="area"),
        Line(name="waiting", values=run.timeline.waiting),
    ]
    return Chart(title=title, svg=charts.line_chart(x, lines, title=title, x_label=label))


def _batch_fill(run: RunFacts) -> Chart | None:
    line, title = run.timeline, "How full steps were, in percent"
    budget, lanes = run.engine.get("token_budget"), run.engine.get("max_num_seqs")
    if not (budget and lanes):
        return None
    x, label = _time(run)
    computed = list(zip(line.computed_tokens, line.steps, line.padding_tokens, strict=True))
    svg = charts.line_chart(
        x,
        [
            Line(name="lanes in use", values=[100 * count / lanes for count in line.running]),
            Line(
                name="tokens, of the budget",
                values=[100 * tokens / (budget * (steps or 1)) for tokens, steps, _ in computed],
            ),
            Line(
                name="padding, of what was computed",
                values=[100 * waste / ((tokens + waste) or 1) for tokens, _, waste in computed],
                style="dashed",
            ),
        ],
        title=title,
        x_label=label,
        y_max=105,
    )
    note = f"A step has at most {lanes:,} sequences and {budget:,} tokens."
    return Chart(title=title, svg=svg, note=note)


def _time(run: RunFacts) -> tuple[list[Number], str]:
    """The edges of the intervals in a unit that gives small numbers, and its name."""
    edges = run.timeline.edges
    unit, name = next((unit, name) for limit, unit, name in _UNITS if edges[-1] <= limit)
    return [edge / unit for edge in edges], f"{name} since the first row was read"
