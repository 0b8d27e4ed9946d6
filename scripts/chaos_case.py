"""The job that `chaos_job` kills: its input, what is done to it, and what must come out.

Knows nothing of processes and of when they are killed.
"""

# The tests' own modules are found at run time.
# pyright: reportMissingImports=false

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from chaos_cost import Account
from outside_reader import OutsideReader, Violation, table
from pyarrow import parquet

from jaxpaged.job.look import verify
from jaxpaged.job.output import journal_frame
from jaxpaged.job.planned_job import open_output
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.storage.local_store import Durability

COMMANDS = ("run", "extend", "retry")
"""What is done to each job, one after the other."""

_WHERE = "finish_reason = 'length' AND completion_tokens = 6"
_SETTINGS = ("sampling.max_tokens=9",)
_MAX_MODEL_LEN = 48


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a command comes to when nobody kills it.

    Attributes:
        rows: The whole table behind it.
        tokens: By the number of each row that it completes, the tokens that takes.
        phases: Events of the ledger by the phase of life they were in.
    """

    rows: pa.Table
    tokens: dict[int, int]
    phases: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """What may differ from child to child, and never changes a row.

    Attributes:
        interval: `output.journal_interval`.
        durability: `output.durability`.
        max_num_seqs: `engine.max_num_seqs`.
        block_size: `engine.block_size`.
    """

    interval: float = 0.0
    durability: Durability = "machine"
    max_num_seqs: int = 4
    block_size: int = 8


class Case:
    """One job, from its first run to its retry.

    Args:
        folder: Where its input and output lie; is made.
        model: The model's folder.
        expected: By command, what must come out; None for the job that shows it.

    Attributes:
        out: Its output.
        command: What is done to it now.
    """

    def __init__(
        self, folder: pathlib.Path, model: pathlib.Path, expected: Mapping[str, Expected] | None
    ) -> None:
        self.out = folder / "out"
        self.command = COMMANDS[0]
        self._folder = folder
        self._model = model
        self._expected = expected
        _write_input(folder / "in")
        self._begin()

    def order(self, keys: RunKeys) -> dict[str, Any]:
        """What a child is told of the job."""
        return {
            "command": self.command,
            "job": self._job(keys),
            "where": _WHERE,
            "settings": _SETTINGS,
        }

    def interval(self, keys: RunKeys) -> float:
        """The journal's interval in a child with these keys; a retry has those of the first run."""
        if self.command != "retry":
            return keys.interval
        record = json.loads((self.out / "_jaxpaged" / "job.json").read_text())
        return record["run_keys"]["output.journal_interval"]

    def num_torn_logs(self) -> int:
        """Logs of the journal that do not end with a whole frame."""
        count = 0
        for path in (self.out / "_jaxpaged" / "journal").glob("*"):
            data = path.read_bytes()
            whole = max((frame.end for frame in journal_frame.read(data)), default=0)
            count += whole < len(data)
        return count

    def check_finished(self) -> None:
        """Holds the output against that of a job that nobody killed.

        Raises:
            Violation: It differs, or is not whole.
        """
        assert self._expected is not None, "there is nothing to hold it against"
        found, wanted = table(self.out), self._expected[self.command].rows
        if not found.equals(wanted):
            raise Violation(f"{found.num_rows} rows, which are not those of an uninterrupted job")
        spec = JobSpec.from_dict(self._job(RunKeys()))
        problems = verify.verify(open_output(spec)).problems
        if problems:
            raise Violation(f"verify finds {problems}")
        private = self.out / "_jaxpaged"
        # A kill behind the very end may leave the attempt's own last words unfinished.
        left = [path for path in (private / "tmp").glob("*") if "-attempts-" not in path.name]
        if left := left + list((private / "journal").glob("*")):
            raise Violation(f"left behind: {left}")
        state = run_job(spec).state
        if state != "already finished":
            raise Violation(f"a further run finds the job {state}")

    def next(self) -> bool:
        """Goes on to the next command; False if there is none."""
        place = COMMANDS.index(self.command) + 1
        if place == len(COMMANDS):
            return False
        self.command = COMMANDS[place]
        if self.command == "extend":
            # Before the other files, by its name.
            parquet.write_table(
                _rows([f"new {number % 2}" for number in range(6)]),
                self._folder / "in/a-new.parquet",
            )
        self._begin()
        return True

    def _begin(self) -> None:
        place = COMMANDS.index(self.command)
        known = self._expected or {}
        allowed = [known[name].rows for name in COMMANDS[max(place - 1, 0) : place + 1] if known]
        self.account = Account(known[self.command].tokens if known else {})
        self.reader = OutsideReader(self.out, allowed)
        if known:
            # What is there now may never be gone again.
            self.reader.look()

    def _job(self, keys: RunKeys) -> dict[str, Any]:
        return {
            "model": str(self._model),
            "input": {"path": str(self._folder / "in"), "prompt_column": "q"},
            "output": {
                "path": str(self.out),
                "rows_per_part": 9,
                "token_ids": True,
                "prompt": True,
                "journal_interval": keys.interval,
                "durability": keys.durability,
            },
            "sampling": {"max_tokens": 6, "temperature": 1.0, "columns": {"max_tokens": "n"}},
            "engine": {
                "dtype": "float32",
                "max_model_len": _MAX_MODEL_LEN,
                "num_blocks": 48,
                "max_num_batched_tokens": 16,
                "max_num_seqs": keys.max_num_seqs,
                "block_size": keys.block_size,
            },
        }


def _write_input(folder: pathlib.Path) -> None:
    """Files of several row groups, of few rows, of none; prompts that are the same, or faulty."""
    folder.mkdir(parents=True)
    prompts: list[str | None] = [f"say {number % 4}" for number in range(35)]
    prompts[3] = prompts[20] = None
    prompts[11] = "long " * _MAX_MODEL_LEN
    rows = _rows(prompts)
    parquet.write_table(rows.slice(0, 17), folder / "a.parquet", row_group_size=5)
    parquet.write_table(rows.slice(0, 0), folder / "b.parquet")
    with parquet.ParquetWriter(folder / "c.parquet", rows.schema):
        pass  # No row group at all.
    parquet.write_table(rows.slice(17, 3), folder / "d.parquet")
    parquet.write_table(rows.slice(20), folder / "e.parquet")


def _rows(prompts: list[str | None]) -> pa.Table:
    lengths = [(None, 2, 5, 8)[number % 4] for number in range(len(prompts))]
    return pa.table({"q": pa.array(prompts, pa.string()), "n": pa.array(lengths, pa.int32())})
