"""Compiles whole steps for one card, on a machine that needs no GPU, and says what they do.

A step is the engine's forward program: from token numbers to the stream behind the last layer,
with the pool updated on the way. The sampler, and with it the last norm and the product with the
head, is another program and not looked at. One process compiles for one card only, and nothing is
run; `step_gate.py` runs this once for each card.

    python scripts/compile_step.py h100
    python scripts/compile_step.py rtx4090 llama-8b/decode

Prints JSON objects as `gate_child.py` says; about a case, its `Facts`. How bytes are counted is at
the top of `hlo_traffic.py`.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import re
import tempfile
import time

import click
import gpu_compiler
import gpu_targets
import hlo_traffic
import jax
import jax.numpy as jnp
import step_cases
from flax import nnx
from gate_child import said_failure, say, scratch_option
from gpu_compiler import Compiler, Program, ShapeOf
from hlo import Module
from hlo_traffic import Sizes
from step_cases import CASES, CONTEXT, FAULTS, LANES, MAX_MODEL_LEN, Case

from jaxpaged.cache import kv_pool
from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine import lanes, model_runner
from jaxpaged.engine.device import GPU_COMPILER_OPTIONS
from jaxpaged.model.llama import Llama
from jaxpaged.scheduler.plan import StepPlan
from pallas_kernels.triton import PARTITION_TOKENS

FLOAT_BYTES = 2
"""Of bfloat16, the dtype of weights, stream and pool."""
MOST_ITEMS = 5
THUNK = re.compile(r"^\s*\d+: (k\w+)\s.*?\](?: (\w+))?(?: grid:|$)", re.MULTILINE)
LAUNCHLESS = frozenset(
    [
        *("kAsyncStart", "kAsyncDone", "kWaitForStreams", "kCommandBuffer", "kSequential"),
        *("kWhile", "kConditional", "kDynamicSliceFusion"),
    ]
)
"""Thunks that start nothing on the card by themselves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a decode step reads and writes.

    Attributes:
        context: Live tokens of each lane.
        moved_bytes: All of it.
        unsplit_bytes: As if matrix products were not split.
        floor_bytes: What no program can do without.
        largest: What goes beyond the floor, by kind of kernel, in bytes; the largest first.
    """

    context: int
    moved_bytes: int
    unsplit_bytes: int
    floor_bytes: int
    largest: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a step's program does on one card.

    Attributes:
        case: Name of the case.
        compile_seconds: On this machine.
        pool_bytes: Of keys and values.
        aliased_bytes: Of outputs that are written in place.
        temporary_bytes: Beside arguments and results.
        layers: Of the model.
        kernels: How many of each kind a step starts.
        large_moves: What is copied and as large as a layer's smallest matrix.
        traffic: Of a decode step; None of another, and where a loop hides it.
    """

    case: str
    compile_seconds: float
    pool_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    layers: int
    kernels: dict[str, int]
    large_moves: tuple[str, ...]
    traffic: Traffic | None


def read_kernels(thunks: str) -> dict[str, int]:
    """How many kernels of each kind a step starts, from a thunk sequence; the most first."""
    counts = collections.Counter(
        hlo_traffic.without_number(name or kind)
        for kind, name in THUNK.findall(thunks)
        if kind not in LAUNCHLESS
    )
    return dict(counts.most_common())


def count_traffic(
    module: Module, case: Case, capacity: PoolCapacity, weights: nnx.State
) -> Traffic:
    """What a decode step reads and writes; its program has no loop."""
    config = case.config
    row_bytes = config.num_kv_heads * config.head_dim * FLOAT_BYTES
    context = min(CONTEXT, capacity.num_tokens // LANES)
    partitions = -(-MAX_MODEL_LEN // PARTITION_TOKENS)
    sizes = Sizes(
        pool_bytes=capacity.num_bytes // 2,
        new_bytes=LANES * row_bytes,
        live_bytes=LANES * context * row_bytes,
        live_part=-(-context // PARTITION_TOKENS) / partitions,
    )
    moved = hlo_traffic.count_bytes(module, sizes)
    cached = 2 * config.num_layers * (sizes.new_bytes + sizes.live_bytes)
    largest = collections.Counter({kind: round(size) for kind, size in moved.beyond.items()})
    return Traffic(
        context=context,
        moved_bytes=round(moved.total),
        unsplit_bytes=round(moved.unsplit),
        floor_bytes=forward_bytes(weights, case) + cached,
        largest=tuple(largest.most_common(MOST_ITEMS)),
    )


def compile_step(
    compiler: Compiler, card: str, case: Case, *, scratch: pathlib.Path | None
) -> Facts:
    """Compiles a step for a card and looks at its program."""
    config = case.config
    row_bytes = config.num_kv_heads * config.head_dim * FLOAT_BYTES
    capacity = PoolCapacity(
        num_blocks=step_cases.SMALL_POOLS.get((config, card), step_cases.NUM_BLOCKS),
        block_size=step_cases.BLOCK_SIZE,
        bytes_per_token=2 * config.num_layers * row_bytes,
    )
    graph, weights = abstract_weights(case)
    program = step_program(case, capacity, graph, weights, compiler.shape)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        dump = pathlib.Path(folder)
        started = time.perf_counter()
        compiled = compiler.compile(program, dump)
        seconds = time.perf_counter() - started
        dumped = sorted(dump.glob("*thunk_sequence.txt"))
        thunks = "\n".join(path.read_text() for path in dumped)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None, "XLA does not say what memory the program takes"
    assert text is not None, "XLA does not show the program"
    module = Module.read(text)
    has_traffic = case.kind == "decode" and not module.has_loop()
    least_bytes = config.hidden_size * row_bytes
    return Facts(
        case=case.name,
        compile_seconds=round(seconds, 1),
        pool_bytes=capacity.num_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        layers=config.num_layers,
        kernels=read_kernels(thunks),
        large_moves=tuple(hlo_traffic.find_large_moves(module, least_bytes)),
        traffic=count_traffic(module, case, capacity, weights) if has_traffic else None,
    )


def step_program(
    case: Case, capacity: PoolCapacity, graph: nnx.GraphDef, weights: nnx.State, shape: ShapeOf
) -> Program:
    """The forward program of a step, as the engine calls it."""
    config = case.config
    shapes = step_batch.batch_shapes(
        max_num_seqs=LANES,
        token_budget=step_cases.MIXED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        capacity=capacity,
        is_deterministic=False,
    )
    state = jax.eval_shape(
        lambda: lanes.allocate(
            shapes.num_lanes,
            max_model_len=MAX_MODEL_LEN,
            table_width=shapes.table_width,
            vocab_size=config.vocab_size,
        )
    )
    rows = (
        config.num_layers,
        capacity.num_blocks,
        capacity.block_size,
        config.num_kv_heads,
        config.head_dim,
    )
    # A GPU keeps 16-bit floats as what they are.
    pool = jax.eval_shape(lambda: kv_pool.allocate(rows, "bfloat16", as_bits=False))
    (bucket,) = (found for found in shapes.buckets() if found.num_tokens == case.num_tokens)
    arrays = step_batch.build(step_batch.lay_out(StepPlan()), bucket, shapes)
    arguments = jax.tree.map(
        lambda array: shape(array.shape, array.dtype), (weights, pool, state, arrays)
    )
    return Program(
        functools.partial(model_runner.forward, graph, shapes),
        arguments,
        donated=(1,) if case.is_donated else (),
        options=GPU_COMPILER_OPTIONS,
    )


def abstract_weights(case: Case) -> tuple[nnx.GraphDef, nnx.State]:
    """A model's structure, and shapes and dtypes of its weights."""
    model = nnx.eval_shape(
        lambda: Llama(
            case.config,
            dtype=jnp.dtype(jnp.bfloat16),
            layer_loop=case.layer_loop,
            attention="triton",
        )
    )
    return nnx.split(model)


def forward_bytes(weights: nnx.State, case: Case) -> int:
    """Bytes of the weights that a forward pass cannot do without; see `hlo_traffic.py`."""
    outside = ("embed_tokens", "lm_head", "norm")
    inside = [
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for path, leaf in jax.tree.leaves_with_path(weights)
        if not any(f"{name!r}" in jax.tree_util.keystr(path[:1]) for name in outside)
    ]
    return sum(inside) + case.num_tokens * case.config.hidden_size * FLOAT_BYTES


@click.command()
@click.argument("target", type=click.Choice(list(gpu_targets.STEP_TARGETS)))
@click.argument("cases", nargs=-1, type=click.Choice([*CASES, *FAULTS]), metavar="[CASE]...")
@scratch_option
def main(target: str, cases: tuple[str, ...], scratch: pathlib.Path | None) -> None:
    """Compile the steps for a card and print what each does, as JSON; all cases by default.

    Example: python scripts/compile_step.py h100
    """
    say({"target": target, **gpu_compiler.versions()})
    compiler = Compiler(gpu_targets.STEP_TARGETS[target])
    for name in cases or CASES:
        say({"starts": name})
        with said_failure(name):
            facts = compile_step(compiler, target, {**CASES, **FAULTS}[name], scratch=scratch)
            say(dataclasses.asdict(facts))


if __name__ == "__main__":
    main()
