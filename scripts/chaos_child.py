"""The children of `chaos_job`: each runs a job with a real engine, and writes down what it does.

    python scripts/chaos_child.py CACHE        # a server of the tests' `nursery`

CACHE is a folder for compiled steps, so that only the first child compiles them.
"""

# The tests' own modules are found at run time.
# pyright: reportMissingImports=false

import pathlib
import sys
import time
from typing import Any

import jax
from chaos_ledger import Ledger

from jaxpaged.engine import Engine
from jaxpaged.engine.stats import EngineStats
from jaxpaged.job.progress import Snapshot
from jaxpaged.job.spec import JobSpec
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, Request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from failing_disk import KillingDisk, Step
from killable_job import complete
from nursery import serve


class LedgerDisk(KillingDisk):
    """Writes down every numbered step before it is taken."""

    def __init__(self, ledger: Ledger, at: int, moment: Any) -> None:  # noqa: ANN401
        super().__init__(at, moment)
        self._ledger = ledger

    def take(self, step: Step, number: int | None) -> None:
        """Writes it down and takes it."""
        if number is not None:
            self._ledger.write("disk", step=str(step), number=number)
        super().take(step, number)


class LedgerProgress:
    """Writes down what the job says about itself."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._done = 0

    def note(self, text: str) -> None:
        """Writes it down."""
        self._ledger.write("note", text=text)

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        """Remembers the rows of parts."""
        self._done = done

    def update(self, snapshot: Snapshot) -> None:
        """Writes down the rows that came from the journal."""
        self._ledger.write("resumed", rows=snapshot.resumed - self._done)

    def end(self) -> None:
        """Needs no line."""


class LedgerEngine:
    """The job's engine, loaded when the job would load it; writes down what it does.

    Args:
        spec: The job.
        ledger: Where it writes.
        pause: Seconds that it rests at each step.
    """

    def __init__(self, spec: JobSpec, ledger: Ledger, pause: float) -> None:
        self.tokenizer: Tokenizer = open_checkpoint(pathlib.Path(spec.model)).tokenizer()
        self._spec = spec
        self._ledger = ledger
        self._pause = pause
        self._loaded: Engine | None = None

    @property
    def description(self) -> str:
        """The engine's; loads it."""
        if self._loaded is None:
            self._ledger.write("load")
            self._loaded = Engine.load(self._spec.model, self._spec.engine_config())
            self._ledger.write("loaded")
        return self._loaded.description

    @property
    def stats(self) -> EngineStats:
        """The engine's."""
        return self._engine.stats

    def add_request(self, request: Request) -> None:
        """Writes it down and passes it on."""
        self._ledger.write("add", row=request.request_id)
        self._engine.add_request(request)

    def warm_up(self) -> None:
        """As the engine."""
        self._engine.warm_up()

    def has_work(self) -> bool:
        """The engine's."""
        return self._engine.has_work()

    def num_unfinished(self) -> int:
        """The engine's."""
        return self._engine.num_unfinished()

    def check_integrity(self) -> None:
        """As the engine."""
        self._engine.check_integrity()

    def abort(self) -> list[int]:
        """The engine's."""
        return self._engine.abort()

    def step(self) -> list[Completion]:
        """Writes down what a step gave before anybody else can know it."""
        self._ledger.write("begin")
        time.sleep(self._pause)
        done = self._engine.step()
        finished = [(completion.request_id, completion.completion_tokens) for completion in done]
        self._ledger.write("end", sampled=self.stats.sampled_tokens, finished=finished)
        return done

    @property
    def _engine(self) -> Engine:
        assert self._loaded is not None, "a job shows the engine's description first"
        return self._loaded


def live(order: dict[str, Any]) -> None:
    """One child's life."""
    ledger = Ledger(pathlib.Path(order["ledger"]))
    ledger.write("born")
    engine = LedgerEngine(JobSpec.from_dict(order["job"]), ledger, order["pause"])
    disk = LedgerDisk(ledger, order["at"], order["moment"])
    complete(order, engine, disk, LedgerProgress(ledger))


def main() -> None:
    """Serves children until the other side goes."""
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    serve(live)


if __name__ == "__main__":
    main()
