"""Compiles the GPU kernels for one card, on a machine that needs no GPU, and measures the code.

One process compiles for one card only; `compile_gate.py` runs this once for each card.

    python scripts/compile_target.py h100
    python scripts/compile_target.py l4 bfloat16/int4/d128/h32x8/s16

Needs the packages of `pip install '.[gpu-compile]'`. Nothing is run: neither results nor speed are
checked. Prints JSON objects as `gate_child.py` says; about a case, one for each kernel
(`Measurement`).
"""

import dataclasses
import pathlib
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor

import click
import gpu_compiler
import gpu_targets
import kernel_code
from gate_child import said_failure, say, scratch_option
from gpu_compiler import Compiler
from kernel_cases import CASES, DEADLY_FAULTS, FAULTS, Case
from kernel_code import Measurement

MOST_WAITING = 4
"""Programs that are compiled and not yet measured, at most."""


@click.command()
@click.argument("target", type=click.Choice(list(gpu_targets.TARGETS)))
@click.argument(
    "cases",
    nargs=-1,
    type=click.Choice([*CASES, *FAULTS, *DEADLY_FAULTS]),
    metavar="[CASE]...",
)
@scratch_option
def main(target: str, cases: tuple[str, ...], scratch: pathlib.Path | None) -> None:
    """Compile the kernels for a card and print what each takes, as JSON; all cases by default.

    Example: python scripts/compile_target.py h100
    """
    say({"target": target, **gpu_compiler.versions()})
    card = gpu_targets.TARGETS[target]
    compiler = Compiler(card)
    known = {**CASES, **FAULTS, **DEADLY_FAULTS}
    names = cases or [case.name for case in CASES.values() if case.is_for(card)]
    measured: list[tuple[Case, Future[list[Measurement]]]] = []

    def say_measured(most_left: int) -> None:
        while len(measured) > most_left:
            case, future = measured.pop(0)
            with said_failure(case.name):
                for measurement in future.result():
                    say(dataclasses.asdict(measurement))

    # While ptxas measures one case, the next is compiled.
    with tempfile.TemporaryDirectory(dir=scratch) as dumps, ThreadPoolExecutor(1) as executor:
        for case in (known[name] for name in names):
            say({"starts": case.name})
            with said_failure(case.name):
                for program in case.programs(compiler.shape):
                    folder = pathlib.Path(tempfile.mkdtemp(dir=dumps))
                    compiler.compile(program, folder)
                    measuring = executor.submit(kernel_code.measure, case, folder, card)
                    measured.append((case, measuring))
            say_measured(MOST_WAITING)
        say_measured(0)


if __name__ == "__main__":
    main()
