"""Compiles whole steps of the engine for GPUs, and fails if they do needless work.

Needs no GPU, but the packages of `pip install '.[gpu-compile]'`, best in an environment of its
own: with them JAX looks for a GPU wherever it is imported.

    python scripts/step_gate.py
    python scripts/step_gate.py --target h100 --only '*/decode'
    python scripts/step_gate.py --markdown docs/gpu_kernels.md
    python scripts/step_gate.py --self-test

A step is the forward program of a model in bfloat16; the sampler, with the product with the head,
is another one and not part of it. What is counted, and how, is at the top of `hlo_traffic.py`.

Wrong is what does not compile; a pool that is not updated in place; a copy or a slice as large as
a layer's smallest matrix; and temporary memory, kernels, or bytes moved above `step_budgets.toml`.
Prints a table and what is wrong; the exit status is 1 if anything is. Nothing is run: on a GPU the
compiler tries its ways of computing products and may choose others.
"""

import dataclasses
import fnmatch
import pathlib
import time
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import click
import gate_child
import gpu_targets
from compile_step import Facts, Traffic
from gate_output import fail_on, replace_marked, table_text
from gpu_targets import Target
from rich import box
from rich.console import Console
from rich.table import Table
from step_cases import CASES, CONTEXT, FAULTS, LANES, MIXED_TOKENS, Case

CHILD = "compile_step.py"
BUDGETS = pathlib.Path(__file__).resolve().parent / "step_budgets.toml"
MARKERS = ("<!-- step-gate: begin -->", "<!-- step-gate: end -->")
MIB = 1 << 20
MB = 1_000_000

BudgetKey = tuple[str, str]
"""Case and card."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a step may take on a card.

    Attributes:
        temporary_mib: Memory beside arguments and results, in MiB.
        kernels_per_layer: All kernels of the step, divided by the model's layers.
        bytes_ratio: Of a decode step: bytes moved over those that must be.
        unsplit_ratio: The same, as if matrix products were not split.
    """

    temporary_mib: float
    kernels_per_layer: float
    bytes_ratio: float | None = None
    unsplit_ratio: float | None = None


Report = gate_child.Report[Facts]


def read_facts(item: dict[str, Any]) -> Facts:
    """What a child printed about a step."""
    traffic = item["traffic"]
    if traffic is not None:
        largest = tuple((kind, size) for kind, size in traffic["largest"])
        traffic = Traffic(**traffic | {"largest": largest})
    return Facts(**item | {"traffic": traffic, "large_moves": tuple(item["large_moves"])})


def read_budgets(text: str) -> dict[BudgetKey, Budget]:
    """Budgets from TOML: `[MODEL.STEP]`, and in it a line for each card."""
    return {
        (f"{model}/{step}", card): Budget(**limits)
        for model, steps in tomllib.loads(text).items()
        for step, cards in steps.items()
        for card, limits in cards.items()
    }


def find_problems(
    target: Target,
    cases: Iterable[Case],
    report: Report,
    budgets: Mapping[BudgetKey, Budget],
) -> list[str]:
    """What is wrong with the steps on a card, a line each."""
    problems = []
    found = {facts.case: facts for facts in report.found}
    for case in cases:
        if case.name in report.errors:
            wrong = [f"does not compile: {report.errors[case.name]}"]
        elif case.name not in found:
            wrong = ["was not compiled"]
        else:
            budget = budgets.get((case.name, target.name))
            wrong = _what_is_wrong(case, found[case.name], budget)
        problems.extend(f"{target.name} {case.name}: {what}" for what in wrong)
    if report.crash:
        problems.append(f"{target.name}: {report.crash}")
    return problems


def _what_is_wrong(case: Case, facts: Facts, budget: Budget | None) -> list[str]:
    wrong = []
    if facts.aliased_bytes < facts.pool_bytes:
        wrong.append(
            f"updates {facts.aliased_bytes} bytes in place, the pool has {facts.pool_bytes}"
        )
    wrong.extend(f"moves much for nothing: {move}" for move in facts.large_moves)
    if budget is None:
        return [*wrong, f"has no budget in {BUDGETS.name}"]
    measured = {
        "MiB of temporary memory": (facts.temporary_bytes / MIB, budget.temporary_mib),
        "kernels a layer": (kernels_per_layer(facts), budget.kernels_per_layer),
    }
    if case.kind == "decode":
        if facts.traffic is None:
            return [*wrong, "has a loop, so that nobody can tell what it moves"]
        if budget.bytes_ratio is None or budget.unsplit_ratio is None:
            return [*wrong, f"has no budget for bytes moved in {BUDGETS.name}"]
        ratio, unsplit = ratios(facts.traffic)
        measured["times the bytes it must move"] = (ratio, budget.bytes_ratio)
        measured["times the bytes it must move, with unsplit products"] = (
            unsplit,
            budget.unsplit_ratio,
        )
    wrong.extend(
        f"takes {value:.3f} {what}, more than {most}"
        for what, (value, most) in measured.items()
        if value > most
    )
    return wrong


def kernels_per_layer(facts: Facts) -> float:
    """All kernels of a step, those outside of layers too, divided by the layers."""
    return sum(facts.kernels.values()) / facts.layers


def ratios(traffic: Traffic) -> tuple[float, float]:
    """Bytes moved over the floor: all, and as if products were not split."""
    floor = traffic.floor_bytes
    return traffic.moved_bytes / floor, traffic.unsplit_bytes / floor


def step_table(reports: Mapping[str, Report], *, markdown: bool = False) -> Table:
    """What each step does; a row for each card and case."""
    table = Table(box=box.MARKDOWN if markdown else box.SIMPLE)
    table.add_column("card", no_wrap=True)
    table.add_column("step", no_wrap=True)
    names = ["pool MiB", "in place", "temp MiB", "kernels", "a layer", "large copies"]
    names += ["tokens a lane", "floor MB", "moved", "unsplit"]
    # Seconds would differ whenever the page is made.
    for name in names if markdown else [*names, "compile s"]:
        table.add_column(name, justify="right", no_wrap=True)
    for card, report in reports.items():
        for facts in report.found:
            cells = [
                f"{facts.pool_bytes / MIB:.0f}",
                "all" if facts.aliased_bytes >= facts.pool_bytes else "NOT ALL",
                f"{facts.temporary_bytes / MIB:.1f}",
                f"{sum(facts.kernels.values())}",
                f"{kernels_per_layer(facts):.1f}",
                f"{len(facts.large_moves) or 'none'}",
            ]
            if facts.traffic is None:
                cells += ["-"] * 4
            else:
                cells += [f"{facts.traffic.context}", f"{facts.traffic.floor_bytes / MB:.0f}"]
                cells += [f"{ratio:.3f}" for ratio in ratios(facts.traffic)]
            if not markdown:
                cells.append(f"{facts.compile_seconds:.1f}")
            table.add_row(card, facts.case, *cells)
    return table


def details(reports: Mapping[str, Report]) -> list[str]:
    """Kinds of kernels of each step, and what a decode step moves beyond the floor."""
    lines = []
    for card, report in reports.items():
        for facts in report.found:
            kernels = ", ".join(f"{kind} {count}" for kind, count in facts.kernels.items())
            lines.append(f"{card} {facts.case}, kernels: {kernels}")
            if facts.traffic:
                items = (f"{kind} {size / MB:.0f}" for kind, size in facts.traffic.largest)
                lines.append(f"{card} {facts.case}, MB beyond the floor: {', '.join(items)}")
    return lines


def markdown_text(reports: Mapping[str, Report]) -> str:
    """The table as it stands in the documentation."""
    versions = next(iter(reports.values())).versions
    head = (
        f"Made by `python scripts/step_gate.py --markdown` with JAX {versions['jax']}. A decode "
        f"step has {LANES} lanes, of {CONTEXT:,} tokens each or as many as the pool holds; a mixed "
        f"step {MIXED_TOKENS} tokens. 'Kernels' are those of a step, 'a layer' is their number "
        "divided by the layers; 'large copies' are as large as a layer's smallest matrix. 'Moved' "
        "is bytes read and written over the floor; 'unsplit' is the same as if XLA did not split "
        "products along the summed dimension."
    )
    lines = [f"- {line}" for line in details(reports)]
    return "\n\n".join([head, table_text(step_table(reports, markdown=True)), "\n".join(lines)])


def self_test(target: Target) -> list[str]:
    """Which faults the gate does not see, in steps that are bad on purpose."""
    expected = {
        "fault/pool": ["updates 0 bytes in place", "copy to bf16", "times the bytes it must move"],
        "fault/scan": ["dynamic-slice to bf16", "has a loop"],
    }
    if expected.keys() != FAULTS.keys():
        raise AssertionError(f"{expected.keys() ^ FAULTS.keys()} is tried or expected, not both")
    # All that the gate must see without a budget is seen with an ample one.
    ample = Budget(temporary_mib=1e6, kernels_per_layer=1e6, bytes_ratio=1.5, unsplit_ratio=1.5)
    budgets = {(name, target.name): ample for name in FAULTS}
    report = gate_child.run(CHILD, target.name, FAULTS, read=read_facts)
    problems = find_problems(target, FAULTS.values(), report, budgets)
    for problem in problems:
        print(f"seen: {problem}")
    return [
        f"{name} was let through: nothing says '{words}'"
        for name, all_words in expected.items()
        for words in all_words
        if not any(name in problem and words in problem for problem in problems)
    ]


@click.command()
@click.option(
    "--target",
    "names",
    multiple=True,
    type=click.Choice(list(gpu_targets.STEP_TARGETS)),
    help="A card; may be given several times. All, by default.",
)
@click.option("--only", metavar="PATTERN", default="*", help="Cases to compile, as a glob.")
@click.option(
    "--markdown",
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="Write the table into this page too, between its markers.",
)
@click.option("--self-test", "tries_faults", is_flag=True, help="Try the gate on bad steps.")
def main(
    names: tuple[str, ...], only: str, markdown: pathlib.Path | None, tries_faults: bool
) -> None:
    """Compile whole steps without a GPU, and fail if they do needless work.

    Example: python scripts/step_gate.py --target h100 --only '*/decode'
    """
    console = Console(width=180, highlight=False)
    if tries_faults:
        fail_on(self_test(gpu_targets.H100), console)
        console.print(f"all {len(FAULTS)} faults were seen")
        return
    cases = [case for case in CASES.values() if fnmatch.fnmatchcase(case.name, only)]
    if not cases:
        raise click.ClickException(f"no case is like {only}; there are {', '.join(CASES)}")
    if markdown and (names or len(cases) < len(CASES)):
        raise click.ClickException("what is written must be of all cards and cases")
    targets = [gpu_targets.STEP_TARGETS[name] for name in names or gpu_targets.STEP_TARGETS]
    started = time.perf_counter()
    names_of = {target.name: [case.name for case in cases] for target in targets}
    reports = gate_child.run_all(CHILD, names_of, read=read_facts)
    console.print(step_table(reports))
    for line in details(reports):
        console.print(line, soft_wrap=True, markup=False)
    budgets = read_budgets(BUDGETS.read_text())
    problems = [
        problem
        for target in targets
        for problem in find_problems(target, cases, reports[target.name], budgets)
    ]
    if markdown and all(len(report.found) == len(cases) for report in reports.values()):
        page = markdown.read_text()
        markdown.write_text(replace_marked(page, markdown_text(reports), MARKERS))
    fail_on(problems, console)
    console.print(
        f"{len(cases)} steps for {len(targets)} cards within their budgets; "
        f"JAX {reports[targets[0].name].versions['jax']}, {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
