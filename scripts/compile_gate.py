"""Compiles every configuration of the GPU kernels for every card, and fails if the code is bad.

Needs no GPU, but the packages of `pip install '.[gpu-compile]'`, best in an environment of its
own: with them JAX looks for a GPU wherever it is imported.

    python scripts/compile_gate.py
    python scripts/compile_gate.py --target h100 --only '*/int4/*'
    python scripts/compile_gate.py --markdown docs/gpu_kernels.md
    python scripts/compile_gate.py --self-test

Bad is what does not compile, a kernel that does not come out, any spill, and registers or shared
memory above `gpu_budgets.toml`. Prints a table for each card and what is wrong; the exit status is
1 if anything is. Nothing is run: neither results nor speed are checked. The kernels of Mosaic GPU
are compiled for Hopper alone, and only with a JAX that has them.

A new tiling, compiler or JAX moves the numbers. `--write-budgets new` makes the budgets anew from
what was just measured, `--write-budgets raised`, with the other version of JAX, raises those that
are too low for it. Their difference is then to be judged like any other change.
"""

import dataclasses
import fnmatch
import math
import pathlib
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import click
import gate_child
import gpu_targets
import jax
from gate_output import fail_on, replace_marked, table_text
from gpu_targets import Target
from kernel_cases import CASES, DEADLY_FAULTS, FAULTS, HAS_MOSAIC, MOSAIC_CASES, Case
from kernel_code import Measurement
from rich import box
from rich.console import Console
from rich.table import Table

CHILD = "compile_target.py"
BUDGETS = pathlib.Path(__file__).resolve().parent / "gpu_budgets.toml"
MARKERS = ("<!-- compile-gate: begin -->", "<!-- compile-gate: end -->")

MOST_REGISTERS = 255
REGISTER_SLACK = 1.1
"""A new budget over what was measured."""
REGISTER_STEP, SHARED_STEP = 8, 1024
"""New budgets are multiples of these; the second is in bytes."""

BudgetKey = tuple[str, str, int]
"""Kernel, dtype of the keys and values, and head width."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a kernel may take, on any card.

    Attributes:
        registers: Of a thread, at most.
        shared_bytes: Shared memory of a block, at most.
    """

    registers: int
    shared_bytes: int


Report = gate_child.Report[Measurement]


def read_measurement(item: dict[str, Any]) -> Measurement:
    """What a child printed about a kernel."""
    return Measurement(**item)


def read_budgets(text: str) -> dict[BudgetKey, Budget]:
    """Budgets from TOML: `[KERNEL.KV_DTYPE]`, and in it a line for each head width."""
    return {
        (kernel, kv_dtype, int(width)): Budget(**limits)
        for kernel, dtypes in tomllib.loads(text).items()
        for kv_dtype, widths in dtypes.items()
        for width, limits in widths.items()
    }


def find_problems(
    target: Target,
    cases: Iterable[Case],
    report: Report,
    budgets: Mapping[BudgetKey, Budget],
) -> list[str]:
    """What is wrong with the code for a card, a line each."""
    measured = {(found.case, found.kernel): found for found in report.found}
    problems, unmeasured = [], []
    for case in cases:
        where = f"{target.name} {case.name}"
        if case.name in report.errors:
            problems.append(f"{where}: does not compile: {report.errors[case.name]}")
            continue
        if report.crash and not any((case.name, kernel) in measured for kernel in case.kernels):
            unmeasured.append(case.name)
            continue
        for kernel in case.kernels:
            found = measured.get((case.name, kernel))
            budget = budgets.get((kernel, case.kv_dtype, case.head_dim))
            wrong = ["is missing"] if found is None else _what_is_wrong(target, found, budget)
            problems.extend(f"{where}: {kernel} {what}" for what in wrong)
    if report.crash:
        problems.append(f"{target.name}: {report.crash}")
    if unmeasured:
        problems.append(
            f"{target.name}: {len(unmeasured)} cases were not compiled: {', '.join(unmeasured)}"
        )
    return problems


def _what_is_wrong(target: Target, found: Measurement, budget: Budget | None) -> list[str]:
    wrong = []
    if found.arch != target.arch:
        wrong.append(f"is for {found.arch}, not for {target.arch}")
    if found.spill_bytes:
        wrong.append(f"spills {found.spill_bytes} bytes")
    if budget is None:
        return [*wrong, f"has no budget in {BUDGETS.name}"]
    if found.registers > budget.registers:
        wrong.append(f"takes {found.registers} registers, more than {budget.registers}")
    if found.shared_bytes > budget.shared_bytes:
        wrong.append(
            f"takes {found.shared_bytes} bytes of shared memory, more than {budget.shared_bytes}"
        )
    return wrong


def new_budgets(
    cases: Iterable[Case], measurements: Iterable[Measurement]
) -> dict[BudgetKey, Budget]:
    """The largest of what was measured by kernel, dtype and head width, and some slack."""
    keys: dict[tuple[str, str], BudgetKey] = {
        (case.name, kernel): (kernel, case.kv_dtype, case.head_dim)
        for case in cases
        for kernel in case.kernels
    }
    measured: dict[BudgetKey, list[Measurement]] = {key: [] for key in sorted(keys.values())}
    for found in measurements:
        measured[keys[found.case, found.kernel]].append(found)
    return {
        key: Budget(
            registers=min(
                _up(max(found.registers for found in alike) * REGISTER_SLACK, REGISTER_STEP),
                MOST_REGISTERS,
            ),
            # One version of JAX gives a kernel a few bytes that another does not.
            shared_bytes=_up(max(1, *(found.shared_bytes for found in alike)), SHARED_STEP),
        )
        for key, alike in measured.items()
        if alike
    }


def raised_budgets(
    old: Mapping[BudgetKey, Budget], new: Mapping[BudgetKey, Budget]
) -> dict[BudgetKey, Budget]:
    """Of two budgets for a kernel the larger, number by number."""
    raised = dict(old)
    for key, budget in new.items():
        before = old.get(key, budget)
        raised[key] = Budget(
            registers=max(before.registers, budget.registers),
            shared_bytes=max(before.shared_bytes, budget.shared_bytes),
        )
    return dict(sorted(raised.items()))


def _up(number: float, step: int) -> int:
    return math.ceil(number / step) * step


def format_budgets(budgets: Mapping[BudgetKey, Budget]) -> str:
    """The text that `read_budgets` reads."""
    lines = [
        "# What each kernel may take on any card: registers of a thread, bytes of shared memory of",
        "# a block; by kernel, dtype of the keys and values, and head width. Nothing may spill.",
        "# Made by `python scripts/compile_gate.py --write-budgets`: measured, and a tenth more.",
    ]
    table = None
    for (kernel, kv_dtype, width), budget in budgets.items():
        if table != (kernel, kv_dtype):
            table = (kernel, kv_dtype)
            lines += ["", f"[{kernel}.{kv_dtype}]"]
        lines.append(
            f"{width} = {{ registers = {budget.registers}, shared_bytes = {budget.shared_bytes} }}"
        )
    return "\n".join(lines) + "\n"


def code_tables(
    target: Target, cases: Iterable[Case], report: Report, *, markdown: bool = False
) -> list[Table]:
    """What each kernel takes on a card; a table for cases of the same kernels, a row for a case."""
    alike: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        alike.setdefault(case.kernels, []).append(case)
    measured = {(found.case, found.kernel): found for found in report.found}
    tables = []
    for kernels, rows in alike.items():
        table = Table(box=box.MARKDOWN if markdown else box.SIMPLE, title_justify="left")
        if not markdown:
            table.title = (
                f"{target.name}, {target.arch}: registers x threads, KiB shared, blocks/SM"
            )
        table.add_column("case", no_wrap=True)
        for kernel in kernels:
            table.add_column(kernel, justify="right", no_wrap=True)
        for case in rows:
            cells = [_cell(measured.get((case.name, kernel))) for kernel in kernels]
            table.add_row(case.name, *cells)
        tables.append(table)
    return tables


def _cell(found: Measurement | None) -> str:
    if found is None:
        return "-"
    shared = f"{found.shared_bytes / 1024:.1f}"
    cell = f"{found.registers} x {found.threads}, {shared}, {found.blocks_per_core}"
    return f"{cell}, SPILLS {found.spill_bytes}" if found.spill_bytes else cell


def markdown_text(reports: Mapping[str, Report], cases: Sequence[Case]) -> str:
    """The tables as they stand in the documentation."""
    versions = next(iter(reports.values())).versions
    parts = [
        f"Made by `python scripts/compile_gate.py --markdown` with JAX {versions['jax']} and ptxas "
        f"{versions['ptxas']}. A case is query dtype / KV dtype / head width / query heads x KV "
        "heads / block size, of the Triton backend or, where it says so, of Mosaic GPU; or of the "
        "linear map by packed weights dtype / weight dtype / rows. A cell is "
        "registers of a thread x threads of a block, shared memory of a block in KiB, blocks that "
        "an SM holds at once."
    ]
    for name, report in reports.items():
        target = gpu_targets.TARGETS[name]
        served = [case for case in cases if case.is_for(target)]
        parts.append(f"### {target.device} ({target.arch})")
        parts += map(table_text, code_tables(target, served, report, markdown=True))
    return "\n\n".join(parts)


def self_test(target: Target) -> list[str]:
    """Which faults the gate does not see, in kernels that are bad on purpose."""
    expected = {
        "fault/spill": "spill spills",
        "fault/shared_memory": "does not compile: JaxRuntimeError: RESOURCE_EXHAUSTED: Shared mem",
        "fault/width": "whose size is a power of 2",
        "fault/budget": "budget takes",
        "fault/missing": "another is missing",
        **dict.fromkeys(DEADLY_FAULTS, "the process ended with status"),
    }
    faults = FAULTS | DEADLY_FAULTS
    if expected.keys() != faults.keys():
        raise AssertionError(f"{expected.keys() ^ faults.keys()} is tried or expected, not both")
    ample = Budget(registers=MOST_REGISTERS, shared_bytes=target.shared_block_bytes)
    budgets = {
        (kernel, case.kv_dtype, case.head_dim): ample
        for case in faults.values()
        for kernel in case.kernels
    }
    tight = FAULTS["fault/budget"]
    budgets[tight.kernels[0], tight.kv_dtype, tight.head_dim] = Budget(registers=1, shared_bytes=0)
    # What ends the process takes other reports with it.
    problems = []
    for cases in (list(FAULTS.values()), *([deadly] for deadly in DEADLY_FAULTS.values())):
        names = [case.name for case in cases]
        report = gate_child.run(CHILD, target.name, names, read=read_measurement)
        problems += find_problems(target, cases, report, budgets)
    for problem in problems:
        print(f"seen: {problem}")
    return [
        f"{name} was let through: nothing says '{words}'"
        for name, words in expected.items()
        if not any(name in problem and words in problem for problem in problems)
    ]


@click.command()
@click.option(
    "--target",
    "names",
    multiple=True,
    type=click.Choice(list(gpu_targets.TARGETS)),
    help="A card; may be given several times. All, by default.",
)
@click.option("--only", metavar="PATTERN", default="*", help="Cases to compile, as a glob.")
@click.option(
    "--markdown",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="Write the tables into this page too, between its markers.",
)
@click.option(
    "--write-budgets",
    type=click.Choice(["new", "raised"]),
    help=f"Make {BUDGETS.name} anew from what is measured, or raise what is too low for it.",
)
@click.option("--self-test", "tries_faults", is_flag=True, help="Try the gate on bad kernels.")
def main(
    names: tuple[str, ...],
    only: str,
    markdown: pathlib.Path | None,
    write_budgets: Literal["new", "raised"] | None,
    tries_faults: bool,
) -> None:
    """Compile the GPU kernels without a GPU, and fail if the code is bad.

    Example: python scripts/compile_gate.py --target h100 --only '*/int4/*'
    """
    console = Console(width=130, highlight=False)
    if tries_faults:
        fail_on(self_test(gpu_targets.L4), console)
        console.print(f"all {len(FAULTS | DEADLY_FAULTS)} faults were seen")
        return
    cases = [case for case in CASES.values() if fnmatch.fnmatchcase(case.name, only)]
    if (write_budgets or markdown) and (names or len(cases) < len(CASES)):
        raise click.ClickException("what is written must be of all cards and cases")
    wanted = {
        target: served
        for target in (gpu_targets.TARGETS[name] for name in names or gpu_targets.TARGETS)
        if (served := [case for case in cases if case.is_for(target)])
    }
    if not wanted:
        raise click.ClickException(
            f"no such card has a case like {only}; cases: {', '.join(CASES)}"
        )
    started = time.perf_counter()
    reports = gate_child.run_all(
        CHILD,
        {target.name: [case.name for case in served] for target, served in wanted.items()},
        read=read_measurement,
    )
    for target, served in wanted.items():
        console.print(*code_tables(target, served, reports[target.name]))
    measurements = [found for report in reports.values() for found in report.found]
    if write_budgets:
        new = new_budgets(cases, measurements)
        if write_budgets == "raised":
            new = raised_budgets(read_budgets(BUDGETS.read_text()), new)
        BUDGETS.write_text(format_budgets(new))
    budgets = read_budgets(BUDGETS.read_text())
    problems = [
        problem
        for target, served in wanted.items()
        for problem in find_problems(target, served, reports[target.name], budgets)
    ]
    versions = next(iter(reports.values())).versions
    if markdown and all(report.versions for report in reports.values()):
        text = markdown_text(reports, cases)
        markdown.write_text(replace_marked(markdown.read_text(), text, MARKERS))
    if not HAS_MOSAIC:
        console.print(f"JAX {jax.__version__} lacks Mosaic GPU: {len(MOSAIC_CASES)} cases left out")
    fail_on(problems, console)
    console.print(
        f"{len(measurements)} kernels for {len(wanted)} cards within their budgets; "
        f"JAX {versions['jax']}, ptxas {versions['ptxas']}, {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
