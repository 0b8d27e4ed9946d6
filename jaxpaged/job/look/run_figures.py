"""What a run came to, as figures with names: rows and tokens, speed, memory.

Of the engine's counters it makes shares and rates that say the same of jobs of any size.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

from jaxpaged.job.look.run_report import RunReport
from jaxpaged.request import ErrorCode, FinishReason

KV_WASTE = "KV waste"
"""The share of slots held that hold no token. Below 0 where sequences share blocks, for a shared
token counts for each of them."""

Unit = Literal["count", "mean", "share", "seconds", "per second"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number.

    Attributes:
        name: Of what.
        unit: What it counts in.
        value: The number; None if the report does not have it.
    """

    name: str
    unit: Unit
    value: float | int | None


def figures(report: RunReport) -> Iterator[Figure]:
    """All figures of a report: first of all rows in the output, then of the last run alone."""
    yield from _rows(report)
    yield from _tokens(report)
    yield from _run(report)
    yield from _engine(report)


def _rows(report: RunReport) -> Iterator[Figure]:
    yield _figure("input rows", "count", report.number("input_rows"))
    yield _figure("rows", "count", report.number("output", "rows"))
    reasons = dict.fromkeys(get_args(FinishReason), 0) | report.counts("output", "finish_reasons")
    for reason, count in reasons.items():
        yield _figure(f"finish_reason {reason}", "count", count)
    for code, count in (dict.fromkeys(get_args(ErrorCode), 0) | report.error_counts()).items():
        yield _figure(f"error_code {code}", "count", count)
    for name in ("partial_characters", "truncated_prompts", "truncated_tokens"):
        yield _figure(name.replace("_", " "), "count", report.number("output", name))


def _tokens(report: RunReport) -> Iterator[Figure]:
    prompt, completion, cached, rows = (
        report.number("output", name)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "rows")
    )
    yield _figure("prompt tokens", "count", prompt)
    yield _figure("completion tokens", "count", completion)
    yield _figure("completion tokens a row", "mean", _ratio(completion, rows))
    yield _figure("prompt tokens from the prefix cache", "share", _ratio(cached, prompt))


def _run(report: RunReport) -> Iterator[Figure]:
    rows, seconds = report.number("run", "rows"), report.number("run", "seconds")
    yield _figure("rows of the run", "count", rows)
    yield _figure("rows from the journal", "count", report.number("run", "rows_resumed"))
    yield _figure("time to load", "seconds", report.number("run", "load_seconds"))
    yield _figure("time", "seconds", seconds)
    yield _figure("time to compile", "seconds", report.number("run", "engine", "compile_seconds"))
    yield _figure("rows per second", "per second", _ratio(rows, seconds))


def _engine(report: RunReport) -> Iterator[Figure]:
    found = {
        name: report.number("run", "engine", name)
        for name in (
            *("prefill_tokens", "prefill_seconds", "decode_tokens", "decode_seconds"),
            *("prompt_tokens", "cached_tokens", "padding_tokens"),
            *("live_slot_steps", "reserved_slot_steps"),
        )
    }
    for phase in ("prefill", "decode"):
        speed = _ratio(found[f"{phase}_tokens"], found[f"{phase}_seconds"])
        yield _figure(f"{phase} tokens per second", "per second", speed)
    hits = _ratio(found["cached_tokens"], found["prompt_tokens"])
    yield _figure("prefix hits", "share", hits)
    for name in ("recomputes", "swaps"):
        count = report.number("run", "engine", name)
        yield _figure(f"preemptions by {name.removesuffix('s')}", "count", count)
    computed = _sum(found["prefill_tokens"], found["decode_tokens"], found["padding_tokens"])
    yield _figure("padding", "share", _ratio(found["padding_tokens"], computed))
    live = _ratio(found["live_slot_steps"], found["reserved_slot_steps"])
    yield _figure(KV_WASTE, "share", None if live is None else 1 - live)
    for name, key in (
        ("peak blocks in use", "peak_used_blocks"),
        ("blocks", "num_blocks"),
        ("steps", "steps"),
        ("executables", "executables"),
    ):
        yield _figure(name, "count", report.number("run", "engine", key))


def _figure(name: str, unit: Unit, value: float | int | None) -> Figure:
    return Figure(name=name, unit=unit, value=value)


def _ratio(value: float | int | None, whole: float | int | None) -> float | None:
    return value / whole if value is not None and whole else None


def _sum(*values: float | int | None) -> float | int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
