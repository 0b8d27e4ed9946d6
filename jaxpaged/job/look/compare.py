"""Two runs side by side: in what their jobs differ, and what each came to.

Goes by the reports and by what the folders remember of their jobs. Reads no rows: how these differ
is what `diff` says.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxpaged.job.look import job_difference, known_job, run_figures, run_report
from jaxpaged.job.look.run_figures import Unit
from jaxpaged.job.look.run_report import RunReport
from jaxpaged.job.output import attempt, identity
from jaxpaged.job.output.history import History
from jaxpaged.job.tally import ScoreCount
from jaxpaged.storage.store import Store

Subject = Literal["job", "model", "revision", "engine", "version"]

_ENGINE_FACTS = (
    *("device", "dtype", "weight_dtype", "kv_dtype", "is_deterministic"),
    *("implementation", "implementation_reason", "block_size"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that differs between the two, in JSON's types; None where one has no such thing.

    Attributes:
        subject: What it is of: the "job" file, the "model"'s files, a "revision" of the output,
            the "engine" as it ran, the "version" of a package.
        name: A key, a part of the model, a number, a property, a package.
        a: What it is in the first one.
        b: What it is in the second one.
    """

    subject: Subject
    name: str
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FigurePair:
    """A figure of both; None where a report does not have it.

    Attributes:
        name: Of what.
        unit: What it counts in.
        a: That of the first one.
        b: That of the second one.
    """

    name: str
    unit: Unit
    a: float | int | None
    b: float | int | None

    @property
    def change(self) -> float | int | None:
        """The second one less the first one."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        """The second one over the first one."""
        return None if self.b is None or not self.a else self.b / self.a


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScorePair:
    """A metric of both, over all rows or those of a group; None where one was not scored so.

    Attributes:
        metric: Its name.
        group: The value of the grouping column; None for all rows.
        a: That of the first one.
        b: That of the second one.
    """

    metric: str
    group: str | None
    a: ScoreCount | None
    b: ScoreCount | None

    @property
    def change(self) -> float | None:
        """The second share of right rows less the first one."""
        mean_a, mean_b = (None if side is None else side.mean for side in (self.a, self.b))
        return None if mean_a is None or mean_b is None else mean_b - mean_a


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs side by side, "a" and "b".

    Attributes:
        a: Where the first output lies.
        b: Where the second one lies.
        state_a: How the first one's last run ended.
        state_b: How the second one's did.
        settings: What differs between their jobs, and what ran them.
        input: What differs between their input files, a line each.
        figures: What both came to; what neither has, or is 0 in both, is left out.
        scores: Their scores, for each metric first over all rows, then by group.
        notes: What one must know to read the figures, a line each.
    """

    a: str
    b: str
    state_a: str
    state_b: str
    settings: tuple[Setting, ...]
    input: tuple[str, ...]
    figures: tuple[FigurePair, ...]
    scores: tuple[ScorePair, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The attributes in JSON's types; figures with `change` and `ratio`, scores with `change`,
        each side of a score with `mean`."""
        values = dataclasses.asdict(self)
        for pair, figure in zip(self.figures, values["figures"], strict=True):
            figure |= {"change": pair.change, "ratio": pair.ratio}
        for pair, score in zip(self.scores, values["scores"], strict=True):
            score["change"] = pair.change
            for name, side in (("a", pair.a), ("b", pair.b)):
                if side is not None:
                    score[name]["mean"] = side.mean
        return values


def compare(a: Store, b: Store) -> Comparison:
    """Compares the last runs of two outputs, finished or not.

    Raises:
        OutputConflictError: One of them is no output of jaxpaged's, or has no report.
        StorageError: One of them cannot be read.
    """
    known_a, known_b = known_job.read(a), known_job.read(b)
    report_a, report_b = run_report.read(a), run_report.read(b)
    figures = tuple(_figures(report_a, report_b))
    return Comparison(
        a=a.url,
        b=b.url,
        state_a=report_a.text("state") or "unknown",
        state_b=report_b.text("state") or "unknown",
        settings=tuple(_settings(_facts(report_a, known_a), _facts(report_b, known_b))),
        input=tuple(job_difference.changed_files(known_a, known_b)),
        figures=figures,
        scores=tuple(_scores(report_a, report_b)),
        notes=(*_notes("a", a, report_a), *_notes("b", b, report_b), *_sharing(figures)),
    )


def _facts(report: RunReport, known: History) -> dict[tuple[Subject, str], Any]:
    """All that may differ between two jobs."""
    facts: dict[tuple[Subject, str], Any] = {}
    # Where the output lies is what the two are told apart by.
    for key in sorted((identity.RESULT_KEYS | identity.RUN_KEYS) - {"output.path"}):
        facts["job", key] = report.value("job", *key.split("."))
    for part, value in known.job.model.items():
        facts["model", part] = value
    for retry in known.retries:
        facts["revision", str(retry.number)] = job_difference.describe(retry)
    for name in _ENGINE_FACTS:
        facts["engine", name] = report.value("run", "engine", name)
    versions = report.value("versions")
    for name, number in versions.items() if isinstance(versions, dict) else ():
        facts["version", name] = number
    return facts


def _settings(
    a: dict[tuple[Subject, str], Any], b: dict[tuple[Subject, str], Any]
) -> Iterator[Setting]:
    for subject, name in a | b:
        value_a, value_b = (side.get((subject, name)) for side in (a, b))
        # A run that had no row to complete has no engine, and older reports say less of it.
        is_unknown = subject in ("engine", "version") and (value_a is None or value_b is None)
        if value_a != value_b and not is_unknown:
            yield Setting(subject=subject, name=name, a=value_a, b=value_b)


def _figures(a: RunReport, b: RunReport) -> Iterator[FigurePair]:
    figures_a, figures_b = (
        {figure.name: figure for figure in run_figures.figures(report)} for report in (a, b)
    )
    for name, figure in (figures_a | figures_b).items():
        value_a, value_b = (
            side[name].value if name in side else None for side in (figures_a, figures_b)
        )
        if value_a or value_b:
            yield FigurePair(name=name, unit=figure.unit, a=value_a, b=value_b)


def _scores(a: RunReport, b: RunReport) -> Iterator[ScorePair]:
    scores_a, scores_b = a.scores(), b.scores()
    for metric in dict.fromkeys(metric for metric, _ in (*scores_a, *scores_b)):
        groups = dict.fromkeys(group for name, group in (*scores_a, *scores_b) if name == metric)
        for group in groups:
            key = metric, group
            yield ScorePair(metric=metric, group=group, a=scores_a.get(key), b=scores_b.get(key))


def _notes(side: str, store: Store, report: RunReport) -> Iterator[str]:
    number = report.number("run", "attempt")
    last = attempt.last_attempt(store)
    if number is not None and last is not None and last.number > number:
        yield (
            f"{side}: attempt {last.number} began after the one of this report ({number}), and has "
            "not left one"
        )
    rows, total = report.number("output", "rows"), report.number("input_rows")
    if rows is not None and total is not None and rows < total:
        yield f"{side} is not finished: {rows:,} of {total:,} rows"
    own = report.number("run", "rows")
    if own is not None and rows is not None and own < rows:
        yield (
            f"{side}: times, speeds and memory are of its last run, which completed {own:,} of "
            f"{rows:,} rows"
        )


def _sharing(figures: Sequence[FigurePair]) -> Iterator[str]:
    name = run_figures.KV_WASTE
    waste = [value for pair in figures if pair.name == name for value in (pair.a, pair.b)]
    if any(value is not None and value < 0 for value in waste):
        yield f"{name} below 0: sequences share blocks, whose tokens count for each of them"
