"""What one run of a template may cost: steps and bytes, counted, never timed.

The same template with the same values costs the same everywhere, so a row that is refused here is
refused on every machine. Knows nothing of Jinja but the class of its errors and of its namespaces.
"""

import contextlib
import contextvars
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import jinja2.exceptions
import jinja2.utils

MAX_STEPS = 20_000_000
"""Each part of a template that is evaluated is a few of them; all together take seconds."""

MAX_BYTES = 512 * 2**20
"""Of all text and lists that a template makes, those it drops again included."""

MAX_VALUE = 16_000_000
"""Characters of one text, or entries of one list."""

ENTRY_BYTES = 64
"""What an entry of a list comes to."""

_MAX_DEPTH = 200
_MAX_PARTS = 1_000_000
# Bytes that are read or written in the time of one step.
_STEP_BYTES = 64

_T = TypeVar("_T")


class BudgetSpent(jinja2.exceptions.SecurityError):
    """A template costs more than it may."""


class Budget:
    """What is left to one run."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._bytes = MAX_BYTES

    def spend(self, steps: int, num_bytes: int = 0) -> None:
        """Takes steps, and bytes that are newly made.

        Raises:
            BudgetSpent: Nothing is left.
        """
        self._steps -= steps + num_bytes // _STEP_BYTES
        self._bytes -= num_bytes
        if self._steps < 0:
            raise BudgetSpent(f"the template takes more than {MAX_STEPS:,} steps")
        if self._bytes < 0:
            raise BudgetSpent(f"the template makes more than {MAX_BYTES:,} bytes of text and lists")


_current: contextvars.ContextVar[Budget] = contextvars.ContextVar("template_budget")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """While this lasts, templates compiled or run in this thread share one budget."""
    token = _current.set(Budget())
    try:
        yield
    finally:
        _current.reset(token)


def spend(steps: int, num_bytes: int = 0) -> None:
    """Takes from the budget of the run; nothing is ever given back."""
    _current.get().spend(max(steps, 0), max(num_bytes, 0))


def fit(size: int) -> None:
    """Makes sure that a text or list about to be made is not too large.

    Raises:
        BudgetSpent: It is.
    """
    if size > MAX_VALUE:
        raise BudgetSpent(f"a text or list of {size:,} parts is too large; at most {MAX_VALUE:,}")
    spend(1, size)


def made(value: _T) -> _T:
    """`value` itself, once its own memory is paid for, without what it refers to."""
    if isinstance(value, str | list | tuple | dict):
        spend(1, sys.getsizeof(value))
    elif value is not None and not isinstance(value, int | float):
        spend(1, 4 * ENTRY_BYTES)
    return value


def each(values: Iterable[_T]) -> Iterator[_T]:
    """The same values, each paid for as an entry of a list."""
    for value in values:
        spend(20, ENTRY_BYTES)
        yield value


def weigh(value: object) -> int:
    """About the characters of the value's text, as long as that is bounded; paid for.

    Lists in which the same list occurs again and again have a text far larger than their memory.

    Raises:
        BudgetSpent: The text would be too large, or the value is nested too deeply.
    """
    if isinstance(value, str):
        spend(1 + len(value) // _STEP_BYTES)
        return len(value)
    total = num_parts = 0
    # Parts that are looked through, each inside the one before; the usual types come first.
    open_parts: list[Iterator[object]] = [iter((value,))]
    while open_parts:
        for part in open_parts[-1]:
            num_parts += 1
            total += _own_size(part)
            if total > MAX_VALUE or num_parts > _MAX_PARTS:
                raise BudgetSpent(
                    f"a value of more than {MAX_VALUE:,} characters, or {_MAX_PARTS:,} parts, is "
                    "too large"
                )
            if type(part) not in _PLAIN and (inner := _inner(part)) is not None:
                open_parts.append(inner)
                break
        else:
            open_parts.pop()
        if len(open_parts) > _MAX_DEPTH:
            raise BudgetSpent(f"a value nested more than {_MAX_DEPTH} deep is too large")
    spend(1 + 4 * num_parts)
    return total


_PLAIN = (str, int, float, bool, type(None))


def _own_size(part: object) -> int:
    if isinstance(part, str | bytes):
        return len(part) + 4
    if isinstance(part, int):
        return 4 + part.bit_length() // 3
    return 8


def _inner(part: object) -> Iterator[object] | None:
    if isinstance(part, list | tuple | set | frozenset):
        return iter(part)
    if isinstance(part, jinja2.utils.Namespace):
        part = part._Namespace__attrs  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(part, Mapping):
        return (side for pair in part.items() for side in pair)
    is_view = isinstance(part, type({}.keys()) | type({}.values()) | type({}.items()))
    return iter(part) if is_view else None
