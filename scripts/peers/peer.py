"""What every peer of the benchmark does alike: read a workload, measure, write completions.

Peers run in environments of their own, which have pyarrow and not jaxpaged. A workload is token
ids, so tokenizers cannot differ; end-of-sequence is ignored, so every run does the same work.
"""

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyarrow import parquet


class Row(NamedTuple):
    """A prompt and how much is wanted of it."""

    id: int
    prompt_ids: list[int]
    max_tokens: int


ALONE = 9
"""Prompts that are timed alone."""

Runner = Callable[[Sequence[Row]], Mapping[int, Sequence[int]]]
"""Completes rows: token ids by the row's id."""


class Loaded(NamedTuple):
    """A peer that is ready.

    Attributes:
        run: Completes rows.
        version: Of the peer and of what it stands on.
        settings: Those that matter, for the record.
    """

    run: Runner
    version: str
    settings: dict[str, object]


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all peers take."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--model", required=True, help="in the form that this peer reads")
    found.add_argument("--workload", type=pathlib.Path, required=True)
    found.add_argument("--out", type=pathlib.Path, required=True, help="Parquet of the completions")
    found.add_argument("--limit", type=int, help="only so many rows from the start")
    found.add_argument("--max-num-seqs", type=int, default=64)
    found.add_argument("--max-num-batched-tokens", type=int, default=512)
    found.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return found


def read_rows(options: argparse.Namespace) -> list[Row]:
    """The workload's rows."""
    table = parquet.read_table(options.workload, columns=list(Row._fields))
    return [Row(**row) for row in table.slice(0, options.limit).to_pylist()]


def measure(options: argparse.Namespace, load: Callable[[Sequence[Row]], Loaded]) -> None:
    """Load, warm up, complete all rows once; print what it took as a line of JSON.

    The warm-up shares nothing with the work: its prompts are turned round.
    """
    rows = read_rows(options)
    started = time.perf_counter()
    loaded = load(rows)
    ready = time.perf_counter()
    loaded.run([Row(-1 - row.id, row.prompt_ids[::-1], 4) for row in rows[:4]])
    warm = time.perf_counter()
    load_before, others = os.getloadavg()[0], busy_elsewhere()
    begun = time.perf_counter()
    completions = loaded.run(rows)
    seconds = time.perf_counter() - begun
    others = busy_elsewhere() - others
    peak = peak_rss_mib()
    columns = {
        "id": pa.array([row.id for row in rows], pa.int64()),
        "token_ids": pa.array([list(completions[row.id]) for row in rows], pa.list_(pa.int32())),
    }
    parquet.write_table(pa.table(columns), options.out)
    figures = {
        "version": loaded.version,
        **loaded.settings,
        "rows": len(rows),
        "prompt_tokens": sum(len(row.prompt_ids) for row in rows),
        "output_tokens": sum(len(completions[row.id]) for row in rows),
        "wanted_tokens": sum(row.max_tokens for row in rows),
        "wall_seconds": round(seconds, 2),
        "load_seconds": round(ready - started, 1),
        "warm_up_seconds": round(warm - ready, 1),
        "peak_rss_mib": peak,
        "first_token_ms": first_token_ms(rows, loaded.run),
        "load_before": round(load_before, 2),
        "other_cores": round(max(0.0, others) / seconds, 2),
    }
    print(json.dumps(figures))


def first_token_ms(rows: Sequence[Row], run: Runner) -> float:
    """Milliseconds to the first token of a prompt that nothing runs beside.

    The median of some prompts of the work, shifted by a token: none was computed before.
    """
    times = []
    for row in rows[:ALONE]:
        begun = time.perf_counter()
        run([Row(-1 - row.id, [*row.prompt_ids[1:], row.prompt_ids[0]], 1)])
        times.append(time.perf_counter() - begun)
    return round(1000 * statistics.median(times), 1)


def peak_rss_mib() -> int:
    """Most memory that this process has had, in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def busy_elsewhere() -> float:
    """Seconds that the machine's cores have worked for other processes."""
    ticks = [int(x) for x in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    own = os.times()
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - (own.user + own.system)
