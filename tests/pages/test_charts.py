import re
import sys
import xml.etree.ElementTree as ET

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.pages import charts
from jaxpaged.pages.charts import Bar, Line, Shade

RATES = [1.0, 5.0, float("nan"), 2.0]


def lines(**options) -> str:
    given = [Line(name="new", values=RATES), Line(name="old", values=[1, 2, 3, 4], style="dashed")]
    whole = {"title": "Speed", "x_label": "seconds"} | options
    return charts.line_chart([0, 1, 2, 3, 4], given, **whole)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("text")]


def drawn() -> list[str]:
    bars = [Bar(name="load", value=3, text="3 s"), Bar(name="idle", value=0, text="0 s")]
    return [
        lines(),
        charts.histogram([0, 10, 20], [7, 1], title="Lengths", x_label="tokens"),
        charts.bar_chart(bars, title="Time"),
    ]


def test_the_same_numbers_give_the_same_text():
    assert drawn() == drawn()


@pytest.mark.parametrize("number", range(3))
def test_a_chart_is_one_element_with_the_page_s_colours_and_nothing_from_elsewhere(number):
    svg = drawn()[number]

    root = ET.fromstring(svg)

    assert (root.tag, root.attrib["role"]) == ("svg", "img")
    assert root.attrib["aria-label"] in ("Speed", "Lengths", "Time")
    assert "width" not in root.attrib
    assert not re.search(r"https?:|<!|<\?|xmlns|font-family|<style|<metadata", svg)
    used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)) - {"none"}
    assert used
    assert all(re.fullmatch(r"var\(--[a-z0-9-]+\)", color) for color in used)
    # The only names are those that are referred to, as clip paths are.
    ids = set(re.findall(r'id="([^"]+)"', svg))
    assert ids == set(re.findall(r"url\(#([^)]+)\)", svg))


def test_charts_with_other_titles_share_no_ids():
    ids = [set(re.findall(r'id="([^"]+)"', lines(title=title))) for title in ("a", "b")]
    assert ids[0]
    assert ids[0].isdisjoint(ids[1])


def test_names_labels_levels_and_shades_are_text_in_it():
    shade = Shade(name="too much", where=[False, True, False, False])

    shown = texts(lines(limit=("the pool", 4), shade=shade))

    assert {"new", "old", "seconds", "the pool", "too much"} <= set(shown)
    assert "too much" not in texts(lines(shade=Shade(name="too much", where=[False] * 4)))
    assert "the pool" not in texts(lines(limit=("the pool", 40)))


def test_a_value_holds_over_its_interval_and_points_are_joined():
    flat = charts.line_chart([0, 2], [Line(name="", values=[3])], title="t", x_label="x")
    sloped = charts.line_chart([0, 2], [Line(name="", values=[1, 3])], title="t", x_label="x")

    [line] = re.findall(r'd="([^"]+)"[^>]*stroke: var\(--series-1\)', flat)
    assert re.fullmatch(r"M (\S+) (\S+) L (\S+) \2", line)
    [line] = re.findall(r'd="([^"]+)"[^>]*stroke: var\(--series-1\)', sloped)
    assert not re.fullmatch(r"M (\S+) (\S+) L (\S+) \2", line)


@pytest.mark.parametrize(
    "name", ["<b>&\"'", "$x^$", "$\\frac$", "a\x07\u202eb\ud800", "漢字 🙂", "w" * 500]
)
def test_any_name_can_be_drawn_and_stays_text(name):
    svg = charts.bar_chart([Bar(name=name, value=1.5, text=name)], title=name[:10])

    first, second = texts(svg)

    assert {element.tag for element in ET.fromstring(svg).iter()} <= {
        *("svg", "g", "path", "text", "defs", "clipPath", "rect")
    }
    assert len(first) <= 60
    assert first[0] == second[0] == name[0]
    assert not {"\x07", "\u202e", "\ud800"} & set(first + second)


def test_nothing_can_be_drawn_too():
    empty = charts.line_chart([0, 0], [Line(name="none", values=[0])], title="t", x_label="x")
    assert "none" in texts(empty)
    assert ET.fromstring(charts.bar_chart([], title="t")).tag == "svg"
    assert "tokens" in texts(charts.histogram([0, 1], [0], title="t", x_label="tokens"))


def test_without_matplotlib_the_package_to_install_is_named(monkeypatch):
    charts.require()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxpaged\[report\]'"):
        charts.require()
