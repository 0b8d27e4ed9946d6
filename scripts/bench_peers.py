"""jaxpaged beside other engines on the same work: who completes how many tokens a second.

Every peer runs in an environment of its own, given by the path of its Python, and reads the model
in its own form. They take turns: in each round every peer completes the workload once, so that what
else the machine does meets all of them. Loading, compiling and warming up are left out of the time
and reported beside it. All peers get the same token ids and must give as many tokens; how many rows
have exactly the tokens of the first peer is counted.

    python scripts/bench_peers.py --workload w1.parquet --workload w2.parquet \\
        --peer jaxpaged=.venv/bin/python,MODEL --peer openvino=OV/bin/python,OV_MODEL \\
        --peer vllm=VLLM/bin/python,HF_MODEL --option 'openvino:--max-num-seqs=128'

`scripts/peers/NAME_peer.py` drives the peer NAME, and says at its top what its environment needs.
Prints a table for each workload, best round of each peer; writes all rounds as JSON.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import bench_environment
import click
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

SCRIPTS = pathlib.Path(__file__).resolve().parent
NOISY_CORES = 0.15
"""Work of other processes, in cores, above which a figure is marked."""

COLUMNS = {
    "total_per_second": "tokens/s",
    "ratio": "of the best other",
    "wall_seconds": "seconds",
    "output_per_second": "new tokens/s",
    "first_token_ms": "first token ms",
    "peak_rss_mib": "peak MiB",
    "load_seconds": "load s",
    "warm_up_seconds": "warm-up s",
    "padding_share_of_computed_tokens": "padding",
    "host_share_of_wall": "host",
    "rows_equal": "rows equal",
    "other_cores": "other cores",
}


def run_peer(
    name: str, python: str, model: str, workload: pathlib.Path, options: Sequence[str]
) -> dict[str, Any]:
    """One run of a peer: its figures, and its completions as token ids by row id.

    Raises:
        click.ClickException: It failed, or gave another number of tokens than was wanted.
    """
    script = SCRIPTS / "peers" / f"{name.partition('@')[0]}_peer.py"
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch) / "completions.parquet"
        command = [python, str(script), "--model", model, "--workload", str(workload)]
        # Waiting threads of OpenMP must not take the core of whoever works.
        waits = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        environment = {**os.environ, **waits}  # noqa: TID251 - of other programs
        if name.partition("@")[0] == "jaxpaged":
            environment["PYTHONPATH"] = str(SCRIPTS.parent)
        ran = subprocess.run(
            [*command, "--out", str(out), *options],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=scratch,
        )
        if ran.returncode:
            raise click.ClickException(f"{name} on {workload.name} failed: {ran.stderr[-2000:]}")
        figures = json.loads(ran.stdout.strip().splitlines()[-1])
        table = parquet.read_table(out)
    if figures["output_tokens"] != figures["wanted_tokens"]:
        raise click.ClickException(
            f"{name} on {workload.name}: {figures['output_tokens']} tokens, "
            f"{figures['wanted_tokens']} were wanted"
        )
    ids, tokens = table["id"].to_pylist(), table["token_ids"].to_pylist()
    total = figures["prompt_tokens"] + figures["output_tokens"]
    return {
        **figures,
        "peer": name,
        "workload": workload.stem,
        "options": list(options),
        "total_per_second": round(total / figures["wall_seconds"], 1),
        "output_per_second": round(figures["output_tokens"] / figures["wall_seconds"], 1),
        "completions": dict(zip(ids, tokens, strict=True)),
    }


def absolute(place: str) -> str:
    """A path from the root; what is no path stays. Links stay: they make an environment."""
    path = pathlib.Path(place)
    return str(path.absolute()) if path.exists() else place


def best_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest run of each peer, in order, with its ratio to the fastest other one."""
    best: dict[str, dict[str, Any]] = {}
    for run in runs:
        known = best.get(run["peer"])
        if known is None or run["wall_seconds"] < known["wall_seconds"]:
            best[run["peer"]] = run
    for name, run in best.items():
        others = [other["total_per_second"] for key, other in best.items() if key != name]
        run["ratio"] = round(run["total_per_second"] / max(others), 3) if others else None
    return list(best.values())


def count_equal(runs: Sequence[dict[str, Any]]) -> None:
    """How many rows of each run have the tokens of the first one; completions are taken out."""
    first: Mapping[int, list[int]] = runs[0]["completions"]
    for run in runs:
        found = run["completions"]
        run["rows_equal"] = sum(found[row] == tokens for row, tokens in first.items())
    for run in runs:
        del run["completions"]


def show(name: str, runs: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table of the best runs on a workload."""
    table = Table(title=f"{name}, {runs[0]['rows']} rows", title_justify="left")
    table.add_column("peer")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    for run in runs:
        is_noisy = run["other_cores"] > NOISY_CORES
        cells = ["" if run.get(key) is None else f"{run[key]:,}" for key in COLUMNS]
        table.add_row(run["peer"] + (" (noisy)" if is_noisy else ""), *cells)
    console.print(table)


@click.command()
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    required=True,
    type=click.Path(path_type=pathlib.Path, exists=True, dir_okay=False, resolve_path=True),
    help="Parquet with the columns id, prompt_ids and max_tokens.",
)
@click.option("--peer", "peers", multiple=True, required=True, metavar="NAME=PYTHON,MODEL")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME:OPTION",
    help="Given to a peer; NAME may be `NAME/WORKLOAD`.",
)
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--limit", type=click.IntRange(1), help="Only so many rows from the start.")
@click.option("--out", type=click.Path(path_type=pathlib.Path, dir_okay=False), help="JSON file.")
def main(
    workloads: tuple[pathlib.Path, ...],
    peers: tuple[str, ...],
    options: tuple[str, ...],
    rounds: int,
    limit: int | None,
    out: pathlib.Path | None,
) -> None:
    """Run jaxpaged and other engines on the same work, in turns.

    A name may have a tag behind an @, so that one engine can take part twice.
    """
    console = Console(width=180)
    record: dict[str, Any] = {"benchmark": "peers", **bench_environment.describe(), "runs": []}
    for workload in workloads:
        runs = []
        for _ in range(rounds):
            for peer in peers:
                name, _, place = peer.partition("=")
                python, _, model = place.partition(",")
                wanted = {name, f"{name}/{workload.stem}"}
                parts = [option.partition(":") for option in options]
                given = [option for key, _, option in parts if key in wanted]
                given += ["--limit", str(limit)] if limit else []
                runs.append(run_peer(name, absolute(python), absolute(model), workload, given))
                run = runs[-1]
                print(
                    f"{run['workload']} {name}: {run['total_per_second']} tokens/s, "
                    f"{run['other_cores']} other cores",
                    file=sys.stderr,
                )
        count_equal(runs)
        show(workload.stem, best_of(runs), console)
        record["runs"] += runs
        if out:
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
