"""Exactly once, by force: jobs that are killed again and again come out as if nobody had.

Regime: a tiny random Llama on the real engine and a few dozen rows, a process for each round; it
is sent SIGKILL at a random moment of its life, or by its own disk at a numbered step. Each job is
run to its end, extended by a file, and retried in part, under kills all the way.

    python scripts/chaos_job.py --rounds 200 --seed 0
    python scripts/chaos_job.py --rounds 10 --no-steps        # within a minute

After each kill, and in some rounds all the time, an outside reader reads the folder with three
libraries: each file reads, no row is there twice or wrong, none that was there is gone. In the end
the table is that of a job nobody killed, `verify` finds nothing, and no row was completed again
that had finished longer than the journal's interval before a kill. Ends with 1 at the first
violation, whose folder stays. Needs Linux. Prints its counts; the last line is one JSON object.
"""

# The tests' own modules are found at run time.
# pyright: reportMissingImports=false

import json
import pathlib
import shutil
import sys
import tempfile
import time

import bench_environment
import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from chaos_rounds import Chaos
from nursery import Nursery
from outside_reader import Violation

CHILD = pathlib.Path(__file__).resolve().parent / "chaos_child.py"
SHOWN_ROUNDS = 20


@click.command()
@click.option("--rounds", type=click.IntRange(0), default=200, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--steps/--no-steps", default=True, help="Also kill at each step of the disk.")
@click.option("--engines", type=click.IntRange(1, 2), default=2, help="Sizes of engine to mix.")
@click.option(
    "--cache",
    type=click.Path(path_type=pathlib.Path, file_okay=False),
    help="Keep compiled steps here, for the next time.",
)
def main(rounds: int, seed: int, *, steps: bool, engines: int, cache: pathlib.Path | None) -> None:
    """Kill jobs so often, and check what they leave and what they come to.

    Example: python scripts/chaos_job.py --rounds 10 --no-steps
    """
    environment = bench_environment.describe()
    started = time.monotonic()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
    command = [sys.executable, str(CHILD), str(cache or folder / "cache")]
    with Nursery(command, folder / "log") as nursery:
        chaos = Chaos(folder, nursery, seed=seed, num_engines=engines)
        try:
            _run(chaos, rounds, has_steps=steps)
        except Violation as error:
            done = f"after {chaos.counts.random_kills} rounds and {chaos.counts.step_kills} steps"
            raise click.ClickException(f"{done} of seed {seed}: {error}\nsee {folder}") from None
    shutil.rmtree(folder)
    figures = chaos.figures() | {"seconds": round(time.monotonic() - started, 1)}
    _print_figures(figures)
    print(
        json.dumps({"benchmark": "chaos", "seed": seed, "rounds": rounds, **figures, **environment})
    )


def _run(chaos: Chaos, rounds: int, *, has_steps: bool) -> None:
    """All of it; says now and then how far it is."""
    click.echo("measuring jobs that nobody kills", err=True)
    chaos.measure()
    for number in range(1, rounds + 1):
        chaos.random_round()
        if not number % SHOWN_ROUNDS or number == rounds:
            click.echo(f"{number} of {rounds} rounds", err=True)
    chaos.finish()
    while has_steps and chaos.next_step():
        if not chaos.counts.steps % SHOWN_ROUNDS:
            click.echo(f"{chaos.counts.steps} steps", err=True)


def _print_figures(figures: dict[str, object]) -> None:
    shown = Table(title="jobs under kills", show_header=False)
    for name, value in figures.items():
        text = f"{value:,}" if isinstance(value, int | float) else json.dumps(value)
        shown.add_row(name.replace("_", " "), text)
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
