"""The compile gate reads what compilers print, and lets no bad code through.

The texts are what XLA and ptxas 12.9 really printed. `compile_gate.py --self-test` does the same
with real compilers.
"""

import dataclasses
import importlib
import json
import pathlib
import types

import click
import jax
import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'loop_broadcast_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_broadcast_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.579 ms
ptxas info    : Compiling entry function 'paged_prefill' for 'sm_90a'
ptxas info    : Function properties for paged_prefill
    824 bytes stack frame, 836 bytes spill stores, 820 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 824 bytes cumulative stack size
ptxas info    : Compile time = 643.820 ms
"""
THUNKS = (
    "002: kCustomKernel [source       | next=003 (1)] loop_broadcast_fusion grid: [4096, 1, 1] "
    "threads: [128, 1, 1]  shared_memory: 0 bytes\n"
    "003: kCustomKernel [prev=002 (1) | sink        ] paged_prefill grid: [72, 1, 32] "
    "threads: [128, 1, 1]  shared_memory: 58112 bytes\n"
)


MOSAIC_PTXAS = PTXAS.replace("paged_prefill", "paged_decode_hopper_mosaic_gpu_kernel")
MOSAIC_PROGRAM = """\
module @paged_decode_hopper attributes {mosaic_gpu.dump_basename = "paged_decode_hopper_0"} {
  func.func @paged_decode_hopper_mosaic_gpu(%arg0: !llvm.ptr, %arg1: !llvm.ptr) {
    %c74792_i32 = arith.constant 74792 : i32
    %c128 = arith.constant 128 : index
    %c64 = arith.constant 64 : index
    %c8 = arith.constant 8 : index
    %c1 = arith.constant 1 : index
    %113 = gpu.launch async [%3] blocks(%arg2, %arg3, %arg4) in (%arg8 = %c8, %arg9 = %c8, \
%arg10 = %c64) threads(%arg5, %arg6, %arg7) in (%arg11 = %c128, %arg12 = %c1, %arg13 = %c1) \
dynamic_shared_memory_size %c74792_i32 {
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("compile_gate")


@pytest.fixture
def cases(gate: types.ModuleType) -> types.ModuleType:
    return importlib.import_module("kernel_cases")


@pytest.fixture
def code(gate: types.ModuleType) -> types.ModuleType:
    return importlib.import_module("kernel_code")


@pytest.fixture
def targets(gate: types.ModuleType) -> types.ModuleType:
    return gate.gpu_targets


class Scene:
    """A case of one kernel on an H100, its budget, and what its child said; all is well."""

    def __init__(self, gate: types.ModuleType, cases: types.ModuleType) -> None:
        self._gate = gate
        self.cases = [
            cases.Case(
                name=name,
                kv_dtype="int8",
                head_dim=64,
                kernels=("paged_decode",),
                programs=lambda shape: [],
            )
            for name in ("first", "second")
        ]
        self.lines: list[dict] = [
            {"target": "h100", "jax": "0.10.2", "ptxas": "12.9.86"},
            {"starts": "first"},
            self.measured("first"),
            {"starts": "second"},
            self.measured("second"),
        ]
        self.budgets = {("paged_decode", "int8", 64): gate.Budget(registers=96, shared_bytes=20480)}
        self.status = 0

    def measured(self, case: str, **changed) -> dict:
        fields = {
            "case": case,
            "kernel": "paged_decode",
            "arch": "sm_90a",
            "registers": 96,
            "spill_bytes": 0,
            "shared_bytes": 20480,
            "threads": 128,
            "blocks_per_core": 5,
        }
        return fields | changed

    def report(self):
        out = "\n".join(json.dumps(line) for line in self.lines)
        return self._gate.gate_child.read_report(
            out, "a log\nwith the reason", self.status, self._gate.read_measurement
        )

    def problems(self) -> list[str]:
        h100 = self._gate.gpu_targets.H100
        return self._gate.find_problems(h100, self.cases, self.report(), self.budgets)


@pytest.fixture
def scene(gate: types.ModuleType, cases: types.ModuleType) -> Scene:
    return Scene(gate, cases)


def test_registers_and_spills_are_read_from_what_ptxas_prints(code: types.ModuleType):
    codes = code.read_ptxas(PTXAS)
    assert list(codes) == ["loop_broadcast_fusion", "paged_prefill"]
    assert dataclasses.asdict(codes["loop_broadcast_fusion"]) == {
        "registers": 8,
        "spill_bytes": 0,
        "shared_bytes": 0,
    }
    assert dataclasses.asdict(codes["paged_prefill"]) == {
        "registers": 255,
        "spill_bytes": 836 + 820,
        "shared_bytes": 0,
    }


def test_static_shared_memory_is_read(code: types.ModuleType):
    line = "ptxas info    : Used 12 registers, used 1 barriers, 4224 bytes smem"
    text = PTXAS.replace("ptxas info    : Used 8 registers, used 0 barriers", line)
    assert code.read_ptxas(text)["loop_broadcast_fusion"].shared_bytes == 4224


def test_what_ptxas_leaves_out_is_an_error_not_a_zero(code: types.ModuleType):
    for line in ("Used 255 registers", "836 bytes spill stores, 820 bytes spill loads"):
        with pytest.raises(ValueError, match="does not say what paged_prefill takes"):
            code.read_ptxas(PTXAS.replace(line, "something else"))


def test_launches_are_read_from_a_thunk_sequence(code: types.ModuleType):
    assert code.read_launches(THUNKS) == {
        "loop_broadcast_fusion": (128, 0),
        "paged_prefill": (128, 58112),
    }


def test_a_dump_is_measured_but_for_empty_files_and_xlas_own_kernels(
    cases: types.ModuleType,
    code: types.ModuleType,
    targets: types.ModuleType,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "module_0001.jit_f.thunk_sequence.txt").write_text(THUNKS)
    (dump / "module_0001.jit_f.1.ptx").write_text("")
    (dump / "module_0001.jit_f.3.ptx").write_text(
        ".version 8.7\n.target sm_90a\n.address_size 64\n"
        ".visible .entry loop_broadcast_fusion(\n.visible .entry paged_prefill(\n"
    )
    monkeypatch.setattr(code.gpu_compiler, "run_ptxas", lambda *arguments: PTXAS)
    case = next(iter(cases.CASES.values()))
    (found,) = code.measure(case, dump, targets.H100)
    assert found == code.Measurement(
        case=case.name,
        kernel="paged_prefill",
        arch="sm_90a",
        registers=255,
        spill_bytes=1656,
        shared_bytes=58112,
        threads=128,
        blocks_per_core=2,
    )
    assert not dump.exists()


def test_the_launch_of_a_mosaic_kernel_is_read_from_its_program(code: types.ModuleType):
    assert code.read_mosaic_launch(MOSAIC_PROGRAM) == {"paged_decode_hopper": (128, 74792)}
    with pytest.raises(ValueError, match="launches nothing"):
        code.read_mosaic_launch(MOSAIC_PROGRAM.replace("gpu.launch", "gpu.return"))


def test_a_mosaic_kernel_is_measured_under_its_own_name(
    cases: types.ModuleType,
    code: types.ModuleType,
    targets: types.ModuleType,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "paged_decode_hopper_0.before_layout_inference.txt").write_text(MOSAIC_PROGRAM)
    (dump / "paged_decode_hopper_0.ptx").write_text(
        ".version 8.8\n.target sm_90a\n.visible .entry paged_decode_hopper_mosaic_gpu_kernel(\n"
    )
    monkeypatch.setattr(code.gpu_compiler, "run_ptxas", lambda *arguments: MOSAIC_PTXAS)
    case = next(iter(cases.MOSAIC_CASES.values()))
    (found,) = code.measure(case, dump, targets.H100)
    assert (found.kernel, found.arch) == ("paged_decode_hopper", "sm_90a")
    assert (found.threads, found.shared_bytes) == (128, 74792)


def test_mosaic_kernels_are_for_hopper_and_only_where_jax_has_them(
    cases: types.ModuleType, targets: types.ModuleType
):
    assert all(
        [name for name, target in targets.TARGETS.items() if case.is_for(target)] == ["h100"]
        for case in cases.MOSAIC_CASES.values()
    )
    assert all(
        case.is_for(target)
        for case in cases.TRITON_CASES.values()
        for target in targets.TARGETS.values()
    )
    has_mosaic = jax.__version_info__ >= (0, 12)
    assert ("mosaic/bfloat16/bfloat16/d128/h32x8/s16" in cases.CASES) == has_mosaic
    assert ("fault/card" in cases.DEADLY_FAULTS) == has_mosaic


def test_what_the_gate_compiles_are_calls_that_the_kernels_take(cases: types.ModuleType):
    # The compilers are not everywhere; a call that lacks an argument shows without them.
    for case in cases.CASES.values():
        for program in case.programs(jax.ShapeDtypeStruct):
            result = jax.eval_shape(program.function, *program.arguments, **program.named)
            assert result.shape == program.arguments[0].shape


@pytest.mark.parametrize(
    ("card", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("h100", 128, 8, 0, 16),  # threads
        ("h100", 32, 8, 0, 32),  # blocks
        ("h100", 128, 128, 0, 4),  # registers: 65536 / 128 / 128
        ("h100", 128, 255, 0, 2),
        ("h100", 256, 168, 0, 1),  # 12 warps' worth of registers, 8 of them used
        ("h100", 128, 32, 227 << 10, 1),  # shared memory: all that a block may have
        ("l4", 128, 32, 99 << 10, 1),
        ("a100", 128, 32, 163 << 10, 1),
        ("l4", 128, 32, 48 << 10, 2),
        ("l4", 128, 32, 50 << 10, 1),
    ],
)
def test_occupancy_is_what_the_scarcest_allows(
    targets: types.ModuleType,
    card: str,
    threads: int,
    registers: int,
    shared_bytes: int,
    blocks: int,
):
    found = targets.TARGETS[card].blocks_per_core(
        threads=threads, registers=registers, shared_bytes=shared_bytes
    )
    assert found == blocks


def test_good_code_has_no_problems(scene: Scene):
    assert scene.problems() == []
    assert scene.report().versions == {"jax": "0.10.2", "ptxas": "12.9.86"}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"registers": 97}, "takes 97 registers, more than 96"),
        ({"shared_bytes": 20481}, "takes 20481 bytes of shared memory, more than 20480"),
        ({"arch": "sm_90"}, "is for sm_90, not for sm_90a"),
    ],
)
def test_bad_code_is_reported(scene: Scene, changed: dict, problem: str):
    scene.lines[2] = scene.measured("first", **changed)
    assert scene.problems() == [f"h100 first: paged_decode {problem}"]


def test_all_that_is_wrong_with_a_kernel_is_reported(scene: Scene):
    scene.lines[4] = scene.measured("second", registers=255, spill_bytes=8)
    assert scene.problems() == [
        "h100 second: paged_decode spills 8 bytes",
        "h100 second: paged_decode takes 255 registers, more than 96",
    ]


@pytest.mark.parametrize("place", [2, 4])
def test_a_missing_kernel_is_reported(scene: Scene, place: int):
    del scene.lines[place]
    name = {2: "first", 4: "second"}[place]
    assert scene.problems() == [f"h100 {name}: paged_decode is missing"]


def test_a_child_that_compiles_nothing_is_reported(scene: Scene):
    scene.lines = []
    assert len(scene.problems()) == 2


def test_a_kernel_of_another_case_does_not_stand_in_for_one(scene: Scene):
    scene.lines[4] = scene.measured("first")
    assert scene.problems() == ["h100 second: paged_decode is missing"]


def test_a_case_that_does_not_compile_is_reported(scene: Scene):
    scene.lines[4] = {"case": "second", "error": "ValueError: a power of 2"}
    assert scene.problems() == ["h100 second: does not compile: ValueError: a power of 2"]


def test_a_kernel_without_a_budget_is_reported(scene: Scene):
    scene.budgets.clear()
    problem = "paged_decode has no budget in gpu_budgets.toml"
    assert scene.problems() == [f"h100 first: {problem}", f"h100 second: {problem}"]


def test_a_child_that_dies_is_reported_with_what_it_left_undone(scene: Scene):
    del scene.lines[4]
    scene.status = -6
    assert scene.problems() == [
        "h100: the process ended with status -6, latest at second: a log\nwith the reason",
        "h100: 1 cases were not compiled: second",
    ]


def test_every_kernel_has_a_budget_and_every_budget_a_kernel(
    gate: types.ModuleType, cases: types.ModuleType
):
    expected = {
        (kernel, case.kv_dtype, case.head_dim)
        for case in (cases.TRITON_CASES | cases.LINEAR_CASES | cases.MOSAIC_CASES).values()
        for kernel in case.kernels
    }
    assert set(gate.read_budgets(gate.BUDGETS.read_text())) == expected


def test_new_budgets_hold_what_was_measured_and_are_read_as_written(
    gate: types.ModuleType, scene: Scene
):
    scene.lines[4] = scene.measured("second", registers=100, shared_bytes=3)
    budgets = gate.new_budgets(scene.cases, scene.report().found)
    # 100 and a tenth of it, up to the next multiple of 8.
    assert budgets == {("paged_decode", "int8", 64): gate.Budget(registers=112, shared_bytes=20480)}
    assert gate.read_budgets(gate.format_budgets(budgets)) == budgets
    scene.budgets = budgets
    assert scene.problems() == []


def test_budgets_are_raised_to_what_either_version_needs(gate: types.ModuleType):
    def budgets(**limits: tuple[int, int]) -> dict:
        return {
            (kernel, "int8", 64): gate.Budget(registers=registers, shared_bytes=shared_bytes)
            for kernel, (registers, shared_bytes) in limits.items()
        }

    old, new = budgets(a=(96, 1024), b=(64, 0)), budgets(a=(80, 2048), c=(32, 0))
    expected = budgets(a=(96, 2048), b=(64, 0), c=(32, 0))
    assert gate.raised_budgets(old, new) == expected


def test_no_new_budget_allows_more_registers_than_there_are(gate: types.ModuleType, scene: Scene):
    scene.lines[4] = scene.measured("second", registers=250)
    (budget,) = gate.new_budgets(scene.cases, scene.report().found).values()
    assert budget.registers == 255


def test_tables_stand_between_the_markers_of_a_page(gate: types.ModuleType, scene: Scene):
    scene.lines[4] = scene.measured("second", spill_bytes=8)
    text = gate.markdown_text({"h100": scene.report()}, scene.cases)
    begin, end = gate.MARKERS
    page = gate.replace_marked(f"before\n\n{begin}\nstale\n{end}\nbehind\n", text, gate.MARKERS)
    assert page.startswith(f"before\n\n{begin}\n\n")
    assert page.endswith(f"\n\n{end}\nbehind\n")
    assert "stale" not in page
    assert "JAX 0.10.2 and ptxas 12.9.86" in page
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    assert rows[0] == ["case", "paged_decode"]
    assert rows[2:] == [
        ["first", "96 x 128, 20.0, 5"],
        ["second", "96 x 128, 20.0, 5, SPILLS 8"],
    ]
    assert gate.replace_marked(page, text, gate.MARKERS) == page


@pytest.mark.parametrize("page", ["", "{begin}", "{end}{begin}", "{begin}{begin}{end}"])
def test_a_page_without_its_markers_is_left_alone(gate: types.ModuleType, page: str):
    begin, end = gate.MARKERS
    with pytest.raises(click.ClickException, match="the page needs one"):
        gate.replace_marked(page.format(begin=begin, end=end), "text", gate.MARKERS)
