"""Text that nobody vouches for, made fit to be shown."""

import unicodedata

# Joiners and marks of direction, without which some scripts and emoji fall apart, and line breaks.
_KEPT = frozenset("\n\t\u200c\u200d\u200e\u200f")


def visible(text: str) -> str:
    """The text with U+FFFD for what is not to be seen: control characters, among them those that
    turn the direction of writing, halves of surrogate pairs, characters that do not exist."""
    if text.isprintable():
        return text
    return "".join(map(_visible, text.replace("\r\n", "\n")))


def cut(text: str, max_chars: int) -> str:
    """At most so many characters; the last one tells that there were more."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def _visible(char: str) -> str:
    is_space = unicodedata.category(char) == "Zs"
    return char if char.isprintable() or is_space or char in _KEPT else "\ufffd"
