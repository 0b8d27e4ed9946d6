"""What the methods, filters and tests of a template cost, and which there are.

A call is looked at before it is made: what it is given is weighed, and what it would make must fit.
What cannot be bounded so, and no template of a model needs, is not there at all. Knows nothing of
how a template is compiled.
"""

import functools
import json
import string
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2

from jaxpaged.model import template_budget
from jaxpaged.model.template_budget import ENTRY_BYTES, BudgetSpent

TEXT_METHODS = frozenset(
    {
        "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format",
        "format_map", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
        "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
        "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines",
        "startswith", "strip", "swapcase", "title", "upper", "zfill",
    }
)  # fmt: skip
"""Methods of text; `encode` and `translate` are not among them."""

NUMBER_ATTRIBUTES = frozenset({"is_integer", "bit_length", "real", "imag"})
"""Attributes of numbers; `to_bytes` is not among them."""

MISSING_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters of Jinja that are not there."""

# Their cost does not depend on what a list holds.
_SHALLOW_FILTERS = frozenset(
    {
        "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map",
        "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
    }
)  # fmt: skip
_LISTING_FILTERS = frozenset({"batch", "list", "slice", "sort", "unique", "wordcount"})

# Tests that compare, look a name up, or write their value as text.
_DEEP_TESTS = frozenset(
    {
        "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "filter", "ge", "greaterthan", "gt",
        "in", "le", "lessthan", "lower", "lt", "ne", "test", "upper",
    }
)  # fmt: skip
_NUMBER_TESTS = frozenset({"divisibleby", "even", "odd"})

# Steps of a call, beside those for what it is given.
_CALL = 50

_MAX_BITS = 10_000
_MAX_EXPONENT = 1000
_MAX_INDENT = 1000
_MAX_PRECISION = 100

_Function = Callable[..., Any]


def check_operator(operator: str, left: object, right: object) -> None:
    """Pays for `left operator right`, whose result is not made yet.

    Raises:
        BudgetSpent: It would be too large.
    """
    template_budget.spend(1)
    if isinstance(left, int) and isinstance(right, int):
        _check_whole(operator, left, right)
    elif operator == "*":
        sizes = [side if isinstance(side, int) else _length(side) for side in (left, right)]
        if None not in sizes:
            _fit_product(sizes)
    elif operator == "+":
        template_budget.fit((_length(left) or 0) + (_length(right) or 0))
    elif operator == "%" and isinstance(left, str):
        check_percent(left, right)


def check_percent(text: str, values: object) -> None:
    """Pays for `text % values`.

    Raises:
        BudgetSpent: It would be too large, or a width comes from a value.
    """
    num_fields, widths = _percent_fields(text)
    weight = template_budget.weigh(values)
    # Only values known by name can be written more than once.
    times = num_fields if isinstance(values, Mapping) else 1
    template_budget.fit(len(text) + widths + times * weight)


def bounded_format(text: str, format_text: _Function) -> _Function:
    """`text.format` or `text.format_map`, which pays."""

    @functools.wraps(format_text)
    def checked(*args: object, **kwargs: object) -> str:
        weight = template_budget.weigh(args) + template_budget.weigh(kwargs)
        _fit_format(text, weight)
        return template_budget.made(format_text(*args, **kwargs))

    return checked


def check_call(
    function: object, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> tuple[Any, ...]:
    """Pays for a call, and gives the arguments to make it with.

    Raises:
        BudgetSpent: Its result would be too large.
    """
    template_budget.spend(_CALL)
    owner = getattr(function, "__self__", None)
    # Macros, loops and namespaces pass their arguments on.
    if not isinstance(function, types.FunctionType | types.BuiltinMethodType | types.MethodType):
        return args
    for value in (*args, *kwargs.values()):
        template_budget.weigh(value)
    length = _length(owner)
    if length is not None:
        template_budget.spend(length // 16)
    if not isinstance(owner, str):
        return args
    if function.__name__ == "join" and len(args) == 1 and isinstance(args[0], Iterable):
        return (_joinable(owner, args[0]),)
    sized = _SIZED_METHODS.get(function.__name__)
    if sized is not None:
        _fit_if_valid(sized, (owner, *args), kwargs)
    return args


def metered_filters(filters: Mapping[str, _Function]) -> dict[str, _Function]:
    """Jinja's filters, each of which pays."""
    wanted = {name: filters[name] for name in filters if name not in MISSING_FILTERS}
    own = {
        "sum": jinja2.pass_context(_sum),
        "tojson": json_filter(),
        "join": _join_filter(filters["join"]),
    }
    return {name: _metered_filter(name, function) for name, function in {**wanted, **own}.items()}


def metered_tests(tests: Mapping[str, _Function]) -> dict[str, _Function]:
    """Jinja's tests, of which those pay that look into their values."""
    return {name: _metered_test(name, function) for name, function in tests.items()}


def json_filter(default: Callable[[object], object] | None = None) -> Callable[..., str]:
    """The filter `tojson`, as in transformers: plain JSON, where Jinja's own escapes HTML.

    Args:
        default: Stands in for a value that JSON does not know; None refuses such values.
    """

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        depth = len(indent) if isinstance(indent, str) else (indent or 0)
        if depth > _MAX_INDENT or (separators and max(map(len, separators)) > _MAX_INDENT):
            raise BudgetSpent(f"an indent or separator of tojson above {_MAX_INDENT} is too large")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=default,
        )
        weight = template_budget.weigh(value)
        if indent is None and separators is None:
            # At most twelve characters for one, and two between values.
            template_budget.spend(0, weight)
            return template_budget.made(encoder.encode(value))
        pieces, size = [], 0
        for piece in encoder.iterencode(value):
            size += len(piece)
            if size > template_budget.MAX_VALUE:
                template_budget.fit(size)
            template_budget.spend(1, len(piece))
            pieces.append(piece)
        return "".join(pieces)

    return to_json


def _metered_filter(name: str, function: _Function) -> _Function:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    sized = _SIZED_FILTERS.get(name)

    @functools.wraps(function)
    def metered(*args: object, **kwargs: object) -> object:
        template_budget.spend(_CALL)
        values = args[first:]
        if name not in _SHALLOW_FILTERS:
            for value in (*values, *kwargs.values()):
                template_budget.weigh(value)
        elif values and (length := _length(values[0])) is not None:
            template_budget.spend(length // 16)
        if name in _LISTING_FILTERS and values and isinstance(values[0], str):
            template_budget.spend(0, ENTRY_BYTES * len(values[0]))
        if sized is not None:
            _fit_if_valid(sized, values, kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, types.GeneratorType):
            return template_budget.each(result)
        return template_budget.made(result)

    return metered


def _metered_test(name: str, function: _Function) -> _Function:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    if name not in _DEEP_TESTS | _NUMBER_TESTS:
        return function

    @functools.wraps(function)
    def metered(*args: object, **kwargs: object) -> object:
        for value in args[first:]:
            template_budget.weigh(value)
            # A text would be a pattern for `%`.
            if name in _NUMBER_TESTS and not isinstance(value, int | float):
                raise TypeError(f"{name} is a test of numbers, not of {type(value).__name__}")
        return function(*args, **kwargs)

    return metered


# --- what calls would make: called with the arguments of the call, gives the size of its result


def _padded(text: str, width: int = 80, *_: object, **__: object) -> int:
    return max(len(text), width)


def _replaced(text: object, old: str = "", new: str = "", *_: object, **__: object) -> int:
    text = str(text)
    times = text.count(old) if old else len(text) + 1
    return len(text) + times * max(len(new) - len(old), 0)


def _split(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    # Of white space there is at most one piece for two characters.
    most = text.count(sep) if sep else len(text) // 2
    pieces = 1 + (most if maxsplit < 0 else min(most, maxsplit))
    template_budget.spend(0, ENTRY_BYTES * pieces)
    return len(text)


def _lines(text: str, keepends: bool = False) -> int:
    del keepends
    template_budget.spend(0, ENTRY_BYTES * (1 + sum(map(text.count, _LINE_ENDS))))
    return len(text)


_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def _expanded(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * max(tabsize, 0)


def _indented(text: str, width: int | str = 4, *_: object, **__: object) -> int:
    added = len(width) if isinstance(width, str) else width
    # Windows' line ends and the rarer ones count, too.
    return len(text) + (1 + sum(map(text.count, _LINE_ENDS))) * max(added, 0)


def _batched(_: object, linecount: int = 1, *__: object, **___: object) -> int:
    return linecount


def _rounded(_: object, precision: int = 0, *__: object, **___: object) -> int:
    if abs(precision) > _MAX_PRECISION:
        raise BudgetSpent(f"a precision above {_MAX_PRECISION} is too large")
    return 0


def _percent_filter(text: str, *values: object, **named: object) -> int:
    check_percent(str(text), named or values)
    return 0


def _truncated(text: str, length: int = 255, killwords: bool = False, end: str = "...") -> int:
    del killwords, length
    return len(text) + len(end)


_SIZED_METHODS: Mapping[str, _Function] = {
    "center": _padded,
    "expandtabs": _expanded,
    "ljust": _padded,
    "replace": _replaced,
    "rjust": _padded,
    "rsplit": _split,
    "split": _split,
    "splitlines": _lines,
    "zfill": _padded,
}
_SIZED_FILTERS: Mapping[str, _Function] = {
    "batch": _batched,
    "center": _padded,
    "format": _percent_filter,
    "indent": _indented,
    "replace": _replaced,
    "round": _rounded,
    "slice": _batched,
    "truncate": _truncated,
}


def _fit_if_valid(sized: _Function, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Pays for the result; a call with arguments of wrong types is left to fail by itself."""
    try:
        size = sized(*args, **kwargs)
    except (TypeError, AttributeError):
        return
    if isinstance(size, int):
        template_budget.fit(size)


def _joinable(separator: str, values: Iterable[object]) -> list[object]:
    """The values of a `join` as a list, paid for."""
    listed = list(template_budget.each(values))
    sizes = sum(template_budget.weigh(value) + len(separator) for value in listed)
    template_budget.fit(sizes)
    return listed


def _join_filter(join: _Function) -> _Function:
    @functools.wraps(join)
    def checked(
        eval_ctx: object, value: Iterable[object], d: str = "", attribute: str | int | None = None
    ) -> object:
        listed = list(template_budget.each(value))
        sizes = sum(template_budget.weigh(item) + len(str(d)) for item in listed)
        template_budget.fit(sizes)
        return join(eval_ctx, listed, d, attribute)

    return checked


def _sum(
    context: Any,  # noqa: ANN401 - with a sandbox, which imports this module
    iterable: Iterable[object],
    attribute: str | int | None = None,
    start: object = 0,
) -> object:
    """As Jinja's, adding by the sandbox's own operator."""
    total, environment = start, context.environment
    for item in template_budget.each(iterable):
        part = item if attribute is None else environment.getitem(item, attribute)
        total = environment.call_binop(context, "+", total, part)
    return total


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else None


def _check_whole(operator: str, left: int, right: int) -> None:
    bits = left.bit_length()
    if operator == "*":
        is_big = bits + right.bit_length() > _MAX_BITS
    else:
        is_big = operator == "**" and abs(left) > 1 and bits * min(right, _MAX_BITS) > _MAX_BITS
    if is_big or (operator == "**" and abs(left) > 1 and right > _MAX_EXPONENT):
        raise BudgetSpent(f"the result of {operator} is too large")


def _fit_product(sizes: list[Any]) -> None:
    size = max(sizes[0], 0) * max(sizes[1], 0)
    if size > template_budget.MAX_VALUE:
        raise BudgetSpent("the result of * is too large")
    template_budget.spend(1, size)


def _percent_fields(text: str) -> tuple[int, int]:
    """How many fields a pattern for `%` has, and what their widths and precisions come to."""
    num_fields = widths = 0
    at = text.find("%")
    while at >= 0:
        num_fields += 1
        at = _behind_name(text, at + 1)
        digits = ""
        while at < len(text) and text[at] in "-+ #0123456789.*":
            if text[at] == "*":
                raise BudgetSpent("a width from a value (*) in a pattern for % is not available")
            digits += text[at] if text[at].isdigit() else " "
            at += 1
        widths += sum(_whole(number) for number in digits.split())
        at = text.find("%", at + 1)
    template_budget.spend(num_fields)
    return num_fields, widths


def _behind_name(text: str, at: int) -> int:
    """Behind the name in parentheses at a place, which may hold more of them."""
    if text[at : at + 1] != "(":
        return at
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    return len(text)


def _fit_format(text: str, weight: int) -> None:
    """Pays for filling a pattern's fields with values of a weight."""
    num_fields = widths = 0
    for _, field, spec, _ in string.Formatter().parse(text):
        if field is None:
            continue
        num_fields += 1
        if "{" in (spec or ""):
            raise BudgetSpent("a width from a value in a pattern for format is not available")
        digits = "".join(c if c.isdigit() else " " for c in spec or "")
        widths += sum(_whole(number) for number in digits.split())
    template_budget.fit(len(text) + widths + num_fields * weight)


def _whole(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**10
