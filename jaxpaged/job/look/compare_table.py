"""Two runs side by side on the terminal."""

from collections.abc import Iterator, Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from jaxpaged.job.look.compare import Comparison, FigurePair, ScorePair, Setting
from jaxpaged.job.look.run_figures import Unit
from jaxpaged.job.report_table import plain
from jaxpaged.job.tally import ScoreCount

_MAX_CHARS = 200
_MAX_GROUPS = 20
_NOTHING = "-"

_Row = tuple[str, ...]
"""Of a table: a name, what it is in a, what in b, and in most tables the change."""


def show(found: Comparison, console: rich.console.Console) -> None:
    """Prints what differs, what both came to, their scores, and what to know of it."""
    settings: list[_Row] = [
        ("output", plain(found.a, _MAX_CHARS), plain(found.b, _MAX_CHARS)),
        ("state", plain(found.state_a), plain(found.state_b)),
        *map(_setting, found.settings),
    ]
    console.print(_table("differs", settings, has_change=False))
    console.print(_table("came to", [_figure(figure) for figure in found.figures]))
    if found.scores:
        console.print(_table("score", list(_scores(found.scores))))
    for line in found.input:
        console.print(plain(line, _MAX_CHARS), markup=False, highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(
            f"note: {plain(note, _MAX_CHARS)}", style="yellow", markup=False, soft_wrap=True
        )


def _table(title: str, rows: Sequence[_Row], *, has_change: bool = True) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    table.add_column(title, no_wrap=True)
    for name in ("a", "b", "change") if has_change else ("a", "b"):
        table.add_column(name, overflow="fold", justify="right" if has_change else "left")
    for row in rows:
        table.add_row(*map(rich.text.Text, row))
    return table


def _setting(setting: Setting) -> _Row:
    name = setting.name if setting.subject == "job" else f"{setting.subject} {setting.name}"
    return plain(name), _value(setting.a), _value(setting.b)


def _value(value: object) -> str:
    text = "none" if value is None else value if isinstance(value, str) else repr(value)
    return plain(text, _MAX_CHARS)


def _figure(pair: FigurePair) -> _Row:
    a, b = (_number(value, pair.unit) for value in (pair.a, pair.b))
    return plain(pair.name), a, b, _change(pair)


def _number(value: float | int | None, unit: Unit) -> str:
    if value is None:
        return _NOTHING
    match unit:
        case "count":
            return f"{value:,}"
        case "share":
            return f"{value:.1%}"
        case "seconds":
            return f"{value:,.1f} s"
    return f"{value:,.1f}"


def _change(pair: FigurePair) -> str:
    change = pair.change
    if not change or pair.unit == "share":
        return _points(change)
    sign = "+" if change > 0 else "-"
    less = "" if pair.ratio is None else f" ({pair.ratio - 1:+.1%})"
    return f"{sign}{_number(abs(change), pair.unit)}{less}"


def _points(change: float | int | None) -> str:
    if not change:
        return "" if change is None else "same"
    return f"{100 * change:+.1f} points"


def _scores(scores: Sequence[ScorePair]) -> Iterator[_Row]:
    """For each metric all rows, then the groups; if they are many, those that changed most."""
    for metric in dict.fromkeys(score.metric for score in scores):
        groups = [score for score in scores if score.metric == metric]
        shown = _most_changed([score for score in groups if score.group is not None])
        for score in groups:
            if score.group is None or score in shown:
                name = plain(metric) if score.group is None else f"  {plain(score.group, 40)}"
                yield name, _score(score.a), _score(score.b), _points(score.change)
        hidden = len(groups) - len(shown) - 1
        if hidden > 0:
            yield f"  ... {hidden:,} more, changed less, in the JSON", "", "", ""


def _most_changed(groups: Sequence[ScorePair]) -> list[ScorePair]:
    return sorted(groups, key=lambda score: -abs(score.change or 0))[:_MAX_GROUPS]


def _score(score: ScoreCount | None) -> str:
    if score is None:
        return _NOTHING
    share = "not scored" if score.mean is None else f"{score.mean:.1%}"
    return f"{share} ({score.correct:,} of {score.scored:,})"
