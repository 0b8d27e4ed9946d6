"""A report as a table on the terminal, with some completions to look at."""

from collections.abc import Iterator, Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.job.feeder import Sample
from jaxpaged.job.output import output_view
from jaxpaged.job.report import JobReport
from jaxpaged.job.tally import MetricScore, ScoreCount

_MAX_CHARS = 100
_MAX_GROUPS = 20


def show(report: JobReport, console: rich.console.Console) -> None:
    """Prints samples, table and warnings."""
    if report.samples:
        console.print("Some completions:", style="bold")
    for sample in report.samples:
        console.print(_sample(sample), soft_wrap=True)
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(report):
        table.add_row(rich.text.Text(name), rich.text.Text(value))
    console.print(table)
    if report.scores:
        console.print(_score_table(report.scores))
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def plain(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Untrusted text on one line: no control characters, no more than so many characters."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."


def _sample(sample: Sample) -> rich.text.Text:
    return rich.text.Text.assemble(
        (f"  {sample.row}  ", "dim"),
        plain(sample.preview),
        (" -> ", "bold"),
        plain(sample.completion),
    )


def _lines(report: JobReport) -> Iterator[tuple[str, str]]:
    output, run = report.output, report.run
    rows = f"{output.rows:,} of {report.input_rows:,}"
    if run.parts_kept or run.rows_resumed:
        rows += f" ({run.rows:,} in this run, {output.rows - run.rows:,} resumed)"
    yield "rows", rows
    yield "row errors", f"{report.num_errors:,}"
    for error in report.errors:
        first = error.examples[0]
        where = f"{first.file}, row group {first.row_group}, row {first.index}"
        yield f"  {error.code}", f"{error.count:,}, first in {where}: {plain(first.message or '')}"
    if output.num_skipped:
        yield "rows skipped", f"{output.num_skipped:,}"
    if output.truncated_prompts:
        yield "prompts cut", f"{output.truncated_prompts:,}, by {output.truncated_tokens:,} tokens"
    yield "tokens", f"{output.prompt_tokens:,} in, {output.completion_tokens:,} out"
    for name, count in output.adapters.items():
        tokens = f"{count.prompt_tokens:,} tokens in, {count.completion_tokens:,} out"
        yield f"  adapter {plain(name, 40)}", f"{count.rows:,} rows, {tokens}"
    cached, total = output.cached_tokens, output.prompt_tokens
    share = f"{cached:,} of {total:,} prompt tokens came from the cache ({output.cached_share:.1%})"
    yield "prefix cache", share
    yield from _speed(report)
    yield "cut at a limit", f"{output.truncated_share:.1%} of the rows"
    yield "output", output.path
    yield "report", f"{output.path}/{output_view.REPORT}"
    if report.has_page:
        yield "page", f"{output.path}/{output_view.PAGE}"


def _speed(report: JobReport) -> Iterator[tuple[str, str]]:
    run = report.run
    speeds = [
        ("prefill", run.tokens_per_second("prefill")),
        ("decode", run.tokens_per_second("decode")),
    ]
    known = [f"{phase} {speed:,.0f}" for phase, speed in speeds if speed is not None]
    if known:
        yield "tokens/s", ", ".join(known)
    compiling = run.engine.get("compile_seconds")
    inside = "" if compiling is None else f" ({compiling:,.1f} s of it to compile)"
    yield "time", f"{run.seconds:,.1f} s{inside}, after {run.load_seconds:,.1f} s to load the model"
    recomputes, swaps = (run.engine.get(name, 0) for name in ("recomputes", "swaps"))
    if recomputes or swaps:
        yield "preemptions", f"{recomputes:,} by recompute, {swaps:,} by swap"
    if run.engine:
        names = ("device", "dtype", "weight_dtype", "implementation")
        shown = [str(run.engine[name]) for name in names if name in run.engine]
        # Weights that are not quantised have the dtype that was named already.
        yield "engine", ", ".join(dict.fromkeys(shown))


def _score_table(scores: Sequence[MetricScore]) -> rich.table.Table:
    """A column for each metric; a row for all, then one for each group."""
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    for title in ("score", *(score.metric for score in scores)):
        table.add_column(title, no_wrap=True)
    table.add_row("all rows", *(_share(score.overall) for score in scores))
    groups = list(scores[0].by)
    for group in groups[:_MAX_GROUPS]:
        counts = (_share(score.by[group]) for score in scores)
        table.add_row(rich.text.Text(plain(group, 40)), *counts)
    if len(groups) > _MAX_GROUPS:
        table.add_row(f"... {len(groups) - _MAX_GROUPS} more in the report")
    return table


def _share(count: ScoreCount) -> str:
    share = "not scored" if count.mean is None else f"{count.mean:.1%}"
    return f"{share} ({count.correct:,} of {count.scored:,})"
