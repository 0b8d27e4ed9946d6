"""Which columns a job reads, carries and writes, checked against the input's schema.

Knows types and names, no rows.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.types as pt

from jaxpaged.errors import InputSchemaError
from jaxpaged.job import column_types, result_columns
from jaxpaged.job.input.input_plan import InputPlan
from jaxpaged.job.prompt import param_columns, prompts
from jaxpaged.job.result_columns import Form
from jaxpaged.job.spec import JobSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlan:
    """The columns of a job.

    Attributes:
        carried: The input columns that are written again, with the types they are read with.
        needed: The names of all input columns that are read, in the input's order.
        output: The schema of every part file.
        form: How the completions of a row are written.
        rows_each: Rows of the output for each row of the input.
    """

    carried: pa.Schema
    needed: tuple[str, ...]
    output: pa.Schema
    form: Form = "single"
    rows_each: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A key of the job file that names an input column, and what the column must be."""

    key: str
    column: str
    fits: Callable[[pa.DataType], bool]
    expected: str


def plan(spec: JobSpec, inputs: InputPlan) -> ColumnPlan:
    """The columns of a job over these inputs.

    Raises:
        InputSchemaError: A column is missing, of a wrong type, differs between files, or is named
            like one that the job writes; the message lists what to do.
        ConfigError: A template is malformed.
    """
    schema = inputs.schema
    uses = list(_uses(spec, schema))
    for use in uses:
        _check_use(use, schema)
    carried = [schema.field(name) for name in _carried_names(spec, schema)]
    result = result_columns.fields(spec)
    _check_clashes(carried, result)
    needed = {field.name for field in carried} | {use.column for use in uses}
    names = tuple(name for name in schema.names if name in needed)
    _check_files_agree(inputs, names, carries_all=spec.input.columns is None)
    return ColumnPlan(
        carried=pa.schema(carried),
        needed=names,
        output=pa.schema([*carried, *result]),
        form=result_columns.form(spec),
        rows_each=result_columns.rows_each(spec),
    )


def _uses(spec: JobSpec, schema: pa.Schema) -> Iterator[_Use]:
    fits, expected = _PROMPT_TYPES[spec.input.prompt_source]
    for column, key in prompts.used_columns(spec.input, schema.names).items():
        yield _Use(key=key, column=column, fits=fits, expected=expected)
    for name, column in prompts.param_columns(spec.sampling.columns).items():
        kind = param_columns.param_type(name)
        yield _Use(
            key=f"sampling.columns.{name}",
            column=column,
            fits=kind.fits,
            expected=kind.expected,
        )
    if spec.adapter_column is not None:
        yield _Use(
            key="adapter_column",
            column=spec.adapter_column,
            fits=column_types.is_text,
            expected="text",
        )
    for index, column in enumerate(spec.input.columns or ()):
        yield _Use(key=f"input.columns[{index}]", column=column, fits=_is_any, expected="")
    if spec.eval is not None:
        yield _Use(
            key="eval.reference",
            column=spec.eval.reference,
            fits=_is_reference,
            expected="text, a number or a truth value",
        )
        if spec.eval.by is not None:
            yield _Use(
                key="eval.by",
                column=spec.eval.by,
                fits=_is_reference,
                expected="text, a number or a truth value",
            )


def _carried_names(spec: JobSpec, schema: pa.Schema) -> tuple[str, ...]:
    if spec.input.columns is None:
        return tuple(schema.names)
    by = spec.eval.by if spec.eval is not None else None
    for key, column in (("eval.by", by), ("adapter_column", spec.adapter_column)):
        if column not in (None, *spec.input.columns):
            raise InputSchemaError(
                f"{key}: column {column!r} is not carried; add it to input.columns"
            )
    return spec.input.columns


def _check_use(use: _Use, schema: pa.Schema) -> None:
    if use.column not in schema.names:
        nearest = difflib.get_close_matches(use.column, schema.names, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise InputSchemaError(
            f"{use.key}: the input has no column {use.column!r}; {hint}"
            f"its columns: {', '.join(schema.names) or 'none'}"
        )
    found = schema.field(use.column).type
    if not use.fits(found):
        raise InputSchemaError(
            f"{use.key}: column {use.column!r} must be {use.expected}, but it is {found}"
        )


def _check_clashes(carried: list[pa.Field], result: list[pa.Field]) -> None:
    # Without regard to case, as SQL compares the names of columns.
    written = {result_columns.TRUNCATED, *(field.name.casefold() for field in result)}
    clashing = [field.name for field in carried if field.name.casefold() in written]
    if clashing:
        raise InputSchemaError(
            f"the input's column {', '.join(map(repr, clashing))} is named like a column that the "
            "job writes; leave it out by listing the others in input.columns, or rename it"
        )


def _check_files_agree(inputs: InputPlan, names: tuple[str, ...], *, carries_all: bool) -> None:
    first, first_file = inputs.schemas[0]
    for schema, file in inputs.schemas[1:]:
        for name in names:
            found = schema.field(name).type if name in schema.names else None
            if found != first.field(name).type:
                is_what = "missing" if found is None else f"{found}"
                raise InputSchemaError(
                    f"{file}: column {name!r} is {is_what}, but {first.field(name).type} in "
                    f"{first_file}; all files need the same columns"
                )
        extra = [name for name in schema.names if name not in first.names]
        if extra and carries_all:
            raise InputSchemaError(
                f"{file}: column {extra[0]!r} is not in {first_file}; list the columns to carry in "
                "input.columns"
            )


def _is_any(_: pa.DataType) -> bool:
    return True


def _is_reference(kind: pa.DataType) -> bool:
    return (
        column_types.is_text(kind)
        or column_types.is_number(kind)
        or pt.is_decimal(kind)
        or pt.is_boolean(kind)
    )


def _is_chat(kind: pa.DataType) -> bool:
    if column_types.is_text(kind):
        return True
    if not (column_types.is_list(kind) and pt.is_struct(kind.value_type)):
        return False
    return {"role", "content"} <= {field.name for field in kind.value_type}


def _is_renderable(kind: pa.DataType) -> bool:
    is_bytes = pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind)
    return not (is_bytes or pt.is_fixed_size_binary(kind))


# By prompt source: what its columns must be, and that in words.
_PROMPT_TYPES: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "prompt": (_is_renderable, "something to write as text"),
    "messages": (_is_renderable, "something to write as text"),
    "prompt_column": (column_types.is_text, "text"),
    "prompt_ids_column": (column_types.is_token_ids, "a list of integers"),
    "messages_column": (_is_chat, "a list of role and content, or JSON text of one"),
}
