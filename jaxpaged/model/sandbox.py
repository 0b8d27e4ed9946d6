"""Jinja as templates get it: the immutable sandbox with a bound on what they take and make.

Serves the templates of models and of job files alike. Compiling and running both happen inside
`bounded()`. Knows nothing of messages, rows and tokens.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from jaxpaged.model import metered_calls, metered_code, template_budget

MAX_OUTPUT_CHARS = template_budget.MAX_VALUE

bounded = template_budget.bounded
"""While it lasts, templates share a budget: for compiling one, or for one run."""

json_filter = metered_calls.json_filter
"""Makes the filter `tojson`."""

RUN_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a template can raise while it runs on values that it did not expect."""


class OutputTooLong(Exception):
    """A template writes more than `MAX_OUTPUT_CHARS`."""


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, which by itself lets `'a' * 10**9` run, and loops for ever."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - Jinja's own
        super().__init__(**settings)
        self.filters = {
            **metered_calls.metered_filters(self.filters),
            **metered_code.filters(),
        }
        self.tests = metered_calls.metered_tests(self.tests)
        del self.globals["lipsum"]

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
        metered_calls.check_operator(operator, left, right)
        return template_budget.made(super().call_binop(context, operator, left, right))

    def call(
        self,
        context: jinja2.runtime.Context,
        function: Any,  # noqa: ANN401
        /,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """The result of a call that a template makes.

        Raises:
            jinja2.exceptions.SecurityError: It is not allowed, or would be too large.
        """
        args = metered_calls.check_call(function, args, kwargs)
        return template_budget.made(super().call(context, function, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        """Whether a template may read an attribute."""
        if isinstance(obj, str):
            return attr in metered_calls.TEXT_METHODS
        if isinstance(obj, int | float):
            return attr in metered_calls.NUMBER_ATTRIBUTES
        if isinstance(obj, bytes | bytearray):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401
        """`value` made safe if it is `format` or `format_map` of a text, None otherwise."""
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else metered_calls.bounded_format(value.__self__, wrapped)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return metered_code.metered(super()._parse(source, name, filename), self)


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
