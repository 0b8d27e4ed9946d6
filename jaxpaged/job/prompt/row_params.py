"""A row's own sampling parameters in the place of the job's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import ConfigError
from jaxpaged.job.prompt.param_columns import param_type
from jaxpaged.job.prompt.row_fault import RowFault
from jaxpaged.request import SamplingParams


class RowParams:
    """Gives each row its parameters.

    Args:
        params: The job's.
        columns: By the names of parameters, the columns that set them; a null cell leaves the
            job's value.
    """

    def __init__(self, params: SamplingParams, columns: Mapping[str, str]) -> None:
        self._params = params
        self._columns = dict(columns)

    def of(self, cells: Mapping[str, object]) -> SamplingParams:
        """The parameters of the row with these cells.

        Raises:
            RowFault: `bad_row_params`, with the column and what was expected of it.
        """
        own = {
            name: self._read(name, column, cells[column])
            for name, column in self._columns.items()
            if cells[column] is not None
        }
        params = dataclasses.replace(self._params, **own) if own else self._params
        self._check_together(params)
        return params

    def _read(self, name: str, column: str, cell: object) -> Any:  # noqa: ANN401
        try:
            value: Any = param_type(name).read(cell)
            # Alone, so that what is said is about this column.
            SamplingParams(**{name: value})
        except ValueError as error:
            raise RowFault("bad_row_params", f"column {column!r}: {name}: {error}") from None
        except ConfigError as error:
            raise RowFault("bad_row_params", f"column {column!r}: {error}") from None
        return value

    def _check_together(self, params: SamplingParams) -> None:
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise RowFault(
                "bad_row_params",
                f"{self._named('min_tokens')} {params.min_tokens} is above "
                f"{self._named('max_tokens')} {params.max_tokens}",
            )
        is_search = params.beam_width is not None
        if params.num_samples > 1 and not is_search and params.temperature == 0:
            raise RowFault(
                "bad_row_params",
                f"{self._named('temperature')} must be above 0, as {params.num_samples} samples "
                "would all be the same, got 0",
            )

    def _named(self, name: str) -> str:
        """The parameter, and the column it comes from if there is one."""
        column = self._columns.get(name)
        return name if column is None else f"{name} (column {column!r})"
