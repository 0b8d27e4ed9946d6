import html.parser

import pytest

from jaxpaged.pages import numbers, page, text
from jaxpaged.pages.page import (
    Chart,
    Charts,
    Exchanges,
    Facts,
    Figure,
    Folded,
    Messages,
    Meter,
    Page,
    Section,
    Table,
    Tables,
)

HOSTILE = "<script>alert(1)</script>\"'&amp;</pre></td></svg><!-- \x00\x1b\u202e{{ 7 * 7 }}"


class Elements(html.parser.HTMLParser):
    """The elements and attributes of a page, and the text in it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[tuple[str, str | None]] = set()
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= set(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.append("comment")


def a_page(word: str) -> Page:
    """A page on which this word is everything that is said."""
    table = Table(
        title=word,
        head=[word, word],
        rows=[[word, Meter(share=0.375, text=word)], [word, word]],
        numeric=frozenset({1}),
    )
    blocks = [
        Facts(rows=[(word, word)]),
        Tables(tables=[table]),
        Charts(charts=[Chart(title=word, svg="<svg></svg>", note=word)]),
        Messages(texts=[word], is_warning=True),
        Messages(texts=[word]),
        Exchanges(items=[(word, word, word)]),
        Folded(summary=word, facts=Facts(rows=[(word, word)])),
    ]
    return Page(
        title=word,
        state=word,
        is_good=True,
        lead=word,
        figures=[Figure(name=word, value=word, note=word)],
        sections=[Section(title=word, blocks=blocks), Section(title="left out", blocks=[])],
        foot=word,
    )


def test_no_element_comes_from_data():
    plain, hostile = (Elements(page.render(a_page(word))) for word in ("word", HOSTILE))

    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert "script" not in hostile.tags
    shown = HOSTILE.translate({0: "\ufffd", 0x1B: "\ufffd", 0x202E: "\ufffd"})
    assert hostile.text.count(shown) == plain.text.count("word")
    assert not {"\x00", "\x1b", "\u202e"} & set(hostile.text)


def test_a_page_asks_for_nothing_and_runs_nothing():
    source = page.render(a_page("word"))
    found = Elements(source)

    assert "http:" not in source
    assert "https:" not in source
    assert not {"script", "link", "img", "iframe", "base", "object"} & set(found.tags)
    names = {name for name, _ in found.attributes}
    assert not {"src", "href", "srcset"} & names
    assert not [name for name in names if name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    assert "@import" not in source
    assert "url(" not in source


def test_sections_without_blocks_are_left_out_and_shares_are_bars():
    source = page.render(a_page("word"))
    assert "left out" not in source
    assert "width: 37.5%" in source


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines\tand\u00a0spaces", "two\nlines\tand\u00a0spaces"),
        ("\x00\x9b\u202e\u2066\ufeff\ud800\U0010ffff", "\ufffd" * 7),
        ("right\u200f to left\u200e", "right\u200f to left\u200e"),
        ("two\r\nlines", "two\nlines"),
        ("family: 👨\u200d👩, نص, 漢字", "family: 👨\u200d👩, نص, 漢字"),
        ("cr\r\u2028", "cr\ufffd\ufffd"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(given, shown):
    assert text.visible(given) == shown


def test_a_cut_text_says_so():
    assert text.cut("abcdef", 6) == "abcdef"
    assert text.cut("abcdefg", 6) == "abcde…"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.25, "0.25"), (999, "999"), (1000, "1k"), (16384, "16.4k"), (999_600, "1M")],
)
def test_short_numbers(value, shown):
    assert numbers.short(value) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes(num_bytes, shown):
    assert numbers.memory(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.25, "0.25 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 0 s"),
        (303, "5 min 3 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_time_spans(seconds, shown):
    assert numbers.duration(seconds) == shown
