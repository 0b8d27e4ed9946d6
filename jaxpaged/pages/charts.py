"""Charts: numbers in, the text of one `<svg>` element out, drawn by matplotlib.

The same numbers give the same text. Colours are variables of the page (`--ink`, `--grid`,
`--series-1`, `--bad`), so that a chart is readable on a light page and on a dark one; text stays
text, in the page's own font, and nothing refers to anything outside. matplotlib, an extra, is
imported by the first chart that is drawn.
"""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from jaxpaged.errors import ConfigError
from jaxpaged.pages import numbers, text
from jaxpaged.pages.numbers import Number

if TYPE_CHECKING:
    import matplotlib.axes

# In points, which are the units of the picture: about as wide as a phone, where it is shown as it
# is; elsewhere it grows with its text.
_WIDTH = 330.0
_PLOT_HEIGHT = 130.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 10.0, 8.0, 34.0
_LEGEND_LINE = 14.0
_LEGEND_CHARS = 52
_BAR_HEIGHT = 30.0
_BAR_CHARS = 48
_FONT_SIZE = 9.5

# Colours that matplotlib is told, and what is written instead of them.
_INK, _GRID, _SHADE = "#000001", "#000002", "#000003"
_SERIES = ("#000011", "#000012", "#000013", "#000014")
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    _SHADE: "var(--bad)",
    **{color: f"var(--series-{place})" for place, color in enumerate(_SERIES, 1)},
}

_SETTINGS: dict[str, object] = {
    "svg.fonttype": "none",
    "font.size": _FONT_SIZE,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "legend.labelspacing": 0.3,
}

_NUMBER = re.compile(r"-?\d+\.\d+")
_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series of a line chart.

    Attributes:
        name: For the legend; empty for none.
        values: The numbers, NaN where there are none.
        style: An "area" is filled down to 0.
    """

    name: str
    values: Sequence[Number]
    style: Literal["solid", "dashed", "area"] = "solid"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """Where a background is tinted.

    Attributes:
        name: What that means, for the legend.
        where: Of each value of the lines, whether it is tinted there.
    """

    name: str
    where: Sequence[bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a bar chart: its name above it, the text of its value behind it."""

    name: str
    value: Number
    text: str


def require() -> None:
    """Finds out whether charts can be drawn here, without the time it takes to get ready for it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "charts need the package matplotlib; install it: pip install 'jaxpaged[report]'"
        )


def line_chart(
    x: Sequence[Number],
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_max: Number | None = None,
    limit: tuple[str, Number] | None = None,
    shade: Shade | None = None,
) -> str:
    """Lines over time, or over anything that grows.

    Args:
        x: As many numbers as each line has values, or one more: the edges of intervals in each of
            which a value holds.
        lines: At most four.
        title: What is seen, for those who cannot see it.
        x_label: What `x` is.
        y_max: Where the vertical axis ends; None for a little above the largest value.
        limit: A level to draw across, by name; shown only if it lies within the axis.
        shade: Where the background is tinted; left out if it is nowhere.
    """
    names = [line.name for line in lines if line.name]
    if shade is not None and any(shade.where):
        names.append(shade.name)
    holds = len(x) == len(lines[0].values) + 1
    across = [edge for edge in x for _ in range(2)][1:-1] if holds else x
    with _axes(title, legend=names) as (axes, output):
        known = [value for line in lines for value in line.values if math.isfinite(value)]
        top = y_max or 1.08 * max(known, default=0)
        for color, line in zip(_SERIES, lines, strict=False):
            up = _twice(line.values) if holds else line.values
            if line.style == "area":
                axes.fill_between(across, up, color=color, alpha=0.18, linewidth=0)
            dashes = "--" if line.style == "dashed" else "-"
            axes.plot(across, up, dashes, color=color, label=line.name or "_")
        if shade is not None and any(shade.where):
            where = _twice(shade.where) if holds else shade.where
            look = {"color": _SHADE, "alpha": 0.14, "linewidth": 0}
            axes.fill_between(across, 0, top, where=where, label=shade.name, **look)
        if limit is not None and limit[1] <= top:
            axes.axhline(limit[1], color=_INK, linewidth=1, linestyle=":")
            place = {"xy": (x[-1], limit[1]), "xytext": (0, 3), "textcoords": "offset points"}
            axes.annotate(limit[0], **place, horizontalalignment="right")
        axes.set_ylim(0, top or 1)
        axes.set_xlim(x[0], x[-1] if x[-1] > x[0] else x[0] + 1)
        axes.set_xlabel(x_label)
        _ticks(axes)
    return output.svg


def histogram(edges: Sequence[Number], counts: Sequence[int], *, title: str, x_label: str) -> str:
    """How many lie between each two edges.

    Args:
        edges: One more than there are counts.
        counts: How many.
        title: What is seen, for those who cannot see it.
        x_label: What is counted by.
    """
    with _axes(title) as (axes, output):
        widths = [stop - start for start, stop in itertools.pairwise(edges)]
        axes.bar(edges[:-1], counts, widths, align="edge", color=_SERIES[0], linewidth=0)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1.08 * max(counts, default=0) or 1)
        axes.set_xlabel(x_label)
        _ticks(axes, is_whole=True)
    return output.svg


def bar_chart(bars: Sequence[Bar], *, title: str) -> str:
    """Bars that lie one above the other, from 0.

    Args:
        bars: From the top down.
        title: What is seen, for those who cannot see it.
    """
    with _axes(title, height=_BAR_HEIGHT * max(1, len(bars)), margins=(2, 2, 2, 2)) as drawing:
        axes, output = drawing
        longest = max((bar.value for bar in bars), default=0) or 1
        for row, bar in enumerate(bars):
            name = text.cut(bar.name, _BAR_CHARS)
            axes.text(0, row - 0.12, text.visible(name), verticalalignment="bottom")
            axes.barh(row + 0.15, bar.value, 0.36, color=_SERIES[0], linewidth=0)
            place = {"xy": (bar.value, row + 0.15), "xytext": (4, 0)}
            axes.annotate(
                text.visible(bar.text),
                **place,
                textcoords="offset points",
                verticalalignment="center",
            )
        # Room for the longest bar's own text.
        axes.set_xlim(0, 1.3 * longest)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_axis_off()
    return output.svg


def _twice(values: Sequence[Number]) -> list[Number]:
    """Each value at the beginning and at the end of its interval."""
    return [value for value in values for _ in range(2)]


@dataclasses.dataclass(slots=True)
class _Output:
    svg: str = ""


@contextlib.contextmanager
def _axes(
    title: str,
    *,
    legend: Sequence[str] = (),
    height: Number = _PLOT_HEIGHT,
    margins: tuple[Number, Number, Number, Number] = (_LEFT, _RIGHT, _TOP, _BOTTOM),
) -> Iterator[tuple["matplotlib.axes.Axes", _Output]]:
    """Axes to draw on, and where the text of the picture is once the context is left."""
    # Here, because it takes half a second, which nobody should wait for who draws nothing.
    import matplotlib.style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    title = text.visible(title)
    columns = len(legend) if sum(len(name) + 6 for name in legend) <= _LEGEND_CHARS else 1
    num_lines = -(-len(legend) // columns) if legend else 0
    left, right, top, bottom = margins
    top += _LEGEND_LINE * num_lines
    total = top + height + bottom
    output = _Output()
    # Ids are salted with the title, so that two charts of one page share none.
    style = {**_SETTINGS, "svg.hashsalt": title}
    with matplotlib.style.context(["default", style]), warnings.catch_warnings():
        # matplotlib measures text with a font that may lack a character; the page's has it.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(_WIDTH / 72, total / 72), frameon=False)
        FigureCanvasSVG(figure)
        place = (left / _WIDTH, bottom / total, 1 - (left + right) / _WIDTH, height / total)
        axes = figure.add_axes(place)
        axes.patch.set_visible(False)
        yield axes, output
        if legend:
            anchor = (4 / _WIDTH, 1 - 2 / total)
            figure.legend(loc="upper left", bbox_to_anchor=anchor, ncols=columns)
        written = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    output.svg = _inline(written.getvalue(), title)


def _ticks(axes: "matplotlib.axes.Axes", *, is_whole: bool = False) -> None:
    """Few of them, with short numbers; whole ones where others make no sense."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axis, most in ((axes.xaxis, 6), (axes.yaxis, 4)):
        axis.set_major_locator(MaxNLocator(most, integer=is_whole))
        axis.set_major_formatter(FuncFormatter(lambda value, _: numbers.short(value)))


def _inline(svg: bytes, title: str) -> str:
    """A picture as an element of a page: no document type, no namespaces, no names of fonts."""
    root = ET.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if _HREF in element.attrib:
            element.set("href", element.attrib.pop(_HREF))
        if "style" in element.attrib:
            element.set("style", _style(element.attrib["style"]))
        if "d" in element.attrib:
            element.set("d", _path(element.attrib["d"]))
        if element.attrib.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        element.text, element.tail = (element.text or "").strip() or None, None
    _drop_unused_ids(root)
    _prune(root)
    attributes = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    root.attrib.clear()
    root.attrib.update(attributes)
    return ET.tostring(root, encoding="unicode")


def _style(style: str) -> str:
    """A style with the page's colours and font."""
    pairs = (pair.partition(":") for pair in style.split(";"))
    values = {name.strip(): value.strip() for name, _, value in pairs}
    return "; ".join(
        f"{name}: {_VARIABLES.get(value, value)}"
        for name, value in values.items()
        if name != "font-family"
    )


def _path(path: str) -> str:
    """A path whose numbers are as exact as one can see."""
    return " ".join(_NUMBER.sub(lambda number: f"{float(number[0]):.1f}", path).split())


def _drop_unused_ids(root: ET.Element) -> None:
    """Keeps the ids that something refers to: those of groups are the same in every chart."""
    whole = ET.tostring(root, encoding="unicode")
    for element in root.iter():
        name = element.attrib.get("id")
        if name is not None and f"#{name}" not in whole:
            del element.attrib["id"]


def _prune(parent: ET.Element) -> None:
    """Removes what shows nothing, from the leaves up."""
    for child in list(parent):
        _prune(child)
        is_empty = child.tag in ("g", "defs") and not len(child)
        if is_empty or child.tag in ("metadata", "style"):
            parent.remove(child)
