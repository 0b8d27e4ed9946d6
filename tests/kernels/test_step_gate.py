"""The step gate counts bytes and kernels in what XLA prints, and lets no needless work through.

The texts are shortened from what XLA printed for a decode step of 64 lanes on an H100.
`step_gate.py --self-test` does the same with a real compiler.
"""

import dataclasses
import importlib
import json
import pathlib
import types

import click
import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
POOL = "bf16[16,8192,16,8,64]{4,3,2,1,0}"
FLAT = "bf16[16,131072,512]{2,1,0}"

HLO = (
    "HloModule jit_forward, is_scheduled=true, input_output_alias={ {0}: (4, {}, may-alias) }\n"
    """
%fused_gather (param_0.264: bf16[128256,2048], param_1.1969: s32[64]) -> bf16[64,1,2048] {
  %param_0.264 = bf16[128256,2048]{1,0} parameter(0)
  %param_1.1969 = s32[64]{0} parameter(1)
  %bitcast.3.1 = s32[64,1]{1,0} bitcast(%param_1.1969)
  ROOT %gather.1.1 = bf16[64,1,2048]{2,1,0} gather(%param_0.264, %bitcast.3.1), offset_dims={1,2}
}

%fused_computation.gemm (param_0: bf16[64,8,256], param_1: bf16[8,256,2048]) -> f32[8,64,2048] {
  %param_0 = bf16[64,8,256]{2,1,0} parameter(0)
  %param_1 = bf16[8,256,2048]{2,1,0} parameter(1)
  ROOT %dot.81 = f32[8,64,2048]{2,1,0} dot(%param_0, %param_1), lhs_batch_dims={1}
}

%fused_scatter.31 (param_0.215: bf16[16,131072,512], param_1: f32[8,64,2048], param_2: s32[64])"""
    """ -> bf16[16,131072,512] {
  %param_0.215 = bf16[16,131072,512]{2,1,0} parameter(0)
  %param_2 = s32[64]{0} parameter(2)
  %bitcast.8.77 = s32[64,1]{1,0} bitcast(%param_2)
  %param_1 = f32[8,64,2048]{2,1,0} parameter(1)
  %constant_105_49 = f32[] constant(0)
  %reduce.73 = f32[64,2048]{1,0} reduce(%param_1, %constant_105_49), dimensions={0}
  %convert.122 = bf16[64,2048]{1,0} convert(%reduce.73)
  %slice.89 = bf16[64,512]{1,0} slice(%convert.122), slice={[0:64], [0:512]}
  ROOT %scatter.1 = bf16[16,131072,512]{2,1,0} scatter(%param_0.215, %bitcast.8.77, %slice.89)
}

ENTRY %main.73 (embed: bf16[128256,2048], o_proj: bf16[2048,2048], tokens: s32[64]) -> f32[64] {
  %constant_91_0 = s32[1]{0} constant({0})
  %embed = bf16[128256,2048]{1,0} parameter(0), sharding={replicated}
  %o_proj = bf16[2048,2048]{1,0} parameter(1)
  %tokens = s32[64]{0} parameter(2)
  %tables = s32[64,256]{1,0} parameter(3)
  %pool = bf16[16,8192,16,8,64]{4,3,2,1,0} parameter(4)
  %bitcast.7.0 = bf16[16,131072,512]{2,1,0} bitcast(%pool)
  %bitcast.143.0 = bf16[8,256,2048]{2,1,0} bitcast(%o_proj)
  %loop_gather_fusion = bf16[64,1,2048]{2,1,0} fusion(%embed, %tokens), kind=kLoop, """
    """calls=%fused_gather, metadata={op_name="jit(forward)/gather" stack_frame_id=20}
  %bitcast.142.0 = bf16[64,8,256]{2,1,0} bitcast(%loop_gather_fusion)
  %gemm_fusion_dot.33 = f32[8,64,2048]{2,1,0} fusion(%bitcast.142.0, %bitcast.143.0), """
    """kind=kCustom, calls=%fused_computation.gemm
  %input_scatter_fusion.31 = bf16[16,131072,512]{2,1,0} fusion(%bitcast.7.0, """
    """%gemm_fusion_dot.33, /*index=2*/%tokens), kind=kInput, calls=%fused_scatter.31
  %bitcast.13.0 = bf16[16,8192,16,8,64]{4,3,2,1,0} bitcast(%input_scatter_fusion.31)
  %pallas_call.80 = (f32[64,8,16,4,64]{4,3,2,1,0}, f32[64,8,16,4]{3,2,1,0}) custom-call("""
    """%constant_91_0, %tables, /*index=2*/%bitcast.13.0), """
    """custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 64 : i32, """
    """name = "paged_decode", num_stages = 2 : i32}
  %pallas_call.81.0 = f32[64,8,16,4,64]{4,3,2,1,0} get-tuple-element(%pallas_call.80), index=0
  %pallas_call.84 = bf16[64,8,4,64]{3,2,1,0} custom-call(%tokens, %pallas_call.81.0), """
    """custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "paged_combine"}
  ROOT %tuple.4 = (bf16[64,8,4,64]{3,2,1,0}) tuple(%pallas_call.84)
}
"""
)
COPIES = """
%wrapped (param_0.9: bf16[4,2048,512], param_1.9: s32[]) -> bf16[1,2048,512] {
  %param_0.9 = bf16[4,2048,512]{2,1,0} parameter(0)
  %param_1.9 = s32[] parameter(1)
  ROOT %dynamic_slice.46.2 = bf16[1,2048,512]{2,1,0} dynamic-slice(%param_0.9, %param_1.9)
}

%body (arg: (s32[], bf16[4,2048,512])) -> (s32[], bf16[4,2048,512]) {
  %arg = (s32[], bf16[4,2048,512]{2,1,0}) parameter(0)
  %gte.0 = s32[] get-tuple-element(%arg), index=0
  %gte.1 = bf16[4,2048,512]{2,1,0} get-tuple-element(%arg), index=1
  %fusion-start.2 = ((bf16[4,2048,512]{2,1,0}, s32[]), bf16[1,2048,512]{2,1,0}, u32[]) """ + (
    """fusion-start(%gte.1, %gte.0), kind=kLoop, calls=%wrapped
  %fusion-done.2 = bf16[1,2048,512]{2,1,0} fusion-done(%fusion-start.2)
  ROOT %tuple = (s32[], bf16[4,2048,512]{2,1,0}) tuple(%gte.0, %gte.1)
}

%condition (arg.1: (s32[], bf16[4,2048,512])) -> pred[] {
  %arg.1 = (s32[], bf16[4,2048,512]{2,1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%fused_concatenate (param_0.1: bf16[2048,512], param_1.1: bf16[2048,512]) -> bf16[2048,1024] {
  %param_0.1 = bf16[2048,512]{1,0} parameter(0)
  %param_1.1 = bf16[2048,512]{1,0} parameter(1)
  ROOT %concatenate = bf16[2048,1024]{1,0} concatenate(%param_0.1, %param_1.1), dimensions={1}
}

ENTRY %main (k: bf16[4,2048,512], pool: bf16[4,8192,16,8,64]) -> bf16[4,8192,16,8,64] {
  %pool = bf16[4,8192,16,8,64]{4,3,2,1,0} parameter(1)
  %k = bf16[4,2048,512]{2,1,0} parameter(0)
  %k_proj = bf16[2048,512]{1,0} parameter(2)
  %constant_61_0 = s32[] constant(0)
  %copy.19 = s32[] copy(%constant_61_0)
  %loop_concatenate_fusion = bf16[2048,1024]{1,0} fusion(%k_proj, %k_proj), kind=kLoop, """
    """calls=%fused_concatenate
  %tuple.1 = (s32[], bf16[4,2048,512]{2,1,0}) tuple(%copy.19, %k)
  %while.1 = (s32[], bf16[4,2048,512]{2,1,0}) while(%tuple.1), condition=%condition, body=%body
  ROOT %copy.11 = bf16[4,8192,16,8,64]{4,3,2,1,0} copy(%pool)
}
"""
)
THUNKS = """\
001: kCustomKernel [source       | next=002 (1)] loop_minimum_fusion grid: [1, 1, 1] \
threads: [64, 1, 1]  shared_memory: 0 bytes
004: kCopy         [source       | next=005 (1)] kCopy
005: kWhile        [prev=004 (1) | next=059 (1)]
  body:
    007: kAsyncStart   [source        | next=036 (11)] stream=computation_stream[0], async_id=7
        009: kDynamicSliceFusion [source | sink] params=1, results=1
            008: kCopy [source | sink] kCopy
    035: kAsyncDone    [source        | sink         ] async_id=7
    036: kCustomKernel [prev=007 (11) | next=040 (4) ] fusion_32 grid: [64, 1, 1] \
threads: [128, 1, 1]  shared_memory: 4096 bytes
    037: kCustomKernel [prev=007 (11) | next=040 (4) ] gemm_fusion_dot_general_228_remat2 \
grid: [64, 1, 1] threads: [128, 1, 1]  shared_memory: 4096 bytes
    044: kCustomKernel [prev=043 (1)  | sink         ] paged_decode grid: [64, 8, 16] \
threads: [128, 1, 1]  shared_memory: 20480 bytes
"""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("step_gate")


@pytest.fixture
def child(gate: types.ModuleType) -> types.ModuleType:
    return importlib.import_module("compile_step")


@pytest.fixture
def cases(gate: types.ModuleType) -> types.ModuleType:
    return importlib.import_module("step_cases")


@pytest.fixture
def traffic(gate: types.ModuleType) -> types.ModuleType:
    return importlib.import_module("hlo_traffic")


class Scene:
    """A decode step on an H100, its budget, and what its child said; all is well."""

    def __init__(self, gate: types.ModuleType, child: types.ModuleType) -> None:
        self._gate = gate
        self.case = gate.CASES["llama-1b/decode"]
        traffic = child.Traffic(
            context=1000,
            moved_bytes=1150,
            unsplit_bytes=1050,
            floor_bytes=1000,
            largest=(("paged_decode", 30), ("fusion", 20)),
        )
        self.facts = child.Facts(
            case=self.case.name,
            compile_seconds=8.5,
            pool_bytes=4096,
            aliased_bytes=4096,
            temporary_bytes=9 << 20,
            layers=16,
            kernels={"fusion": 32, "paged_decode": 16},
            large_moves=(),
            traffic=traffic,
        )
        self.budget = gate.Budget(
            temporary_mib=9, kernels_per_layer=3, bytes_ratio=1.15, unsplit_ratio=1.05
        )
        self.errors: dict[str, str] = {}
        self.crash: str | None = None

    def change(self, **facts: object) -> None:
        """Let facts be others."""
        self.facts = dataclasses.replace(self.facts, **facts)

    def problems(self, *, has_facts: bool = True, has_budget: bool = True) -> list[str]:
        """What the gate objects to."""
        report = self._gate.gate_child.Report(
            versions={"jax": "0.12.0.1", "ptxas": "12.9.86"},
            found=(self.facts,) if has_facts else (),
            errors=self.errors,
            crash=self.crash,
        )
        budgets = {(self.case.name, "h100"): self.budget} if has_budget else {}
        return self._gate.find_problems(self._gate.gpu_targets.H100, [self.case], report, budgets)


@pytest.fixture
def scene(gate: types.ModuleType, child: types.ModuleType) -> Scene:
    return Scene(gate, child)


@pytest.fixture
def sizes(traffic: types.ModuleType) -> object:
    """One layer of a step of 64 lanes with 1,000 tokens each."""
    row = 8 * 64 * 2
    return traffic.Sizes(
        pool_bytes=16 * 8192 * 16 * row,
        new_bytes=64 * row,
        live_bytes=64 * 1000 * row,
        live_part=4 / 16,
    )


def test_counts_bytes_of_every_instruction(traffic: types.ModuleType, sizes: object) -> None:
    moved = traffic.count_bytes(traffic.Module.read(HLO), sizes)

    stream, tokens, tables = 64 * 2048 * 2, 64 * 4, 64 * 256 * 4
    gather = stream + tokens + stream
    weight, partial_sums = 2048 * 2048 * 2, 8 * 64 * 2048 * 4
    product = stream + weight + partial_sums
    # A quarter of the product goes to the pool.
    scatter = partial_sums / 4 + tokens + 64 * 8 * 64 * 2
    partials, sums = 64 * 8 * 4 * 4 * 64 * 4, 64 * 8 * 4 * 4 * 4
    decode = 4 + tables + 64 * 1000 * 8 * 64 * 2 + partials + sums
    combine = tokens + partials + 64 * 8 * 4 * 64 * 2
    assert moved.total == gather + product + scatter + decode + combine


def test_products_that_are_not_split_move_less(traffic: types.ModuleType, sizes: object) -> None:
    moved = traffic.count_bytes(traffic.Module.read(HLO), sizes)

    partial_sums = 8 * 64 * 2048 * 4
    one = 64 * 2048 * 2
    saved = (partial_sums - one) * (1 + 1 / 4)
    assert moved.total - moved.unsplit == saved
    assert moved.beyond["partial sums of products"] == saved


def test_what_must_be_moved_is_not_beyond_the_floor(
    traffic: types.ModuleType, sizes: object
) -> None:
    moved = traffic.count_bytes(traffic.Module.read(HLO), sizes)

    row = 8 * 64 * 2
    needed = 64 * 2048 * 2 + 2048 * 2048 * 2 + 64 * row + 64 * 1000 * row
    assert sum(moved.beyond.values()) == moved.total - needed
    assert moved.beyond["gemm_fusion_dot"] == 2 * 64 * 2048 * 2


def test_a_pool_that_is_copied_counts_in_full(traffic: types.ModuleType, sizes: object) -> None:
    before = "  %bitcast.7.0 ="
    copied = HLO.replace(before, f"  %copy.1 = {POOL} copy(%pool)\n{before}")

    more = traffic.count_bytes(traffic.Module.read(copied), sizes)
    less = traffic.count_bytes(traffic.Module.read(HLO), sizes)

    assert more.total - less.total == 2 * 16 * 8192 * 16 * 8 * 64 * 2
    assert more.beyond["copy"] == more.total - less.total


def test_good_program_has_no_large_moves(traffic: types.ModuleType) -> None:
    assert FLAT in HLO
    assert traffic.find_large_moves(traffic.Module.read(HLO), 2048 * 512 * 2) == []


def test_large_moves_are_found_in_loops_too(traffic: types.ModuleType) -> None:
    module = traffic.Module.read(COPIES)

    found = traffic.find_large_moves(module, 2048 * 512 * 2)

    assert module.has_loop()
    assert sorted(found) == [
        "copy.11: copy to bf16[4,8192,16,8,64]{4,3,2,1,0}, 536870912 bytes",
        "fusion-start.2: dynamic-slice to bf16[1,2048,512]{2,1,0}, 2097152 bytes",
        "loop_concatenate_fusion: concatenate to bf16[2048,1024]{1,0}, 4194304 bytes",
    ]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("bf16[64,8]{1,0}", 1024),
        ("(s32[3]{0}, /*index=1*/pred[5]{0})", 17),
        ("f32[]", 4),
        ("f8e4m3fn[3]{0}", 3),
        ("s4[3]{0:E(4)}", 2),
    ],
)
def test_bytes_of_a_shape(traffic: types.ModuleType, shape: str, expected: int) -> None:
    assert traffic.hlo.num_bytes(shape) == expected


def test_text_without_entry_is_an_error(traffic: types.ModuleType) -> None:
    with pytest.raises(ValueError, match="no entry"):
        traffic.Module.read("HloModule jit_forward")


def test_kernels_are_counted_by_kind(child: types.ModuleType) -> None:
    assert child.read_kernels(THUNKS) == {
        "kCopy": 2,
        "loop_minimum_fusion": 1,
        "fusion": 1,
        "gemm_fusion_dot_general": 1,
        "paged_decode": 1,
    }


def test_floor_leaves_out_what_the_forward_does_not_read(
    child: types.ModuleType, cases: types.ModuleType
) -> None:
    llama_shapes = importlib.import_module("llama_shapes")
    case = dataclasses.replace(
        cases.CASES["llama-1b/decode"],
        config=llama_shapes.llama(hidden=64, mlp=128, layers=2, head_dim=2, is_tied=False),
    )
    weights = child.abstract_weights(case)[1]

    layer = 64 * (64 + 16 + 16 + 64) + 3 * 64 * 128 + 2 * 64
    assert child.forward_bytes(weights, case) == 2 * (2 * layer + 64 * 64)


def test_step_within_its_budget_passes(scene: Scene) -> None:
    assert scene.problems() == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"aliased_bytes": 4095}, "updates 4095 bytes in place, the pool has 4096"),
        ({"large_moves": ("copy.1: copy",)}, "moves much for nothing: copy.1: copy"),
        ({"temporary_bytes": 10 << 20}, "takes 10.000 MiB of temporary memory, more than 9"),
        ({"kernels": {"fusion": 49}}, "takes 3.062 kernels a layer, more than 3"),
        ({"traffic": None}, "has a loop, so that nobody can tell what it moves"),
    ],
)
def test_what_is_wrong_is_said(scene: Scene, facts: dict[str, object], expected: str) -> None:
    scene.change(**facts)

    assert scene.problems() == [f"h100 llama-1b/decode: {expected}"]


@pytest.mark.parametrize("field", ["moved_bytes", "unsplit_bytes"])
def test_bytes_above_the_budget_are_a_problem(scene: Scene, field: str) -> None:
    traffic = dataclasses.replace(scene.facts.traffic, **{field: 1151})
    scene.change(traffic=traffic)

    (problem,) = scene.problems()

    assert "takes 1.151 times the bytes it must move" in problem


def test_step_without_budget_is_a_problem(scene: Scene) -> None:
    assert scene.problems(has_budget=False) == [
        "h100 llama-1b/decode: has no budget in step_budgets.toml"
    ]


def test_decode_without_budget_for_bytes_is_a_problem(scene: Scene) -> None:
    scene.budget = dataclasses.replace(scene.budget, bytes_ratio=None)

    (problem,) = scene.problems()

    assert "has no budget for bytes moved" in problem


def test_step_that_does_not_compile_is_a_problem(scene: Scene) -> None:
    scene.errors = {"llama-1b/decode": "ValueError: no"}

    assert scene.problems() == ["h100 llama-1b/decode: does not compile: ValueError: no"]


def test_crash_is_a_problem(scene: Scene) -> None:
    scene.crash = "the process ended with status -6"

    assert scene.problems(has_facts=False) == [
        "h100 llama-1b/decode: was not compiled",
        "h100: the process ended with status -6",
    ]


def test_report_gives_back_what_the_child_printed(gate: types.ModuleType, scene: Scene) -> None:
    lines = [
        {"target": "h100", "jax": "0.12.0.1", "ptxas": "12.9.86"},
        {"starts": "llama-1b/decode"},
        dataclasses.asdict(scene.facts),
        {"starts": "llama-1b/mixed"},
        {"case": "llama-1b/mixed", "error": "ValueError: no"},
        {"starts": "llama-8b/decode"},
    ]

    report = gate.gate_child.read_report(
        "\n".join(map(json.dumps, lines)), "Check failed", -6, gate.read_facts
    )

    assert report.versions == {"jax": "0.12.0.1", "ptxas": "12.9.86"}
    assert report.found == (scene.facts,)
    assert report.errors == {"llama-1b/mixed": "ValueError: no"}
    assert report.crash == (
        "the process ended with status -6, latest at llama-8b/decode: Check failed"
    )


def test_every_step_has_a_budget_for_every_card(
    gate: types.ModuleType, cases: types.ModuleType
) -> None:
    budgets = gate.read_budgets(gate.BUDGETS.read_text())

    assert budgets.keys() == {
        (case, card) for case in cases.CASES for card in gate.gpu_targets.STEP_TARGETS
    }
    for (case, _), budget in budgets.items():
        is_decode = cases.CASES[case].kind == "decode"
        assert (budget.bytes_ratio is not None) == is_decode
        assert (budget.unsplit_ratio is not None) == is_decode


def test_table_goes_between_its_markers(gate: types.ModuleType, scene: Scene) -> None:
    report = gate.gate_child.Report(
        versions={"jax": "0.12.0.1"}, found=(scene.facts,), errors={}, crash=None
    )

    begin, end = gate.MARKERS
    page = gate.replace_marked(
        f"before\n{begin} old {end}\nafter",
        gate.markdown_text({"h100": report}),
        gate.MARKERS,
    )

    assert page.startswith(f"before\n{begin}\n\nMade by")
    assert page.endswith(f"\n\n{end}\nafter")
    assert " 1.150 |" in page
    assert " 1.050 |" in page
    assert "beyond the floor: paged_decode 0, fusion 0" in page


def test_page_without_markers_is_an_error(gate: types.ModuleType) -> None:
    with pytest.raises(click.ClickException, match="needs one"):
        gate.replace_marked("page", "text", gate.MARKERS)
