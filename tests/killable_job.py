"""One run, extension or retry of a job, as a process to be killed; with a scripted engine here.

    python tests/killable_job.py        # a server of `nursery`

Loads no JAX. `complete` serves engines of any kind.
"""

import pathlib
from typing import Any

from failing_disk import KillingDisk
from nursery import serve
from scripted_engine import ScriptedEngine

from jaxpaged.job.completion_engine import CompletionEngine
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.progress import Progress
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.storage.disk import Disk

MAX_NUM_SEQS = 4


def complete(
    order: dict[str, Any],
    engine: CompletionEngine,
    disk: Disk,
    progress: Progress | None = None,
) -> None:
    """Does what a command line would.

    Args:
        order: `command` is run, extend or retry; `job` is the job's dict; of a retry, `where` and
            `settings` are its options.
    """
    spec = JobSpec.from_dict(order["job"])
    if order["command"] == "retry":
        retry_job(
            spec.output.path,
            where=order["where"],
            settings=order["settings"],
            engine=engine,
            disk=disk,
            progress=progress,
        )
        return
    options = RunOptions(extends=order["command"] == "extend", disk=disk)
    run_job(spec, engine=engine, options=options, progress=progress)


def scripted(job: dict[str, Any], pause: float = 0.0) -> ScriptedEngine:
    """An engine for a job, whose rows take one to three steps of `pause` seconds."""
    tokenizer = open_checkpoint(pathlib.Path(job["model"])).tokenizer()
    return ScriptedEngine(
        tokenizer,
        max_num_seqs=MAX_NUM_SEQS,
        num_steps=lambda request: 1 + request.request_id % 3,
        pause=pause,
    )


def _live(order: dict[str, Any]) -> None:
    engine = scripted(order["job"], order.get("pause", 0.0))
    complete(order, engine, KillingDisk(order.get("at", 0), order.get("moment", "before")))


if __name__ == "__main__":
    serve(_live)
