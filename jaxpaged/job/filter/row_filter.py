"""Which rows of a table a `--where` filter selects.

The filter is SQL's in look and logic, but a language of its own: columns, literals and a few
operators, nothing that could run. Where SQL's answer is unknown (a comparison with null, and NOT
of it) a row is not selected. Knows nothing of files and jobs.
"""

import difflib
import functools

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from jaxpaged.errors import ConfigError
from jaxpaged.job.filter import row_filter_cells as cells
from jaxpaged.job.filter import row_filter_parser as parser
from jaxpaged.job.filter import row_filter_tokens as tokens
from jaxpaged.job.filter.row_filter_parser import Condition, Joined, Literal, Not, Tree

_SHOWN_TYPE = 60


class RowFilter:
    """A filter that fits a schema; made by `parse`.

    Attributes:
        text: The filter as it was given.
        columns: The top-level columns it looks at, in the order of their appearance.
    """

    def __init__(self, text: str, tree: Tree) -> None:
        self.text = text
        self._tree = tree
        self.columns = tuple(dict.fromkeys(_columns(tree)))

    @classmethod
    def parse(cls, text: str, schema: pa.Schema) -> "RowFilter":
        """Reads a filter and tries it on no rows of this schema.

        Args:
            text: Such as `finish_reason = 'length' AND completion_tokens >= 48`.
            schema: The columns that may be named, and their types.

        Raises:
            ConfigError: The text is no filter, names a column that is not there, or asks it what
                its type cannot answer; the message shows where.
        """
        made = cls(text, parser.parse(text))
        arrays = [pa.nulls(0, field.type) for field in schema]
        made.mask(pa.RecordBatch.from_arrays(arrays, schema=schema))
        return made

    def mask(self, rows: pa.Table | pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """For each row whether it is selected.

        Args:
            rows: With the filter's columns at least, others are not looked at.

        Raises:
            ConfigError: A column is missing or of a type that does not fit.
        """
        batches = [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()
        found = [self._mask(batch) for batch in batches]
        return np.concatenate(found) if found else np.zeros(0, np.bool_)

    def _mask(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        answers = cells.call("coalesce", self._answers(self._tree, batch), pa.scalar(False))
        return answers.to_numpy(zero_copy_only=False)

    def _answers(self, tree: Tree, batch: pa.RecordBatch) -> pa.Array:
        """True, false or null for each row."""
        match tree:
            case Condition():
                return self._ask(tree, batch)
            case Not(operand):
                return cells.call("invert", self._answers(operand, batch))
            case Joined(word, operands):
                join = functools.partial(cells.call, f"{word.lower()}_kleene")
                return functools.reduce(join, (self._answers(one, batch) for one in operands))

    def _ask(self, condition: Condition, batch: pa.RecordBatch) -> pa.Array:
        column = self._column(condition, batch)
        if condition.operator == "NULL":
            return cells.is_null(column)
        if condition.operator == "TRUE":
            return self._truth(condition, column)
        join = functools.partial(cells.call, "or_kleene")
        each = (self._compare(condition, column, literal) for literal in condition.literals)
        return functools.reduce(join, each)

    def _compare(self, condition: Condition, column: pa.Array, literal: Literal) -> pa.Array:
        try:
            return cells.compare(column, condition.operator, literal.value)
        except cells.Misfit as misfit:
            reason = (
                f"{condition.written} {literal.token.shown} does not fit column "
                f"{_shown_name(condition)} of type {_shown_type(column.type)}: {misfit}"
            )
            raise self._error(literal.token.start, reason) from None

    def _truth(self, condition: Condition, column: pa.Array) -> pa.Array:
        try:
            return cells.compare(column, "=", True)
        except cells.Misfit:
            reason = (
                f"column {_shown_name(condition)} of type {_shown_type(column.type)} is no truth "
                "value; write what it is compared with"
            )
            raise self._error(condition.column.start, reason) from None

    def _column(self, condition: Condition, batch: pa.RecordBatch) -> pa.Array:
        name, *fields = condition.names
        if batch.schema.get_field_index(name) < 0:
            reason = f"there is no column {name!r}; {_choice(name, batch.schema.names, 'columns')}"
            raise self._error(condition.column.start, reason)
        column = batch.column(name)
        for field in fields:
            kind = column.type
            if not pt.is_struct(kind):
                reason = f"column {name!r} of type {_shown_type(kind)} has no field {field!r}"
                raise self._error(condition.column.start, reason)
            index = kind.get_field_index(field)
            if index < 0:
                known = [kind.field(i).name for i in range(kind.num_fields)]
                reason = (
                    f"column {name!r} has no field {field!r}; {_choice(field, known, 'fields')}"
                )
                raise self._error(condition.column.start, reason)
            options = pc.StructFieldOptions([index])
            column = cells.call("struct_field", column, options=options)
            name = f"{name}.{field}"
        return column

    def _error(self, start: int, reason: str) -> ConfigError:
        return ConfigError(tokens.message(self.text, start, reason))


def _columns(tree: Tree) -> list[str]:
    match tree:
        case Condition():
            return [tree.names[0]]
        case Not(operand):
            return _columns(operand)
        case Joined(_, operands):
            return [name for operand in operands for name in _columns(operand)]


def _choice(name: str, known: list[str], what: str) -> str:
    nearest = [other for other in known if other.casefold() == name.casefold()]
    nearest = nearest or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}the {what} are: {', '.join(known) or 'none'}"


def _shown_name(condition: Condition) -> str:
    return repr(".".join(condition.names))


def _shown_type(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= _SHOWN_TYPE else f"{text[:_SHOWN_TYPE]}..."
