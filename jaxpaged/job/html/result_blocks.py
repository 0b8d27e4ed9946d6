"""What a job gave, as tables and charts: outcomes, scores, lengths, the slowest rows, samples."""

from collections.abc import Mapping

from jaxpaged.job import lengths
from jaxpaged.job.report import JobReport, OutputFacts
from jaxpaged.job.tally import MetricScore, RowError, ScoreCount
from jaxpaged.pages import charts, text
from jaxpaged.pages.page import Cell, Chart, Exchanges, Meter, Table, Tables

_MAX_GROUPS = 40
_MAX_CHARS = 300
_MAX_NAME_CHARS = 80
_MAX_SAMPLE_CHARS = 2000

# Fewer are a few numbers, no picture.
_LEAST_ROWS = 20

_MEANINGS = {
    "stop": "stop: an end token or a stop string",
    "length": "length: cut off at a limit",
    "error": "error",
    "skipped": "skipped",
}


def outcomes(report: JobReport) -> list[Tables]:
    """How rows ended, and the errors among them."""
    output = report.output
    if not output.rows:
        return []
    known = [reason for reason in _MEANINGS if output.finish_reasons.get(reason)]
    others = sorted(output.finish_reasons.keys() - known)
    reasons = {reason: output.finish_reasons[reason] for reason in (*known, *others)}
    rows: list[tuple[Cell, ...]] = [
        (_MEANINGS.get(reason, reason), _share(count, output.rows), f"{count:,}")
        for reason, count in reasons.items()
        if count
    ]
    found = [Table(head=("finish reason", "share", "rows"), rows=rows, numeric=frozenset({2}))]
    if report.errors:
        errors = [
            (
                text.cut(error.code, _MAX_NAME_CHARS),
                f"{error.count:,}",
                "\n".join(map(_error, error.examples)),
            )
            for error in report.errors
        ]
        head = ("error code", "rows", "for example")
        found.append(Table(head=head, rows=errors, numeric=frozenset({1})))
    if output.adapters:
        adapters = [
            (
                text.cut(name, _MAX_NAME_CHARS),
                f"{count.rows:,}",
                f"{count.prompt_tokens:,}",
                f"{count.completion_tokens:,}",
            )
            for name, count in output.adapters.items()
        ]
        head = ("adapter", "rows", "tokens in", "tokens out")
        found.append(Table(head=head, rows=adapters, numeric=frozenset({1, 2, 3})))
    return [Tables(tables=found)]


def scores(report: JobReport) -> list[Tables]:
    """A table for each metric: all rows, then each group."""
    tables = [_scores(score) for score in report.scores]
    return [Tables(tables=tables)] if tables else []


def length_charts(output: OutputFacts) -> list[Chart]:
    """How long prompts and completions were."""
    both = (
        ("Length of prompts", output.prompt_lengths),
        ("Length of completions", output.completion_lengths),
    )
    return [_lengths(title, counts) for title, counts in both if sum(counts.values())]


def slow_rows(report: JobReport) -> list[Tables]:
    """The rows that took longest from the moment the engine was given them."""
    rows = [
        (
            text.cut(_address(row.file, row.row_group, row.index), _MAX_CHARS),
            f"{row.seconds:,.2f}",
            f"{row.prompt_tokens:,}",
            f"{row.completion_tokens:,}",
        )
        for row in report.run.slow_rows
    ]
    head = ("row", "seconds", "tokens in", "tokens out")
    table = Table(head=head, rows=rows, numeric=frozenset({1, 2, 3}))
    return [Tables(tables=[table])] if rows else []


def samples(report: JobReport) -> list[Exchanges]:
    """Some rows as they were asked and answered."""
    items = [
        (
            text.cut(sample.row, _MAX_CHARS),
            text.cut(sample.preview, _MAX_SAMPLE_CHARS),
            text.cut(sample.completion, _MAX_SAMPLE_CHARS),
        )
        for sample in report.samples
    ]
    return [Exchanges(items=items)] if items else []


def _scores(score: MetricScore) -> Table:
    groups = list(score.by.items())
    shown: list[tuple[str, ScoreCount]] = [("all rows", score.overall)]
    shown += [(text.cut(name, _MAX_NAME_CHARS), count) for name, count in groups[:_MAX_GROUPS]]
    rows = [
        (
            name,
            "not scored" if count.mean is None else _share(count.correct, count.scored),
            f"{count.correct:,}",
            f"{count.scored:,}",
        )
        for name, count in shown
    ]
    if len(groups) > _MAX_GROUPS:
        rows.append((f"{len(groups) - _MAX_GROUPS} more in report.json", "", "", ""))
    head = ("group" if groups else "", "share", "right", "of")
    return Table(title=score.metric, head=head, rows=rows, numeric=frozenset({2, 3}))


def _lengths(title: str, counts: Mapping[int, int]) -> Chart:
    num_rows = sum(counts.values())
    half, most, longest = (lengths.quantile(counts, share) for share in (0.5, 0.9, 1.0))
    about = "about " if lengths.width_of(longest) > 1 else ""
    note = f"Half have up to {half:,} tokens, 90 % up to {most:,}, the longest {about}{longest:,}."
    if num_rows < _LEAST_ROWS:
        return Chart(title=title, svg="", note=note)
    bars = lengths.histogram(counts)
    if bars.num_beyond:
        note += f" Not drawn: the {bars.num_beyond:,} longest."
    svg = charts.histogram(bars.edges, bars.counts, title=title, x_label="tokens")
    return Chart(title=title, svg=svg, note=note)


def _share(count: int, total: int) -> Meter:
    share = count / total if total else 0.0
    return Meter(share=share, text=f"{share:.1%}")


def _error(row: RowError) -> str:
    address = _address(row.file, row.row_group, row.index)
    return text.cut(f"{address}: {row.message or ''}", _MAX_CHARS)


def _address(file: str, row_group: int, index: int) -> str:
    return f"{file}, row group {row_group}, row {index}"
