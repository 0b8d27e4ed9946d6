"""A template of the job file, filled from one row's cells.

Row text is data: it is rendered once and never as a template. A null that would be written ends
the row instead of becoming the text "None". Runs in Jinja's immutable sandbox, without other
templates and without randomness. Knows nothing of tokens, columns' types or the model.
"""

import json
from collections.abc import Callable, Mapping

import jinja2
import jinja2.meta
import jinja2.sandbox

from jaxpaged.errors import ConfigError
from jaxpaged.job.row_fault import RowFault

MAX_CHARS = 16_000_000

_GLOBALS = ("range", "namespace", "dict", "cycler", "joiner")

# What a template can raise while it runs on cells that it did not expect.
_RUN_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class PromptTemplate:
    """A compiled template.

    Args:
        source: The template's text.
        key: The job file's key it comes from, for messages.
        protect: Makes row text safe; applied to every string of a cell.
        unprotect: Undoes `protect`; lists and structs are written as they were.

    Attributes:
        names: The variables it uses.

    Raises:
        ConfigError: The template is malformed or asks for another template.
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
            # Without built-in names, so that a column may be named like one.
            environment.globals.clear()
            tree = environment.parse(source)
            self.names = frozenset(jinja2.meta.find_undeclared_variables(tree))
            environment.globals.update(known)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{key}: line {error.lineno} of the template: {error}") from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"{key}: the template is malformed: {error}") from None
        if list(jinja2.meta.find_referenced_templates(tree)):
            raise ConfigError(f"{key}: include, import and extends are not available in a job file")

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
        pieces: list[str] = []
        num_chars = 0
        try:
            values = {name: self._safe(cell) for name, cell in cells.items()}
            for piece in self._template.generate(values):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    reason = f"{self._key} renders to more than {MAX_CHARS:,} characters"
                    raise RowFault("prompt_too_long", reason)
                pieces.append(piece)
        except _NullWritten:
            raise RowFault("null_prompt", f"{self._key} would write a null") from None
        except _RUN_ERRORS as error:
            # Python's own messages may quote the row; Jinja's name variables and attributes.
            is_ours = isinstance(error, jinja2.TemplateError)
            reason = str(error) if is_ours else type(error).__name__
            raise RowFault("template_error", f"{self._key}: {reason}") from None
        return "".join(pieces)

    def _environment(self) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            finalize=self._finalize,
        )
        # A prompt is a function of its row.
        del environment.filters["random"]
        environment.filters["tojson"] = _tojson
        environment.tests["none"] = _is_null
        return environment

    def _safe(self, cell: object) -> object:
        """The cell with its strings protected and its nulls unwritable."""
        if isinstance(cell, str):
            return self._protect(cell)
        if cell is None:
            return _NULL
        if isinstance(cell, list | tuple):
            return [self._safe(item) for item in cell]
        if isinstance(cell, dict):
            return {key: self._safe(item) for key, item in cell.items()}
        return cell

    def _plain(self, value: object) -> object:
        if isinstance(value, str):
            return self._unprotect(value)
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        return value

    def _finalize(self, value: object) -> object:
        """What `{{ value }}` writes."""
        if value is None:
            raise _NullWritten
        if isinstance(value, list | tuple | dict):
            # Written as Python writes it, which would escape the marks of protected strings.
            return self._protect(str(self._plain(value)))
        return value


class _NullWritten(Exception):
    pass


class _Null:
    """A null cell: false, equal to none, and an error as soon as it would become text."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or other is self

    def __hash__(self) -> int:
        return hash(None)

    def __str__(self) -> str:
        raise _NullWritten

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        raise _NullWritten


_NULL = _Null()


def _is_null(value: object) -> bool:
    return value is None or value is _NULL


def _json_null(value: object) -> None:
    if value is not _NULL:
        raise TypeError(type(value).__name__)


def _tojson(value: object, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_json_null)
