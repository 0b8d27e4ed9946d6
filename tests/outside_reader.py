"""Somebody who reads a job's output folder and knows nothing of who writes it, nor when."""

import contextlib
import json
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb
import pandas
import pyarrow as pa
import pyarrow.dataset

Row = dict[str, Any]


def table(out: pathlib.Path) -> pa.Table:
    """All rows of a folder, as they lie there."""
    return pyarrow.dataset.dataset(out, format="parquet").to_table()


def by_pyarrow(out: pathlib.Path) -> list[Row]:
    return table(out).to_pylist()


def by_duckdb(out: pathlib.Path) -> list[Row]:
    # One that knows no hidden files, only names.
    if not list(out.glob("*.parquet")):
        return []
    with duckdb.connect(config={"threads": 1}) as connection:
        found = connection.execute("SELECT * FROM read_parquet(?)", [str(out / "*.parquet")])
        names = [column[0] for column in found.description or []]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def by_pandas(out: pathlib.Path) -> list[Row]:
    frame = pandas.read_parquet(out, dtype_backend="pyarrow")
    return pa.Table.from_pandas(frame, preserve_index=False).to_pylist()


class Violation(AssertionError):
    """An output folder showed what it must never show."""


class OutsideReader:
    """Reads one folder again and again, and holds each look against what may be there.

    Args:
        out: The folder.
        allowed: Tables; a row of the folder must be as one of them has it.
    """

    def __init__(self, out: pathlib.Path, allowed: Sequence[pa.Table]) -> None:
        self._out = out
        self._allowed = [{_address(row): row for row in rows.to_pylist()} for rows in allowed]
        self._seen: set[str] = set()
        self._num_looks = 0

    def look(self) -> int:
        """Reads the folder with every library; returns its rows.

        Raises:
            Violation: A file cannot be read, a row is there twice or is wrong, or one is gone.
        """
        if not self._out.is_dir():
            return 0
        for read in (by_pyarrow, by_duckdb, by_pandas):
            try:
                rows = read(self._out)
            except Exception as error:
                raise Violation(f"{read.__name__}: {type(error).__name__}: {error}") from error
            self._check(rows, read.__name__)
        self._num_looks += 1
        return len(self._seen)

    def take_looks(self) -> int:
        """How often it looked since this was asked last."""
        count, self._num_looks = self._num_looks, 0
        return count

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Looks without a pause, in another thread, while the block runs."""
        is_over, caught = threading.Event(), []

        def loop() -> None:
            try:
                while not is_over.is_set():
                    self.look()
            except Violation as error:
                caught.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        if caught:
            raise caught[0]

    def _check(self, rows: list[Row], reader: str) -> None:
        found = {_address(row): row for row in rows}
        if len(found) < len(rows):
            raise Violation(f"{reader}: {len(rows) - len(found)} rows are there twice")
        if gone := self._seen - found.keys():
            raise Violation(f"{reader}: {len(gone)} rows are gone, as {min(gone)}")
        for address, row in found.items():
            if not any(row == allowed.get(address) for allowed in self._allowed):
                raise Violation(f"{reader}: row {address} is {row}")
        self._seen = set(found)


def _address(row: Row) -> str:
    return json.dumps(row["row"])
