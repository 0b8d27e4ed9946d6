"""Jinja as templates get it: the immutable sandbox with a bound on what they may build.

Serves the templates of models and of job files alike. Knows nothing of messages, rows and tokens.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.runtime
import jinja2.sandbox

MAX_OUTPUT_CHARS = 16_000_000
_MAX_EXPONENT = 1000

RUN_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise while it runs on values that it did not expect."""


class OutputTooLong(Exception):
    """A template writes more than `MAX_OUTPUT_CHARS`."""


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, which by itself lets `'a' * 10**9` run."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """The operator's result.

        Raises:
            jinja2.exceptions.SecurityError: It would be too large.
        """
        if operator == "**":
            is_big = abs(left) > 1 and right > _MAX_EXPONENT
        else:
            sizes = [len(side) if isinstance(side, Sequence) else side for side in (left, right)]
            is_big = sizes != [left, right] and math.prod(sizes) > MAX_OUTPUT_CHARS
        if is_big:
            raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def join(pieces: Iterable[str]) -> str:
    """What a template writes, as one text.

    Raises:
        OutputTooLong: It has more than `MAX_OUTPUT_CHARS` characters.
    """
    kept: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_OUTPUT_CHARS:
            raise OutputTooLong
        kept.append(piece)
    return "".join(kept)


def json_filter(default: Callable[[object], object] | None = None) -> Callable[..., str]:
    """The filter `tojson`, as in transformers: plain JSON, where Jinja's own escapes HTML.

    Args:
        default: Stands in for a value that JSON does not know; None refuses such values.
    """

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=default,
        )

    return to_json
