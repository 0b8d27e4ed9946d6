"""Everything that can be wrong with one committed part, held against its record and its place.

Reads every byte of the part and one record batch at a time; changes nothing.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxpaged.job.output import part_file, row_addresses
from jaxpaged.job.output.commit import CommitRecord
from jaxpaged.job.output.part_file import Columns, PartProblem
from jaxpaged.job.output.row_addresses import RowAddresses
from jaxpaged.job.report_table import plain
from jaxpaged.job.tally import Tally
from jaxpaged.job.units import Unit
from jaxpaged.request import ErrorCode, FinishReason

_FINISH_REASONS = pa.array(get_args(FinishReason), pa.string())
_ERROR_CODES = pa.array(get_args(ErrorCode), pa.string())


class PartCheck:
    """Looks at parts of one job.

    Args:
        columns: Of every part.
        addresses: Of the output's rows.
    """

    def __init__(self, columns: Columns, addresses: RowAddresses) -> None:
        self._columns = columns
        self._addresses = addresses

    def faults(self, file: BinaryIO, unit: Unit, record: CommitRecord) -> Iterator[str]:
        """What is wrong with a part, as ends of a sentence that begins with its name.

        Args:
            file: The part.
            unit: What it should hold, and of which revision.
            record: What its commit record says.

        Raises:
            OSError: It cannot be read.
            StorageError: The same, of an object store.
        """
        num_bytes = file.seek(0, 2)
        if num_bytes != record.num_bytes:
            yield f"has {num_bytes:,} bytes, not {record.num_bytes:,} as its commit record says"
        elif part_file.sha256(file) != record.sha256:
            yield "has other bytes than its commit record says (SHA-256)"
        file.seek(0)
        try:
            attempt = part_file.check(file, unit, self._columns)
        except PartProblem as problem:
            yield f"is not the part of its unit: {problem}"
            return
        if attempt != record.attempt:
            yield f"was made by attempt {attempt}, not {record.attempt} as its commit record says"
        file.seek(0)
        yield from self._content_faults(file, unit, record)

    def _content_faults(self, file: BinaryIO, unit: Unit, record: CommitRecord) -> Iterator[str]:
        tally = Tally(None, unit.rows_each)
        first_wrong: str | None = None
        position = num_odd = num_shuffled = 0
        with pq.ParquetFile(file, pre_buffer=False) as part:
            names = tally.columns_of(part.schema_arrow)
            names += ["sample"] if unit.rows_each > 1 else []
            for batch in part.iter_batches(columns=names, use_threads=False):
                if first_wrong is None:
                    start = unit.start * unit.rows_each
                    first_wrong = self._wrong_address(start, position, batch["row"])
                if unit.rows_each > 1:
                    numbers = np.arange(position, position + len(batch)) % unit.rows_each
                    num_shuffled += _num_other(batch["sample"], numbers)
                position += len(batch)
                num_odd += _num_odd_endings(batch)
                tally.add(pa.Table.from_batches([batch]))
        if first_wrong is not None:
            yield first_wrong
        if num_shuffled:
            yield f"has {num_shuffled:,} rows whose sample is not the one that belongs there"
        if num_odd:
            yield f"has {num_odd:,} rows whose finish_reason and error_code do not fit together"
        yield from _count_faults(tally, record)

    def _wrong_address(self, start: int, position: int, found: pa.Array) -> str | None:
        wrong = self._addresses.first_wrong(start + position, found)
        if wrong is None:
            return None
        row = position + wrong
        expected = self._addresses.of(start + row, start + row + 1)[0]
        return (
            f"holds other rows than it should, or in another order: row {row:,} of it is "
            f"{plain(row_addresses.describe(found[wrong]))}, where "
            f"{plain(row_addresses.describe(expected))} belongs"
        )


def _num_other(found: pa.Array, expected: npt.NDArray[np.int64]) -> int:
    is_same = _call("equal", found, pa.array(expected)).fill_null(False)
    return len(found) - (_call("sum", is_same).as_py() or 0)


def _num_odd_endings(rows: pa.RecordBatch) -> int:
    """How many rows end in no way that there is."""
    reasons, codes = rows["finish_reason"], rows["error_code"]
    is_error = _call("equal", reasons, pa.scalar("error"))
    is_odd = _call("or", _unknown(reasons, _FINISH_REASONS), _unknown(codes, _ERROR_CODES))
    # Neither the unknown nor the null ones count twice.
    is_odd = _call("or", is_odd.fill_null(True), reasons.is_null())
    is_odd = _call("or", is_odd, _call("not_equal", is_error.fill_null(False), codes.is_valid()))
    return _call("sum", is_odd).as_py() or 0


def _unknown(values: pa.Array, known: pa.Array) -> pa.Array:
    """Which values are neither null nor known."""
    is_known = _call("is_in", values, options=pc.SetLookupOptions(known))
    return _call("and", _call("invert", is_known), values.is_valid())


def _count_faults(tally: Tally, record: CommitRecord) -> Iterator[str]:
    """Where the counts of a record are not those of its rows; scores need the job file."""
    counted, said = tally.counts(), record.counts
    pairs = {
        "rows": (counted.rows, said.rows),
        "rows by finish reason": (counted.finish_reasons, said.finish_reasons),
        "rows by error code": (counted.errors, said.errors),
        "tokens": (counted.tokens, said.tokens),
        "completions cut in a character": (counted.partial_characters, said.partial_characters),
        "prompts cut": (counted.truncated_prompts, said.truncated_prompts),
        "tokens cut out of prompts": (counted.truncated_tokens, said.truncated_tokens),
    }
    # Records of before there were such counts have none.
    if said.prompt_lengths or said.completion_lengths:
        pairs["prompts by length"] = (counted.prompt_lengths, said.prompt_lengths)
        pairs["completions by length"] = (counted.completion_lengths, said.completion_lengths)
    for name, (mine, theirs) in pairs.items():
        if _normal(mine) != _normal(theirs):
            yield f"comes to other {name} than its commit record says: {mine}, not {theirs}"


def _normal(count: int | Mapping[str, int] | Mapping[int, int]) -> object:
    """Counts among which those of nothing do not matter."""
    return count if isinstance(count, int) else +collections.Counter(count)


def _call(function: str, *arguments: object, options: pc.FunctionOptions | None = None) -> Any:  # noqa: ANN401  (an array or a scalar)
    return pc.call_function(function, list(arguments), options=options)
