"""The report of a run as one HTML page.

Texts of rows, paths and keys are nobody's word: they go into the page as text. Knows the report
alone, neither the folder nor the input.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxpaged.job.html import result_blocks, run_charts
from jaxpaged.job.report import JobReport, RunFacts
from jaxpaged.pages import charts, numbers, page, text
from jaxpaged.pages.page import Charts, Facts, Figure, Folded, Messages, Page, Section

_GOOD_STATES = ("finished", "already finished")
_MAX_TITLE_CHARS = 80
_MAX_CHARS = 1000


def render(report: JobReport) -> str:
    """The page.

    Raises:
        ConfigError: matplotlib, which draws the charts, is not installed.
    """
    charts.require()
    return page.render(
        Page(
            title=text.cut(_title(report.output.path), _MAX_TITLE_CHARS),
            state=report.state,
            is_good=report.state in _GOOD_STATES,
            lead=text.cut(report.output.path, _MAX_CHARS),
            figures=list(_figures(report)),
            sections=_sections(report),
            foot=f"jaxpaged {report.versions.get('jaxpaged', '')}, {report.written}",
        )
    )


def _title(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2] or path


def _sections(report: JobReport) -> list[Section]:
    run, samples = report.run, result_blocks.samples(report)
    lengths = result_blocks.length_charts(report.output)
    results = [*result_blocks.outcomes(report), *_charts(lengths)]
    return [
        Section(title="What to look at", blocks=list(_messages(report))),
        Section(title="Scores", blocks=result_blocks.scores(report)),
        Section(title="Rows", blocks=results),
        Section(title="Some rows", blocks=samples),
        Section(title="Speed", blocks=[*_charts(run_charts.speed(run)), *_facts(_speed(run))]),
        Section(title="Memory", blocks=[*_charts(run_charts.pool(run)), *_facts(_memory(report))]),
        Section(
            title="Batches", blocks=[*_charts(run_charts.batches(run)), *_facts(_batches(run))]
        ),
        Section(title="The slowest rows, waiting included", blocks=result_blocks.slow_rows(report)),
        Section(title="What ran", blocks=[*_facts(_what_ran(report)), *_folded(report)]),
    ]


def _messages(report: JobReport) -> Iterator[Messages]:
    ended = [f"The run ended early: {report.message}"] if report.message else []
    if warnings := [*ended, *report.warnings]:
        yield Messages(texts=_cut(warnings), is_warning=True)
    if report.notes:
        yield Messages(texts=_cut(report.notes))


def _figures(report: JobReport) -> Iterator[Figure]:
    output, run = report.output, report.run
    of = f"of {report.input_rows:,}"
    # Others may be finished, too, and in no part yet.
    of += " are in finished parts" if output.rows < report.input_rows else ""
    yield Figure(name="rows", value=f"{output.rows:,}", note=of)
    failed = f"{output.error_share:.1%} of the rows" if output.rows else ""
    yield Figure(name="failed", value=f"{report.num_errors:,}", note=failed)
    for score in report.scores[:1]:
        overall = score.overall
        share = "not scored" if overall.mean is None else f"{overall.mean:.1%}"
        right = f"{overall.correct:,} of {overall.scored:,}"
        yield Figure(name=score.metric, value=share, note=right)
    tokens = f"{numbers.short(output.completion_tokens)}"
    yield Figure(name="tokens out", value=tokens, note=f"{numbers.short(output.prompt_tokens)} in")
    sampled = run.engine.get("sampled_tokens", 0)
    if run.seconds and sampled:
        speed = f"{numbers.short(sampled / run.seconds)}/s"
        yield Figure(name="speed", value=speed, note="tokens out, over the whole run")
    if run.seconds:
        loading = f"and {numbers.duration(run.load_seconds)} to load"
        yield Figure(name="time", value=numbers.duration(run.seconds), note=loading)


def _speed(run: RunFacts) -> Iterator[tuple[str, str]]:
    engine = run.engine
    prefill, decode = run.tokens_per_second("prefill"), run.tokens_per_second("decode")
    if prefill is not None:
        yield "prefill", f"{prefill:,.0f} tokens/s in the time of steps with prompts in them"
    if decode is not None:
        yield "decode", f"{decode:,.0f} tokens/s in the time of steps that only decode"
    if "compile_seconds" in engine:
        programs = f"{engine.get('executables', 0):,} programs"
        yield "compiled", f"{programs} in {numbers.duration(engine['compile_seconds'])}"
    if "host_seconds" in engine and (worked := _device_seconds(run)):
        share = (engine["host_seconds"] or 0.0) / worked
        yield "host", f"{share:.1%} of the steps' time went into planning, batches and text"
    if engine.get("steps"):
        starved = engine.get("starved_steps", 0)
        yield "steps", f"{engine['steps']:,}; before {starved:,} of them the device had no work"


def _memory(report: JobReport) -> Iterator[tuple[str, str]]:
    run, output = report.run, report.output
    engine = run.engine
    if run.peak_memory_bytes:
        yield "peak of the process", numbers.memory(run.peak_memory_bytes)
    if run.pool:
        yield "pool", run.pool
    if "peak_used_blocks" in engine and engine.get("num_blocks"):
        used, blocks = engine["peak_used_blocks"], engine["num_blocks"]
        yield "most blocks in use", f"{used:,} of {blocks:,} ({used / blocks:.1%})"
    if reserved := engine.get("reserved_slot_steps"):
        # Where blocks are shared, more tokens are alive than there are slots in use.
        alive = engine["live_slot_steps"] / reserved
        if alive > 1:
            yield "KV waste", f"none: by shared blocks a slot in use held {alive:.2f} tokens"
        else:
            yield "KV waste", f"{1 - alive:.1%} of the slots of blocks in use held no token"
    if output.prompt_tokens:
        cached = f"{output.cached_tokens:,} of {output.prompt_tokens:,} prompt tokens"
        yield "prefix hits", f"{cached} ({output.cached_share:.1%})"
    if "evictions" in engine:
        evictions, copies = engine["evictions"], engine.get("copied_blocks", 0)
        yield "prefix cache", f"{evictions:,} blocks evicted, {copies:,} copied to be written to"
    if "recomputes" in engine:
        recomputes, swaps = engine["recomputes"], engine.get("swaps", 0)
        yield "preemptions", f"{recomputes:,} by recompute, {swaps:,} by swap"


def _batches(run: RunFacts) -> Iterator[tuple[str, str]]:
    engine = run.engine
    computed = engine.get("prefill_tokens", 0) + engine.get("decode_tokens", 0)
    if computed and engine.get("steps"):
        yield "tokens of a step", f"{computed / engine['steps']:,.1f} on average"
    padding = engine.get("padding_tokens", 0)
    if computed:
        share = padding / (computed + padding)
        yield "padding", f"{padding:,} token positions, {share:.1%} of what was computed"


def _dtypes(engine: Mapping[str, Any]) -> Iterator[str]:
    dtype, weight_dtype = engine.get("dtype"), engine.get("weight_dtype")
    yield str(dtype)
    if weight_dtype not in (None, dtype):
        yield f"linear maps in {weight_dtype}"
    if engine.get("kv_dtype"):
        yield f"KV pool in {engine['kv_dtype']}"


def _what_ran(report: JobReport) -> Iterator[tuple[str, str]]:
    run, known = report.run, report.identity
    engine = run.engine
    yield "model", str(report.job.get("model", ""))
    if "device" in engine:
        yield "device", str(engine["device"])
        yield "dtype", ", ".join(_dtypes(engine))
        reason = engine.get("implementation_reason")
        why = f" ({reason})" if reason else ""
        yield "attention", f"{engine.get('implementation')}{why}"
        if "is_deterministic" in engine:
            yield "deterministic", "yes" if engine["is_deterministic"] else "no"
    yield "run", _run(run)
    if known is not None:
        yield "job began", known.created
        yield "input files", f"{known.input_files:,}, {numbers.memory(known.input_bytes)}"
        yield "fingerprint", known.fingerprint
        if known.revisions:
            yield "revisions", f"{known.revisions:,}"


def _run(run: RunFacts) -> str:
    parts = [f"attempt {run.attempt:,}", f"{run.rows:,} rows completed"]
    counts = (
        (run.rows_resumed, "rows from the journal"),
        (run.parts_kept, "parts of earlier runs kept"),
        (run.parts_adopted, "adopted"),
        (run.parts_discarded, "made again"),
    )
    return ", ".join([*parts, *(f"{count:,} {what}" for count, what in counts if count)])


def _folded(report: JobReport) -> Iterator[Folded]:
    folded = {
        "All keys of the job": _flat(report.job),
        "Versions": report.versions.items(),
        "Fingerprints of the model": report.identity.model.items() if report.identity else (),
    }
    for summary, rows in folded.items():
        for facts in _facts(rows):
            yield Folded(summary=summary, facts=facts)


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys by dotted name, with values as JSON."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{name}", shown


def _device_seconds(run: RunFacts) -> float:
    return sum(run.engine.get(f"{phase}_seconds") or 0.0 for phase in ("prefill", "decode"))


def _charts(found: list[page.Chart]) -> list[Charts]:
    return [Charts(charts=found)] if found else []


def _facts(rows: Iterable[tuple[str, str]]) -> list[Facts]:
    found = [(text.cut(name, _MAX_CHARS), text.cut(value, _MAX_CHARS)) for name, value in rows]
    return [Facts(rows=found)] if found else []


def _cut(texts: Iterable[str]) -> list[str]:
    return [text.cut(one, _MAX_CHARS) for one in texts]
