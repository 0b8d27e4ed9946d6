"""Growth: do a job's memory, its speed and the host's time per step stay flat over many rows?

Regime: short rows, few new tokens each, a tiny random model; the host's work per row dominates,
so whatever a row leaves behind in memory or in time shows. Each case is a job of its own in a
process of its own, run through the command line; its memory is read from outside while it runs.

    python scripts/bench_rows.py
    python scripts/bench_rows.py --rows 10000 --rows 300000 --layout one-group
    python scripts/bench_rows.py --rows 1000 --rows 10000 --rows 100000 --max-tokens 8

Needs Linux (/proc). Baseline: the job's own memory when its first part is finished; a flat job has
the same at half and at its last part, for any number of rows. After that the tail, with fewer rows
than lanes, may compile one more step: `end` and `peak` then show some tens of MiB that do not
depend on the number of rows. Prints a table; the last line is one JSON object.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import bench_environment
import click
import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYOUTS = ("one-group", "many-files")
ROWS_PER_FILE = 1000
ROWS_PER_PART = 2048
SEED = 20261129
SAMPLE_SECONDS = 0.1
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resident memory of the job at one moment."""

    rows_done: int
    rss_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured job.

    Attributes:
        rows: Rows of the input.
        layout: "one-group" is one file with a single row group, "many-files" 1,000 rows a file.
        first_mib: Resident memory when the first part was finished: loaded, compiled, running.
        half_mib: The same at half of the rows.
        last_mib: The same when the last full part was finished.
        end_mib: The last reading before the job ended.
        peak_mib: Highest ever, as the kernel counts it.
        wall_seconds: Whole process, loading and compiling included.
        tokens_per_second: Prompts and completions, without loading and compiling.
        host_ms_per_step: Time per step that the host worked.
    """

    rows: int
    layout: str
    first_mib: int
    half_mib: int
    last_mib: int
    end_mib: int
    peak_mib: int
    wall_seconds: float
    tokens_per_second: float
    host_ms_per_step: float


def rows_table(first: int, count: int) -> pa.Table:
    """Rows `first` to `first + count`, each with an id and a prompt of a few letters."""
    letters = np.random.default_rng(SEED + first).integers(97, 123, size=(count, 12), dtype="u1")
    prompts = [bytes(row).decode() for row in letters]
    ids = pa.array(range(first, first + count), pa.int64())
    return pa.table({"id": ids, "prompt": pa.array(prompts, pa.string())})


def write_input(folder: pathlib.Path, rows: int, layout: str) -> None:
    """Write the rows as `*.parquet` below `folder`, which is created."""
    folder.mkdir()
    if layout == "one-group":
        parquet.write_table(rows_table(0, rows), folder / "rows.parquet", row_group_size=rows)
        return
    for number, first in enumerate(range(0, rows, ROWS_PER_FILE)):
        count = min(ROWS_PER_FILE, rows - first)
        parquet.write_table(rows_table(first, count), folder / f"rows-{number:05}.parquet")


def write_job(
    folder: pathlib.Path, model: pathlib.Path, num_seqs: int, max_tokens: int
) -> pathlib.Path:
    """The path of a job file in `folder` that completes `input/` into `output/`."""
    job = {
        "model": str(model),
        "input": {"path": "input", "prompt_column": "prompt"},
        "output": {"path": "output", "rows_per_part": ROWS_PER_PART},
        "sampling": {"max_tokens": max_tokens, "ignore_eos": True},
        "engine": {
            "dtype": "float32",
            "max_model_len": 64,
            "max_num_seqs": num_seqs,
            "num_blocks": 1024,
        },
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def watch(process: subprocess.Popen, output: pathlib.Path) -> tuple[list[Sample], int]:
    """Samples of the process until it ends, and its peak resident memory in bytes."""
    samples = []
    statm = pathlib.Path(f"/proc/{process.pid}/statm")
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            # The kernel counts kilobytes. A process that is ending has no pages any more.
            return [sample for sample in samples if sample.rss_bytes], usage.ru_maxrss * 1024
        rss_bytes = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        rows_done = ROWS_PER_PART * len(list(output.glob("part-*.parquet")))
        samples.append(Sample(rows_done=rows_done, rss_bytes=rss_bytes))
        time.sleep(SAMPLE_SECONDS)


def run_case(
    folder: pathlib.Path,
    model: pathlib.Path,
    *,
    rows: int,
    layout: str,
    num_seqs: int,
    max_tokens: int,
) -> Case:
    """The measurements of one job, run in `folder`, which is created.

    Raises:
        click.ClickException: The job failed; the message ends with what it printed last.
    """
    folder.mkdir()
    write_input(folder / "input", rows, layout)
    job = write_job(folder, model, num_seqs, max_tokens)
    command = [sys.executable, "-c", "from jaxpaged.cli import main; main()", "run", str(job)]
    started = time.perf_counter()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        samples, peak_bytes = watch(process, folder / "output")
    wall_seconds = time.perf_counter() - started
    if process.returncode:
        tail = (folder / "log").read_text(errors="replace")[-2000:]
        raise click.ClickException(f"the job ended with exit code {process.returncode}:\n{tail}")

    def rss_mib(rows_done: int) -> int:
        reached = [sample for sample in samples if sample.rows_done >= rows_done]
        return (reached or samples[-1:])[0].rss_bytes // MIB

    report = json.loads((folder / "output" / "_jaxpaged" / "report.json").read_text())
    output, engine = report["output"], report["run"]["engine"]
    tokens = output["prompt_tokens"] + output["completion_tokens"]
    seconds = report["run"]["seconds"] - engine["compile_seconds"]

    return Case(
        rows=rows,
        layout=layout,
        first_mib=rss_mib(1),
        half_mib=rss_mib(rows // 2),
        last_mib=rss_mib(rows // ROWS_PER_PART * ROWS_PER_PART),
        end_mib=samples[-1].rss_bytes // MIB,
        peak_mib=peak_bytes // MIB,
        wall_seconds=round(wall_seconds, 1),
        tokens_per_second=round(tokens / seconds, 1),
        host_ms_per_step=round(1000 * engine["host_seconds"] / engine["steps"], 3),
    )


def print_cases(cases: list[Case]) -> None:
    """Print a table of resident memory, in MiB."""
    table = Table(title="resident memory in MiB, and speed")
    memory_names = ("first part", "half", "last part", "end", "peak")
    for name in ("rows", "input", *memory_names, "rows/s", "tokens/s", "host ms a step"):
        table.add_column(name, justify="left" if name == "input" else "right")
    for case in cases:
        memory = (case.first_mib, case.half_mib, case.last_mib, case.end_mib, case.peak_mib)
        speed = f"{case.rows / case.wall_seconds:,.0f}"
        speeds = (speed, f"{case.tokens_per_second:,.0f}", str(case.host_ms_per_step))
        table.add_row(f"{case.rows:,}", case.layout, *map(str, memory), *speeds)
    Console(width=100).print(table)


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """The folder of a tiny random model, made by the tests' own writer."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import write_tiny_llama

    return write_tiny_llama(folder)


@click.command()
@click.option("--rows", multiple=True, type=click.IntRange(1), default=(10_000, 300_000))
@click.option("--layout", multiple=True, type=click.Choice(LAYOUTS), default=LAYOUTS)
@click.option("--max-num-seqs", type=click.IntRange(1), default=64, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1, 32), default=1, show_default=True)
def main(
    rows: tuple[int, ...], layout: tuple[str, ...], max_num_seqs: int, max_tokens: int
) -> None:
    """Measure every combination of --rows and --layout.

    Example: python scripts/bench_rows.py --rows 10000
    """
    environment = bench_environment.describe()
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(pathlib.Path(scratch) / "model")
        for number, (count, shape) in enumerate(itertools.product(rows, layout)):
            folder = pathlib.Path(scratch) / f"case-{number}"
            cases.append(
                run_case(
                    folder,
                    model,
                    rows=count,
                    layout=shape,
                    num_seqs=max_num_seqs,
                    max_tokens=max_tokens,
                )
            )
            shutil.rmtree(folder)
    print_cases(cases)
    settings = {
        "seed": SEED,
        "max_num_seqs": max_num_seqs,
        "max_tokens": max_tokens,
        "rows_per_part": ROWS_PER_PART,
    }
    figures = [dataclasses.asdict(case) for case in cases]
    print(json.dumps({"benchmark": "rows", **environment, **settings, "cases": figures}))


if __name__ == "__main__":
    main()
