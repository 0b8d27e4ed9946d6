"""The cells of one column, compared with one literal of a `--where` filter.

Null cells give null, as in SQL. Numbers are compared exactly, whatever their types; in columns of
floating point a literal means the value of that type next to it, and NaN is above all numbers.
Knows nothing of columns' names.
"""

import datetime
import decimal
import math
import re
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

MAX_PATTERN = 1_000

_FUNCTIONS = {"=": "equal", "<": "less", "<=": "less_equal"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(
    r"(?P<minute>\d{4}-\d\d-\d\d[T ]\d\d:\d\d)"
    r"(?:(?P<second>:\d\d)(?P<fraction>\.\d{1,9})?)?(?P<zone>Z|[+-]\d\d:\d\d)?",
    re.ASCII,
)
_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400


class Misfit(Exception):
    """A literal or an operator that cells of this type cannot be compared with; says why."""


def compare(cells: pa.Array, operator: str, literal: str | decimal.Decimal | bool) -> pa.Array:
    """For each cell whether it is `=`, `<`, `<=` or `LIKE` the literal; null if it is null.

    Raises:
        Misfit: The three do not go together; found without any cells too.
    """
    kind = cells.type
    if isinstance(cells, pa.DictionaryArray):
        return call("take", compare(cells.dictionary, operator, literal), cells.indices)
    if pt.is_null(kind):
        return pa.nulls(len(cells), pa.bool_())
    if _is_text(kind):
        return _compare_text(cells, operator, literal)
    if operator == "LIKE":
        raise Misfit("LIKE is for text only")
    if pt.is_boolean(kind):
        return _compare_truth(cells, operator, literal)
    if pt.is_date(kind) or pt.is_timestamp(kind):
        return _compare_exact(_ticks(cells), operator, _literal_ticks(kind, literal))
    if not (pt.is_integer(kind) or pt.is_decimal(kind) or pt.is_floating(kind)):
        raise Misfit("only IS NULL and IS NOT NULL are for such a column")
    if not isinstance(literal, decimal.Decimal):
        raise Misfit("write a number, without quotes")
    if pt.is_floating(kind):
        return _compare_float(cells, operator, literal)
    return _compare_exact(cells, operator, Fraction(literal))


def is_null(cells: pa.Array) -> pa.Array:
    """For each cell whether it is null; dictionaries may hold nulls in two places."""
    if isinstance(cells, pa.DictionaryArray):
        found = call("take", cells.dictionary.is_null(), cells.indices)
        return call("coalesce", found, pa.scalar(True))
    return cells.is_null()


def call(function: str, *arguments: object, options: pc.FunctionOptions | None = None) -> Any:  # noqa: ANN401  (an array or a scalar)
    """One of Arrow's compute functions; pyarrow generates its own wrappers at import."""
    return pc.call_function(function, list(arguments), options=options)


def _is_text(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind)


def _compare_text(cells: pa.Array, operator: str, literal: object) -> pa.Array:
    if not isinstance(literal, str):
        raise Misfit("write text, in single quotes")
    if pt.is_string_view(cells.type):
        # Arrow has few functions for views.
        cells = cells.cast(pa.large_string())
    if operator == "LIKE":
        options = pc.MatchSubstringOptions(_regex(literal))
        return call("match_substring_regex", cells, options=options)
    return call(_FUNCTIONS[operator], cells, pa.scalar(literal, cells.type))


def _regex(pattern: str) -> str:
    """Arrow's own LIKE takes a backslash for an escape; standard SQL has none."""
    if len(pattern) > MAX_PATTERN:
        raise Misfit(f"a pattern has at most {MAX_PATTERN:,} characters")
    signs = {"%": ".*", "_": "."}
    body = "".join(signs.get(character, f"\\x{{{ord(character):x}}}") for character in pattern)
    return f"(?s)\\A{body}\\z"


def _compare_truth(cells: pa.Array, operator: str, literal: object) -> pa.Array:
    if operator != "=":
        raise Misfit("truth values have no order")
    if not isinstance(literal, bool):
        raise Misfit("write TRUE or FALSE")
    return cells if literal else call("invert", cells)


def _compare_float(cells: pa.Array, operator: str, literal: decimal.Decimal) -> pa.Array:
    # A number of at most 38 digits is finite as a double, but perhaps not in a narrower type.
    exact = float(literal)
    narrow = pa.array([exact]).cast(cells.type, safe=False).cast(pa.float64())[0].as_py()
    value = narrow if math.isfinite(narrow) else exact
    return call(_FUNCTIONS[operator], cells.cast(pa.float64()), pa.scalar(value, pa.float64()))


def _compare_exact(cells: pa.Array, operator: str, value: Fraction) -> pa.Array:
    """Integers and decimals, as integers of the column's last digit: never rounded."""
    if operator == "=":
        at_most = _compare_exact(cells, "<=", value)
        return call("and", at_most, call("invert", _compare_exact(cells, "<", value)))
    kind = cells.type
    scale = kind.scale if pt.is_decimal(kind) else 0
    value *= Fraction(10) ** scale
    highest = math.floor(value) if operator == "<=" else math.ceil(value) - 1
    low, high = _limits(kind)
    if not low <= highest <= high:
        return call("if_else", cells.is_valid(), highest > high, pa.scalar(None, pa.bool_()))
    # Made from text: arithmetic would round to the context's digits.
    limit = decimal.Decimal(f"{highest}e{-scale}") if pt.is_decimal(kind) else highest
    return call("less_equal", cells, pa.scalar(limit, kind))


def _limits(kind: pa.DataType) -> tuple[int, int]:
    if pt.is_decimal(kind):
        most = 10**kind.precision - 1
        return -most, most
    if pt.is_unsigned_integer(kind):
        return 0, 2**kind.bit_width - 1
    return -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1


def _ticks(cells: pa.Array) -> pa.Array:
    """Dates and times as the integers they are stored as."""
    return cells.view(pa.int32() if pt.is_date32(cells.type) else pa.int64())


def _literal_ticks(kind: pa.DataType, literal: object) -> Fraction:
    text = literal if isinstance(literal, str) else ""
    is_day = _DATE.fullmatch(text) is not None
    if pt.is_date(kind):
        if not is_day:
            raise Misfit("write a date, such as '2026-01-31'")
        return _seconds(text) * (Fraction(1, _DAY) if pt.is_date32(kind) else 1000)
    if is_day and kind.tz is None:
        return _seconds(text) * _TICKS[kind.unit]
    found = _TIME.fullmatch(text)
    if found is None or (found["zone"] is None) != (kind.tz is None):
        zone, example = ("without", " 08:30:00") if kind.tz is None else ("with", "T08:30:00Z")
        raise Misfit(
            f"write a date and time {zone} an offset from UTC, such as '2026-01-31{example}'"
        )
    whole = found["minute"] + (found["second"] or ":00") + (found["zone"] or "")
    return (_seconds(whole) + Fraction(f"0{found['fraction'] or ''}")) * _TICKS[kind.unit]


def _seconds(text: str) -> Fraction:
    """Seconds since 1970; a time without an offset counts as UTC."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise Misfit(f"there is no such date: {error}") from None
    moment = moment.replace(tzinfo=moment.tzinfo or datetime.UTC)
    since = moment - datetime.datetime.fromtimestamp(0, datetime.UTC)
    return Fraction(since // datetime.timedelta(seconds=1))
