"""A page of sections as one HTML file that needs nothing beside it: no script, no network.

Every text is data: it is escaped, and what cannot be seen in it is made visible. The one exception
is the picture of a `Chart`, which `jaxpaged.pages.charts` drew. Knows nothing of what the sections
are about.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jinja2
import markupsafe

from jaxpaged.pages import text
from jaxpaged.pages.numbers import Number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """A share as a cell of a table: a number with a bar beside it.

    Attributes:
        share: From 0 to 1.
        text: What is written.
    """

    share: Number
    text: str


Cell = str | Meter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and what they are, one below the other."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a head, one of `Tables`.

    Attributes:
        head: The columns' names.
        rows: A cell for each column.
        title: Above it; empty for none.
        numeric: The columns that are set to the right, by position.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    numeric: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Tables, as many side by side as there is room for."""

    kind: ClassVar[str] = "tables"
    tables: Sequence[Table]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture, one of `Charts`.

    Attributes:
        title: Above it.
        svg: As `jaxpaged.pages.charts` gives it; empty for a note without a picture.
        note: Below it; empty for nothing.
    """

    title: str
    svg: str
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Charts:
    """Pictures, as many side by side as there is room for."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Sentences to be read: warnings, or notes."""

    kind: ClassVar[str] = "messages"
    texts: Sequence[str]
    is_warning: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """What was asked and what came of it, with their line breaks.

    Attributes:
        items: Of each a heading, the question and the answer.
    """

    kind: ClassVar[str] = "exchanges"
    items: Sequence[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Facts that are shown when they are asked for."""

    kind: ClassVar[str] = "folded"
    summary: str
    facts: Facts


Block = Facts | Tables | Charts | Messages | Exchanges | Folded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks under a title.

    Attributes:
        title: The title.
        blocks: What is in it; a section without any is left out.
    """

    title: str
    blocks: Sequence[Block]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that is to be seen first, with its name and a few words about it."""

    name: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        title: What it is about.
        state: In a word, beside the title.
        is_good: Whether that word is good news.
        lead: A line below the title.
        figures: The numbers to be seen first.
        sections: The rest.
        foot: The last line.
    """

    title: str
    state: str
    is_good: bool
    lead: str
    figures: Sequence[Figure]
    sections: Sequence[Section]
    foot: str


def render(page: Page) -> str:
    """The page as HTML."""
    return _template().render(page=page)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxpaged.pages"),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def _visible(value: object) -> object:
    """What an expression of the template gives, before it is escaped."""
    if isinstance(value, str) and not isinstance(value, markupsafe.Markup):
        return text.visible(value)
    return value
