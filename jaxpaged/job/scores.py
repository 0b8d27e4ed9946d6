"""Metrics: does a completion agree with the row's reference answer?

    exact_match    the completion is the reference; case, white space around and between words,
                   quotes around and punctuation at the end do not count
    contains       the reference occurs in the completion, case ignored, as whole words and whole
                   numbers: "12" is not in "112", "12.5" or "1,200"
    numeric_match  the last number in the completion equals the last number in the reference, to
                   one part in a million; thousands separators are ignored
    regex_match    the reference is a pattern, in RE2's syntax, that occurs in the completion

Each gives None where there is nothing to compare with: a null reference, an empty one, a reference
without a number, a pattern that is not valid. Knows nothing of rows and files.
"""

import decimal
import math
import re
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from jaxpaged.job.sections import MetricName

MAX_PATTERN_CHARS = 1000

_QUOTES = "\"'`\u201c\u201d\u2018\u2019"
_PUNCTUATION = ".,;:!?"
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:e[-+]?\d+)?", re.A | re.I
)
_BARE_FRACTION = re.compile(r"(?<![\w.])([-+]?)\.(?=\d)", re.A)


def score(metric: MetricName, completion: str, reference: object) -> bool | None:
    """Whether the completion agrees with the reference; None if that cannot be said.

    Args:
        metric: One of the names above.
        completion: The completion's text.
        reference: Text, a number or a truth value; numbers are compared as they are written.
    """
    return None if reference is None else _METRICS[metric](completion, _as_text(reference))


def answer(completion: str, marker: str | None) -> str:
    """What of a completion is its answer: the text behind the last marker, if there is one."""
    return completion if marker is None else completion.rpartition(marker)[2]


def exact_match(completion: str, reference: str) -> bool | None:
    """See the module."""
    wanted = _normal(reference)
    return _normal(completion) == wanted if wanted else None


def contains(completion: str, reference: str) -> bool | None:
    """See the module."""
    wanted = _spaced(reference)
    return _occurs_whole(wanted, _spaced(completion)) if wanted else None


def numeric_match(completion: str, reference: str) -> bool | None:
    """See the module."""
    wanted, found = _last_number(reference), _last_number(completion)
    if wanted is None:
        return None
    return found is not None and math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9)


def regex_match(completion: str, reference: str) -> bool | None:
    """See the module.

    RE2 takes time proportional to the text, whatever the pattern; Python's own engine can be made
    to run for ever by a pattern in the data.
    """
    if not reference or len(reference) > MAX_PATTERN_CHARS:
        return None
    options = pc.MatchSubstringOptions(reference)
    try:
        matches = pc.call_function("match_substring_regex", [pa.array([completion])], options)
    except pa.ArrowInvalid:
        return None
    return matches[0].as_py()


_METRICS: dict[MetricName, Callable[[str, str], bool | None]] = {
    "exact_match": exact_match,
    "contains": contains,
    "numeric_match": numeric_match,
    "regex_match": regex_match,
}


def _as_text(reference: object) -> str:
    if isinstance(reference, decimal.Decimal):
        # Its scale is the column's and says nothing about the value.
        text = format(reference, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(reference, float) and reference.is_integer():
        return str(int(reference))
    return str(reference)


def _spaced(text: str) -> str:
    return " ".join(text.casefold().split())


def _normal(text: str) -> str:
    """Case, white space, quotes around and punctuation at the end removed, until none is left."""
    text = _spaced(text)
    while (shorter := text.strip(_QUOTES).rstrip(_PUNCTUATION).strip()) != text:
        text = shorter
    return text


def _occurs_whole(wanted: str, text: str) -> bool:
    """Whether `wanted` occurs in the text and not as a part of a longer word or number."""
    start = text.find(wanted)
    while start >= 0:
        end = start + len(wanted)
        # Looked at from the edge outwards, the text behind reads like the text in front.
        if not (
            _goes_on(wanted[-1], text[end : end + 2])
            or _goes_on(wanted[0], text[max(0, start - 2) : start][::-1])
        ):
            return True
        start = text.find(wanted, start + 1)
    return False


def _goes_on(edge: str, outside: str) -> bool:
    """Whether the word or number that has `edge` at its end goes on with `outside`."""
    if not outside:
        return False
    is_word = outside[0].isalnum() or outside[0] == "_"
    if edge.isdecimal():
        return is_word or (outside[0] in ".," and outside[1:].isdecimal())
    # Only where the script sets words apart; Chinese, for one, does not.
    return is_word and (edge == "_" or edge.lower() != edge.upper())


def _last_number(text: str) -> float | None:
    text = _BARE_FRACTION.sub(r"\g<1>0.", text.replace("\u2212", "-"))
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
