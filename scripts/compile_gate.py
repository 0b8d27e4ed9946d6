"""Compiles every configuration of the GPU kernels for every card, and fails if the code is bad.

Needs no GPU, but the packages of `pip install '.[gpu-compile]'`, best in an environment of its
own: with them JAX looks for a GPU wherever it is imported.

    python scripts/compile_gate.py
    python scripts/compile_gate.py --target h100 --only '*/int4/*'
    python scripts/compile_gate.py --markdown docs/gpu_kernels.md
    python scripts/compile_gate.py --self-test

Bad is what does not compile, a kernel that does not come out, any spill, and registers or shared
memory above `gpu_budgets.toml`. Prints a table for each card and what is wrong; the exit status is
1 if anything is. Nothing is run: neither results nor speed are checked.

A new tiling, compiler or JAX moves the numbers. `--write-budgets new` makes the budgets anew from
what was just measured, `--write-budgets raised`, with the other version of JAX, raises those that
are too low for it. Their difference is then to be judged like any other change.
"""

import dataclasses
import fnmatch
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import click
import gpu_targets
from compile_target import CASES, FAULTS, Case, Measurement
from gpu_targets import Target
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SCRIPTS = pathlib.Path(__file__).resolve().parent
BUDGETS = SCRIPTS / "gpu_budgets.toml"
BEGIN, END = "<!-- compile-gate: begin -->", "<!-- compile-gate: end -->"
CHILD_SECONDS = 900
LOG_CHARACTERS = 1500

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a child had to say.

    Attributes:
        versions: Of JAX and ptxas; empty if it did not come that far.
        measurements: Of the kernels that came out.
        errors: Why a case did not compile, by its name.
        crash: How the process ended before it was done, and during which case.
    """

    versions: dict[str, str]
    measurements: tuple[Measurement, ...]
    errors: dict[str, str]
    crash: str | None


def read_report(out: str, log: str, status: int) -> Report:
    """The report of a child, from what it printed, its log and its exit status."""
    versions: dict[str, str] = {}
    measurements: list[Measurement] = []
    errors: dict[str, str] = {}
    latest = "the first case"
    for line in out.splitlines():
        match item := json.loads(line):
            case {"starts": str(name)}:
                latest = name
            case {"error": str(text), "case": str(name)}:
                errors[name] = text
            case {"kernel": _}:
                measurements.append(Measurement(**item))
            case {"jax": str(jax), "ptxas": str(ptxas)}:
                versions = {"jax": jax, "ptxas": ptxas}
    crash = None
    if status:
        tail = log.strip()[-LOG_CHARACTERS:] or "it left no message"
        crash = f"the process ended with status {status}, latest at {latest}: {tail}"
    return Report(versions=versions, measurements=tuple(measurements), errors=errors, crash=crash)


def compile_for(target: Target, cases: Iterable[Case]) -> Report:
    """Compiles the cases for a card, in a process of its own."""
    names = [case.name for case in cases]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(SCRIPTS / "compile_target.py"), "--scratch", scratch]
        try:
            child = subprocess.run(
                [*command, target.name, *names],
                capture_output=True,
                text=True,
                check=False,
                timeout=CHILD_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise click.ClickException(f"{target.name}: {error}") from error
    return read_report(child.stdout, child.stderr, child.returncode)


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
    measured = {(found.case, found.kernel): found for found in report.measurements}
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


def code_table(
    target: Target, cases: Iterable[Case], report: Report, *, markdown: bool = False
) -> Table:
    """What each kernel takes on a card; a row for each case."""
    cases = list(cases)
    kernels = list(dict.fromkeys(kernel for case in cases for kernel in case.kernels))
    measured = {(found.case, found.kernel): found for found in report.measurements}
    table = Table(box=box.MARKDOWN if markdown else box.SIMPLE, title_justify="left")
    if not markdown:
        table.title = f"{target.name}, {target.arch}: registers x threads, KiB shared, blocks/SM"
    table.add_column("case", no_wrap=True)
    for kernel in kernels:
        table.add_column(kernel, justify="right", no_wrap=True)
    for case in cases:
        cells = [_cell(measured.get((case.name, kernel))) for kernel in kernels]
        table.add_row(case.name, *cells)
    return table


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
        "heads / block size. A cell is registers of a thread x threads of a block, shared memory "
        "of a block in KiB, blocks that an SM holds at once."
    ]
    for name, report in reports.items():
        target = gpu_targets.TARGETS[name]
        console = Console(width=200, color_system=None)
        with console.capture() as capture:
            console.print(code_table(target, cases, report, markdown=True))
        lines = [line.strip() for line in capture.get().splitlines() if line.strip()]
        parts.append(f"### {target.device} ({target.arch})\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def replace_marked(page: str, text: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """The page with the text between two markers, which stay.

    Raises:
        click.ClickException: The markers are not there, each once.
    """
    begin, end = markers
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise click.ClickException(f"the page needs one {begin} and, behind it, one {end}")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def self_test(target: Target) -> list[str]:
    """Which faults the gate does not see, in kernels that are bad on purpose."""
    expected = {
        "fault/spill": "spill spills",
        "fault/shared_memory": "does not compile: JaxRuntimeError: RESOURCE_EXHAUSTED: Shared mem",
        "fault/width": "whose size is a power of 2",
        "fault/budget": "budget takes",
        "fault/missing": "another is missing",
        "fault/abort": "the process ended with status",
    }
    if expected.keys() != FAULTS.keys():
        raise AssertionError(f"{expected.keys() ^ FAULTS.keys()} is tried or expected, not both")
    ample = Budget(registers=MOST_REGISTERS, shared_bytes=target.shared_block_bytes)
    budgets = {
        (kernel, case.kv_dtype, case.head_dim): ample
        for case in FAULTS.values()
        for kernel in case.kernels
    }
    tight = FAULTS["fault/budget"]
    budgets[tight.kernels[0], tight.kv_dtype, tight.head_dim] = Budget(registers=1, shared_bytes=0)
    # What ends the process takes other reports with it.
    deadly = FAULTS["fault/abort"]
    others = [case for case in FAULTS.values() if case is not deadly]
    problems = [
        problem
        for cases in (others, [deadly])
        for problem in find_problems(target, cases, compile_for(target, cases), budgets)
    ]
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
        console.print(f"all {len(FAULTS)} faults were seen")
        return
    cases = [case for case in CASES.values() if fnmatch.fnmatchcase(case.name, only)]
    if not cases:
        raise click.ClickException(f"no case is like {only}; there are {', '.join(CASES)}")
    if (write_budgets or markdown) and (names or len(cases) < len(CASES)):
        raise click.ClickException("what is written must be of all cards and cases")
    targets = [gpu_targets.TARGETS[name] for name in names or gpu_targets.TARGETS]
    started = time.perf_counter()
    # Each waits for its child; together they keep two cores busy.
    with ThreadPoolExecutor(len(targets)) as executor:
        found = executor.map(lambda target: compile_for(target, cases), targets)
        reports = dict(zip((target.name for target in targets), found, strict=True))
    for target in targets:
        console.print(code_table(target, cases, reports[target.name]))
    measurements = [found for report in reports.values() for found in report.measurements]
    if write_budgets:
        wanted = new_budgets(cases, measurements)
        if write_budgets == "raised":
            wanted = raised_budgets(read_budgets(BUDGETS.read_text()), wanted)
        BUDGETS.write_text(format_budgets(wanted))
    budgets = read_budgets(BUDGETS.read_text())
    problems = [
        problem
        for target in targets
        for problem in find_problems(target, cases, reports[target.name], budgets)
    ]
    if markdown and all(report.versions for report in reports.values()):
        text = markdown_text(reports, cases)
        markdown.write_text(replace_marked(markdown.read_text(), text))
    fail_on(problems, console)
    versions = reports[targets[0].name].versions
    console.print(
        f"{len(measurements)} kernels for {len(targets)} cards within their budgets; "
        f"JAX {versions['jax']}, ptxas {versions['ptxas']}, {time.perf_counter() - started:.0f} s"
    )


def fail_on(problems: Sequence[str], console: Console) -> None:
    """Ends the program, saying what is wrong, if anything is."""
    if problems:
        console.print(f"{len(problems)} problems:", style="bold red")
        for problem in problems:
            console.print(f"- {escape(problem)}", soft_wrap=True)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
