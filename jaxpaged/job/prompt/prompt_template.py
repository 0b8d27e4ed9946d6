"""A template of the job file, filled from one row's cells.

Templates see the cells as they are. What `{{ }}` writes is data, protected as it is written; only
the template's own text may be control tokens. Row text is rendered once and never as a template. A
null that would be written ends the row instead of becoming the text "None". Runs in the sandbox,
without other templates and without randomness. Knows nothing of tokens, columns' types or the
model.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes

from jaxpaged.errors import ConfigError
from jaxpaged.job.prompt.row_fault import RowFault
from jaxpaged.model import sandbox

_GLOBALS = ("range", "namespace", "dict", "cycler", "joiner")

# What they write would not pass through `_finalize`.
_UNSAFE_BLOCKS = (
    jinja2.nodes.FilterBlock,
    jinja2.nodes.CallBlock,
    jinja2.nodes.ScopedEvalContextModifier,
)


class PromptTemplate:
    """A compiled template.

    Args:
        source: The template's text.
        key: The job file's key it comes from, for messages.
        protect: Makes text safe; applied to all that is written but the template's own text.
        unprotect: Undoes `protect`.

    Attributes:
        names: The variables it uses.

    Raises:
        ConfigError: The template is malformed or asks for what is not available.
    """

    def __init__(
        self,
        source: str,
        *,
        key: str,
        protect: Callable[[str], str] = str,
        unprotect: Callable[[str], str] = str,
    ) -> None:
        self._key = key
        self._protect = protect
        self._unprotect = unprotect
        environment = self._environment()
        known = {name: environment.globals[name] for name in _GLOBALS}
        try:
            with sandbox.bounded():
                # Without built-in names, so that a column may be named like one.
                environment.globals.clear()
                tree = environment.parse(source)
                self.names = frozenset(jinja2.meta.find_undeclared_variables(tree))
                environment.globals.update(known)
                self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{key}: line {error.lineno} of the template: {error.message}"
            ) from None
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{key}: the template is malformed: {error}") from None
        if list(jinja2.meta.find_referenced_templates(tree)):
            raise ConfigError(f"{key}: include, import and extends are not available in a job file")
        if any(tree.find_all(_UNSAFE_BLOCKS)):
            raise ConfigError(
                f"{key}: the blocks filter, call and autoescape are not available in a job file; "
                "write {% set x %}...{% endset %} and {{ x | ... }}, or {{ }} around the macro"
            )

    @staticmethod
    def is_builtin(name: str) -> bool:
        """Whether a variable that is no column has a meaning all the same."""
        return name in _GLOBALS

    def render(self, cells: Mapping[str, object]) -> str:
        """The text for one row, its strings protected.

        Raises:
            RowFault: A null would be written, the template fails on the cells, or the text is too
                long.
        """
        try:
            values = {name: _with_nulls(cell, name) for name, cell in cells.items()}
            with sandbox.bounded():
                return sandbox.join(map(_marked, self._template.generate(values)))
        except sandbox.OutputTooLong:
            raise RowFault(
                "prompt_too_long",
                f"{self._key} renders to more than {sandbox.MAX_OUTPUT_CHARS:,} characters",
            ) from None
        except _NullNeeded as error:
            raise RowFault("null_prompt", f"{self._key} would write {error}") from None
        except sandbox.RUN_ERRORS as error:
            # Python's own messages may quote the row; Jinja's name variables and attributes.
            is_ours = isinstance(error, jinja2.TemplateError)
            reason = str(error) if is_ours else type(error).__name__
            raise RowFault("template_error", f"{self._key}: {reason}") from None

    def _environment(self) -> sandbox.Environment:
        environment = sandbox.Environment(
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            finalize=self._finalize,
        )
        environment.concat = self._capture  # pyright: ignore[reportAttributeAccessIssue] - any join
        environment.filters["tojson"] = sandbox.json_filter(_json_null)
        environment.tests["none"] = _is_null
        return environment

    def _finalize(self, value: object) -> str:
        """What `{{ value }}` writes."""
        if value is None:
            raise _NullNeeded("a null")
        return value.marked if isinstance(value, _Captured) else self._protect(str(value))

    def _capture(self, pieces: Iterable[str]) -> "_Captured":
        """What a macro or a set block holds."""
        marked = sandbox.join(map(_marked, pieces))
        return _Captured(self._unprotect(marked), marked)


class _Captured(str):
    """Text that a template wrote into a variable.

    Written as a whole, it keeps the template's control tokens. Whatever a template makes of it, by
    a filter for one, starts from the bare text and is data.
    """

    __slots__ = ("marked",)
    marked: str

    def __new__(cls, text: str, marked: str) -> "_Captured":
        captured = super().__new__(cls, text)
        captured.marked = marked
        return captured


def _marked(piece: str) -> str:
    return piece.marked if isinstance(piece, _Captured) else piece


class _NullNeeded(Exception):
    pass


class _Null:
    """A null cell: false, equal to none, with nulls for its parts, and an error as anything else.

    Args:
        column: The column it comes from.
    """

    __slots__ = ("_column",)

    def __init__(self, column: str) -> None:
        self._column = column

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)

    def __getattr__(self, name: str) -> "_Null":
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> "_Null":
        return self

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _NullNeeded(f"a null of column {self._column!r}")

    __str__ = __repr__ = __format__ = __call__ = __iter__ = __len__ = __contains__ = _refuse
    __int__ = __float__ = __round__ = __abs__ = __neg__ = __pos__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _refuse


def _with_nulls(cell: object, column: str) -> object:
    """The cell with nulls that cannot be written."""
    if cell is None:
        return _Null(column)
    if isinstance(cell, list | tuple):
        return [_with_nulls(item, column) for item in cell]
    if isinstance(cell, dict):
        return {key: _with_nulls(item, column) for key, item in cell.items()}
    return cell


def _is_null(value: object) -> bool:
    return value is None or isinstance(value, _Null)


def _json_null(value: object) -> None:
    if not _is_null(value):
        raise TypeError(type(value).__name__)
