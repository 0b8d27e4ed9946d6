"""The words, literals and signs of a `--where` filter, and how a fault in it is shown.

Knows nothing of their order.
"""

import dataclasses
import re
from collections.abc import Callable

from jaxpaged.errors import ConfigError

KEYWORDS = frozenset({"AND", "OR", "NOT", "IN", "LIKE", "IS", "NULL", "TRUE", "FALSE"})

MAX_CHARS = 100_000
_MAX_DIGITS = 38  # as many as a decimal of SQL has
_SHOWN = 30

# The quantifiers with two signs never give back what they took: a text that is not closed is no
# shorter text.
_TOKEN = re.compile(
    r"""\s*+(?:
      (?P<text>'(?:[^']|'')*+')
    | (?P<name>"(?:[^"]|"")*+")
    | (?P<number>-?\.?[0-9][\w.]*+)
    | (?P<word>[^\W\d]\w*+)
    | (?P<sign><=|>=|<>|!=|==|[=<>(),.])
    | (?P<end>\Z)
    | (?P<unknown>.)
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A piece of the text.

    Attributes:
        kind: `text`, `name` (in double quotes), `number`, `word`, `end`; or the keyword, in
            capitals, or the sign itself.
        text: The piece as it was written.
        start: Its first character, counted from 0.
    """

    kind: str
    text: str
    start: int

    @property
    def value(self) -> str:
        """What it stands for: without its quotes."""
        if self.kind not in ("text", "name"):
            return self.text
        quote = self.text[0]
        return self.text[1:-1].replace(quote * 2, quote)

    @property
    def shown(self) -> str:
        """The token in a message."""
        if self.kind == "end":
            return "the end"
        cut = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        is_plain = self.kind in KEYWORDS or self.kind in ("text", "name", "number")
        return _printable(cut) if is_plain else f'"{cut}"'


def split(text: str) -> list[Token]:
    """The tokens of a filter; the last one is the `end`.

    Raises:
        ConfigError: The text is too long, or has a piece that means nothing in a filter.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(
            f"--where: the filter has {len(text):,} characters; at most {MAX_CHARS:,} are read"
        )
    return [_token(text, match) for match in _TOKEN.finditer(text)]


def message(text: str, start: int, reason: str) -> str:
    """A fault with its place: as a number, and marked under the text around it."""
    first = max(0, start - _SHOWN)
    before = _printable(text[first:start])
    after = _printable(text[start : start + _SHOWN])
    head = "..." if first > 0 else ""
    tail = "..." if start + _SHOWN < len(text) else ""
    mark = " " * len(head + before) + "^"
    return f"--where: character {start + 1}: {reason}\n  {head}{before}{after}{tail}\n  {mark}"


def _token(text: str, match: re.Match[str]) -> Token:
    kind = match.lastgroup or ""
    token = Token(kind=kind, text=match[kind], start=match.start(kind))
    fault = _FAULTS[kind](token) if kind in _FAULTS else None
    if fault is not None:
        raise ConfigError(message(text, token.start, fault))
    # Some letters of other alphabets have a capital in this one.
    is_keyword = kind == "word" and token.text.isascii() and token.text.upper() in KEYWORDS
    if is_keyword or kind == "sign":
        return dataclasses.replace(token, kind=token.text.upper())
    return token


def _number_fault(token: Token) -> str | None:
    if _NUMBER.fullmatch(token.text) is None:
        return f"{token.shown} is no number such as 48 or -0.5; text goes in single quotes"
    if sum(map(str.isdigit, token.text)) > _MAX_DIGITS:
        return f"the number has more than {_MAX_DIGITS} digits"
    return None


def _quoted_fault(token: Token) -> str | None:
    if any("\ud800" <= character <= "\udfff" for character in token.text):
        return "this is not valid Unicode"
    return None


def _unknown_fault(token: Token) -> str:
    if token.text == "'":
        return "the text that begins here is not closed; write '' for a ' within it"
    if token.text == '"':
        return 'the name that begins here is not closed; write "" for a " within it'
    if not token.text.isprintable():
        return f"the character U+{ord(token.text):04X} means nothing in a filter"
    return f"{token.shown} means nothing in a filter"


def _printable(text: str) -> str:
    """The text on one line, without what would move a terminal's cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


_FAULTS: dict[str, Callable[[Token], str | None]] = {
    "number": _number_fault,
    "text": _quoted_fault,
    "name": _quoted_fault,
    "unknown": _unknown_fault,
}
