"""Compiles whole steps for one card, on a machine that needs no GPU, and says what they do.

A step is the engine's forward program: from token numbers to the stream behind the last layer,
with the pool updated on the way. The sampler, and with it the last norm and the product with the
head, is another program and not looked at. As in `compile_target.py`, one process compiles for one
card only, and nothing is run. `step_gate.py` runs this once for each card.

    python scripts/compile_step.py h100
    python scripts/compile_step.py rtx4090 llama-8b/decode

Prints JSON objects, one a line: the versions; `{"starts": CASE}` before each case; then its
`Facts`, or `{"case": CASE, "error": TEXT}` if it does not compile.

How bytes are counted (decode only). For every instruction of the optimised program that runs -
fusions, custom calls, copies - the bytes of its operands and of its outputs, whether they come from
memory or from a cache, with these exceptions:

- Of an operand of which a fusion takes a slice or gathers rows, only what is taken counts: the
  embedding counts the rows of the step's tokens.
- The pool in a fusion that scatters into it counts the rows that are written, once.
- The pool in `paged_decode` counts the live keys and values of one layer: `context` tokens of
  every lane.
- Partial results between `paged_decode` and `paged_combine` are laid out for the longest context
  there can be; only partitions that hold live tokens count.

The floor is what no program can do without: every weight that the forward reads once (of the
embedding the rows of the step's tokens, of the head and the norm before it nothing), live keys and
values once, and new ones written once.

The second count takes partial sums of matrix products out. XLA splits products of few rows along
the summed dimension and leaves float32 arrays with a leading dimension of splits, which the next
fusion adds up: a few MB that are read at once and may never leave the second-level cache. They
count as if the product had been one bfloat16 array.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import click
import gpu_targets
import jax
import jax.numpy as jnp
from compile_target import MOST_ERROR_CHARACTERS, Compiler, report, versions
from flax import nnx
from gpu_targets import Target
from jax.sharding import use_abstract_mesh

from jaxpaged.cache import kv_pool
from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine import lanes, model_runner
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.llama import Llama
from jaxpaged.scheduler.plan import StepPlan
from pallas_kernels.triton import PARTITION_TOKENS

LANES = 64
MIXED_TOKENS = 512
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
CONTEXT = 1000
"""Live tokens of every lane in a decode step, where the pool holds as many."""
FLOAT_BYTES = 2
"""Of bfloat16, the dtype of weights, stream and pool."""
MOST_ITEMS = 5

DTYPE_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Of dtypes whose name does not say it."""
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.-]+) = (.*)")
COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
OPERAND = re.compile(r"%([\w.-]+)")
KERNEL = re.compile(r'name = "(\w+)"')
THUNK = re.compile(r"^\s*\d+: (k\w+)\s.*?\](?: (\w+))?(?: grid:|$)", re.MULTILINE)

IDLE = frozenset(
    [
        *("parameter", "constant", "bitcast", "get-tuple-element", "tuple"),
        *("after-all", "while", "call", "conditional"),
    ]
)
"""Opcodes that move nothing by themselves."""
PARTS = frozenset(["slice", "dynamic-slice", "gather"])
"""Opcodes that read a part of their first operand."""
MOVES = frozenset(["copy", "copy-start", "dynamic-slice"])
"""Opcodes that only move data from one place to another."""
LAYOUTS = frozenset(["concatenate", "transpose", "convert", "slice", "pad"])
"""Opcodes that make of weights other weights, which could have been stored."""
LAUNCHLESS = frozenset(
    [
        *("kAsyncStart", "kAsyncDone", "kWaitForStreams", "kCommandBuffer", "kSequential"),
        *("kWhile", "kConditional", "kDynamicSliceFusion"),
    ]
)
"""Thunks that start nothing on the card by themselves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step of a model.

    Attributes:
        name: Tells it from all others.
        config: The model.
        num_tokens: Bucket of the step.
        kind: A decode step has one token for each lane; a mixed one prefills too.
        layer_loop: How the engine goes through the layers.
        is_donated: The step may write into the pool that it is given.
    """

    name: str
    config: ModelConfig
    num_tokens: int
    kind: Literal["decode", "mixed"]
    layer_loop: Literal["scan", "unrolled"] = "unrolled"
    is_donated: bool = True


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


def llama(*, hidden: int, mlp: int, layers: int, head_dim: int, is_tied: bool) -> ModelConfig:
    """A model of the Llama 3 family; 32 query heads and 8 key/value heads."""
    return ModelConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=is_tied,
        attention_bias=False,
        mlp_bias=False,
    )


LLAMA_1B = llama(hidden=2048, mlp=8192, layers=16, head_dim=64, is_tied=True)
LLAMA_8B = llama(hidden=4096, mlp=14336, layers=32, head_dim=128, is_tied=False)
MODELS = {"llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B}
"""Of the shapes of Llama 3.2 1B and Llama 3.1 8B."""
NUM_BLOCKS = 8192
SMALL_POOLS = {(LLAMA_8B, "rtx4090"): 2048}
"""Blocks of pools that would not fit beside the weights."""
STEPS: Mapping[Literal["decode", "mixed"], int] = {"decode": LANES, "mixed": MIXED_TOKENS}
CASES = {
    f"{model}/{kind}": Case(name=f"{model}/{kind}", config=config, num_tokens=num_tokens, kind=kind)
    for model, config in MODELS.items()
    for kind, num_tokens in STEPS.items()
}
"""Every step that is vouched for."""
_SHORT = dataclasses.replace(LLAMA_1B, num_layers=4, windows=())
FAULTS = {
    case.name: case
    for case in (
        Case(
            name="fault/pool",
            config=_SHORT,
            num_tokens=LANES,
            kind="decode",
            is_donated=False,
        ),
        Case(
            name="fault/scan",
            config=_SHORT,
            num_tokens=LANES,
            kind="decode",
            layer_loop="scan",
        ),
    )
}
"""What the gate is tried on: a step that copies its pool, and one that copies its weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A line of HLO text.

    Attributes:
        name: Without its sign.
        opcode: What it does.
        shape: Of its result, as text; a tuple's in parentheses.
        operands: Names, in order.
        rest: What follows the operands.
        is_root: It is the result of its computation.
        index: Of a parameter, which one it is.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool
    index: int | None

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations that it has in these attributes."""
        found: list[str] = []
        for attribute in attributes:
            for one, several in re.findall(rf"\b{attribute}=(?:%([\w.-]+)|\{{(.*?)\}})", self.rest):
                found += [one] if one else OPERAND.findall(several)
        return found


Computation = dict[str, Instruction]
"""Instructions by name, in the order of the text."""


def _closing(text: str) -> int:
    """Where the parenthesis closes that opens at the start of the text."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"nothing closes the parenthesis: {text[:100]}")


def read_instruction(line: str) -> Instruction | None:
    """The instruction of a line; None if there is none.

    Raises:
        ValueError: It is not understood.
    """
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    text = match[3]
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    opcode, _, _ = text.partition("(")
    text = text[len(opcode) :]
    end = _closing(text)
    return Instruction(
        name=match[2],
        opcode=opcode,
        shape=shape,
        operands=tuple(OPERAND.findall(text[:end])),
        rest=text[end + 1 :],
        is_root=match[1] is not None,
        index=int(text[1:end]) if opcode == "parameter" else None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """An optimised program.

    Attributes:
        computations: By name.
        entry: Name of the one that is run.
    """

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def read(cls, text: str) -> "Module":
        """From the text of `Compiled.as_text()`.

        Raises:
            ValueError: It has no entry computation.
        """
        computations: dict[str, Computation] = {}
        entry = None
        current: Computation = {}
        for line in text.splitlines():
            if match := COMPUTATION.match(line):
                current = computations[match[2]] = {}
                entry = match[2] if match[1] else entry
            elif instruction := read_instruction(line):
                current[instruction.name] = instruction
        if entry is None:
            raise ValueError("the program has no entry computation")
        return cls(computations=computations, entry=entry)

    def executed(self) -> list[str]:
        """Names of the computations whose instructions are run one by one."""
        names = [self.entry]
        for name in names:
            for item in self.computations[name].values():
                if item.opcode == "while":
                    names += item.called("body", "condition")
                elif item.opcode == "call":
                    names += item.called("to_apply")
                elif item.opcode == "conditional":
                    names += item.called(
                        "branch_computations", "true_computation", "false_computation"
                    )
        return names

    def has_loop(self) -> bool:
        """Part of it runs an unknown number of times."""
        return any(
            item.opcode == "while"
            for name in self.executed()
            for item in self.computations[name].values()
        )

    def body(self, item: Instruction) -> Computation | None:
        """The computation of a fusion; None of anything else."""
        if item.opcode not in ("fusion", "fusion-start"):
            return None
        (name,) = item.called("calls")
        return self.computations[name]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dimensions of the arrays of a shape."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in ARRAY.findall(shape)
    ]


def num_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape."""
    bits = 0
    for dtype, sizes in arrays(shape):
        width = DTYPE_BITS.get(dtype)
        if width is None:
            # f8e4m3fn has 8 bits, bf16 has 16.
            found = re.match(r"[a-z]+(\d+)", dtype)
            if found is None:
                raise ValueError(f"how large is {dtype}?")
            width = int(found[1])
        bits += math.prod(sizes) * width
    return -(-bits // 8)


def root_of(body: Computation) -> list[Instruction]:
    """What makes the results of a computation, behind changes of shape."""
    (root,) = (item for item in body.values() if item.is_root)
    roots = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for index, item in enumerate(roots):
        while item.opcode in ("bitcast", "reshape"):
            item = body[item.operands[0]]
        roots[index] = item
    return roots


def read_fractions(body: Computation) -> list[float]:
    """Of each parameter of a fusion, how much of it is read."""
    fractions = dict.fromkeys(body, 0.0)
    sliced = dict.fromkeys(body, 0.0)
    # Operands stand before those that use them.
    for item in reversed(body.values()):
        own = 1.0 if item.is_root else min(1.0, fractions[item.name] + sliced[item.name])
        fractions[item.name] = own
        for index, operand in enumerate(item.operands):
            if index == 0 and item.opcode in PARTS:
                part = num_bytes(item.shape) / max(1, num_bytes(body[operand].shape))
                sliced[operand] += own * part
            else:
                fractions[operand] = max(fractions[operand], own)
    read = {item.index: fractions[item.name] for item in body.values() if item.index is not None}
    return [read[index] for index in range(len(read))]


def find_large_moves(module: Module, least_bytes: int) -> list[str]:
    """What is copied, or made of nothing but weights, and has that many bytes; a line each."""
    found = []
    for name in module.executed():
        computation = module.computations[name]
        for item in computation.values():
            body = module.body(item)
            is_of_arguments = all(
                _source(computation, operand).opcode == "parameter" for operand in item.operands
            )
            for made in root_of(body) if body else [item]:
                size = num_bytes(made.shape)
                is_move = made.opcode in MOVES or (
                    made.opcode in LAYOUTS and is_of_arguments and name == module.entry
                )
                if is_move and size >= least_bytes:
                    found.append(f"{item.name}: {made.opcode} to {made.shape}, {size} bytes")
    return found


def _source(computation: Computation, name: str) -> Instruction:
    """What an operand is, behind changes of shape."""
    item = computation[name]
    while item.opcode == "bitcast":
        item = computation[item.operands[0]]
    return item


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of a decode step its program's text does not tell.

    Attributes:
        pool_bytes: Of the pool's keys, or of its values; both are equal.
        new_bytes: Keys, or values, that a layer writes.
        live_bytes: Keys, or values, that a layer reads.
        live_part: Of all partitions of the longest context, those that hold live tokens.
    """

    pool_bytes: int
    new_bytes: int
    live_bytes: int
    live_part: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a program moves, in bytes.

    Attributes:
        total: All of it.
        unsplit: As if matrix products were not split.
        beyond: What is neither a weight, nor a live or new key or value, by kind of kernel;
            partial sums of split products stand apart.
    """

    total: float
    unsplit: float
    beyond: dict[str, float]


def count_bytes(module: Module, sizes: Sizes) -> Moved:
    """Counts what a decode step moves; the rules are at the top of this file."""
    total, unsplit = 0.0, 0.0
    beyond: collections.Counter[str] = collections.Counter()
    for computation in (module.computations[name] for name in module.executed()):
        for item in computation.values():
            if item.opcode in IDLE or item.opcode.endswith("-done"):
                continue
            kind = kernel_kind(item)
            for moved, whole, is_needed in _pieces(module, computation, item, sizes):
                total += moved
                unsplit += whole
                if not is_needed:
                    beyond[kind] += whole
                beyond["partial sums of products"] += moved - whole
    return Moved(total=total, unsplit=unsplit, beyond=dict(beyond))


def _pieces(
    module: Module, computation: Computation, item: Instruction, sizes: Sizes
) -> Iterator[tuple[float, float, bool]]:
    """Of every operand and output: bytes, bytes without splitting, and whether it is needed."""
    body = module.body(item)
    kernel = kernel_kind(item)
    is_scatter = body is not None and any(part.opcode == "scatter" for part in body.values())
    fractions = read_fractions(body) if body else [1.0] * len(item.operands)
    for name, fraction in zip(item.operands, fractions, strict=True):
        operand, source = computation[name], _source(computation, name)
        size = num_bytes(operand.shape)
        if size == sizes.pool_bytes and is_scatter:
            continue
        if size == sizes.pool_bytes and kernel == "paged_decode":
            yield sizes.live_bytes, sizes.live_bytes, True
            continue
        if kernel == "paged_combine" and _is_partial(operand.shape):
            fraction *= sizes.live_part
        moved = size * fraction
        is_weight = source.opcode == "parameter" and arrays(source.shape)[0][0] == "bf16"
        yield moved, moved / _splits(module, source), is_weight and size != sizes.pool_bytes
    outputs = [part.shape for part in root_of(body)] if body else [item.shape]
    for shape in outputs:
        size = num_bytes(shape)
        if size == sizes.pool_bytes and is_scatter:
            yield sizes.new_bytes, sizes.new_bytes, True
        elif kernel == "paged_decode":
            yield size * sizes.live_part, size * sizes.live_part, False
        else:
            yield size, size / _splits(module, item), False


def _is_partial(shape: str) -> bool:
    """A result of a partition: query, head, partition, query head, and perhaps width."""
    return all(dtype == "f32" and len(sizes) >= 4 for dtype, sizes in arrays(shape))


def _splits(module: Module, item: Instruction) -> int:
    """How many times larger than in bfloat16 a split product is; 1 of anything else."""
    body = module.body(item)
    if body is None or root_of(body)[0].opcode != "dot":
        return 1
    ((dtype, sizes),) = arrays(item.shape)
    return 2 * sizes[0] if dtype == "f32" and len(sizes) == 3 else 1


def kernel_kind(item: Instruction) -> str:
    """Its kernel's name, without what tells it from others of its kind."""
    if item.opcode == "custom-call":
        names = KERNEL.findall(item.rest)
        return names[-1] if names else item.name
    return without_number(item.name)


def without_number(name: str) -> str:
    """The name of a kernel without what XLA appends to tell it from its like."""
    return re.sub(r"([._]\d+|[._]clone|[._]remat(erialized)?\d*)+$", "", name)


def read_kernels(thunks: str) -> dict[str, int]:
    """How many kernels of each kind a step starts, from a thunk sequence; the most first."""
    counts = collections.Counter(
        without_number(name or kind)
        for kind, name in THUNK.findall(thunks)
        if kind not in LAUNCHLESS
    )
    return dict(counts.most_common())


class StepCompiler(Compiler):
    """Compiles steps for one card."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._target = target

    def facts(self, case: Case) -> Facts:
        """Compiles a step and looks at its program."""
        config = case.config
        num_blocks = SMALL_POOLS.get((config, self._target.name), NUM_BLOCKS)
        row_bytes = config.num_kv_heads * config.head_dim * FLOAT_BYTES
        capacity = PoolCapacity(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            bytes_per_token=2 * config.num_layers * row_bytes,
        )
        weights, compiled, seconds, thunks = self._compile(case, capacity)
        memory = compiled.memory_analysis()
        module = Module.read(compiled.as_text())
        traffic = None
        if case.kind == "decode" and not module.has_loop():
            context = min(CONTEXT, capacity.num_tokens // LANES)
            partitions = -(-MAX_MODEL_LEN // PARTITION_TOKENS)
            sizes = Sizes(
                pool_bytes=capacity.num_bytes // 2,
                new_bytes=LANES * row_bytes,
                live_bytes=LANES * context * row_bytes,
                live_part=-(-context // PARTITION_TOKENS) / partitions,
            )
            moved = count_bytes(module, sizes)
            cached = 2 * config.num_layers * (sizes.new_bytes + sizes.live_bytes)
            largest = collections.Counter(
                {kind: round(size) for kind, size in moved.beyond.items()}
            )
            traffic = Traffic(
                context=context,
                moved_bytes=round(moved.total),
                unsplit_bytes=round(moved.unsplit),
                floor_bytes=forward_bytes(weights, case) + cached,
                largest=tuple(largest.most_common(MOST_ITEMS)),
            )
        return Facts(
            case=case.name,
            compile_seconds=round(seconds, 1),
            pool_bytes=capacity.num_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            layers=config.num_layers,
            kernels=read_kernels(thunks),
            large_moves=tuple(find_large_moves(module, config.hidden_size * row_bytes)),
            traffic=traffic,
        )

    def _compile(
        self, case: Case, capacity: PoolCapacity
    ) -> tuple[nnx.State, jax.stages.Compiled, float, str]:
        """Weights, program, seconds and thunk sequence of a step."""
        config = case.config
        graph, weights = abstract_weights(case)
        shapes = step_batch.batch_shapes(
            max_num_seqs=LANES,
            token_budget=MIXED_TOKENS,
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
            lambda array: self.shape(array.shape, array.dtype), (weights, pool, state, arrays)
        )
        program = jax.jit(
            functools.partial(model_runner.forward, graph, shapes),
            donate_argnums=(1,) if case.is_donated else (),
        )
        with tempfile.TemporaryDirectory() as dump:
            options: dict[str, str | bool] = {"xla_dump_to": dump, "xla_dump_emitter_re": "ptx"}
            started = time.perf_counter()
            with use_abstract_mesh(self._mesh):
                lowered = program.trace(*arguments).lower()
                compiled = lowered.compile(compiler_options=options)
            seconds = time.perf_counter() - started
            dumped = sorted(pathlib.Path(dump).glob("*thunk_sequence.txt"))
            thunks = "\n".join(path.read_text() for path in dumped)
        return weights, compiled, seconds, thunks


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
    """Bytes of the weights that a forward pass cannot do without; see the top of this file."""
    outside = ("embed_tokens", "lm_head", "norm")
    inside = [
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for path, leaf in jax.tree.leaves_with_path(weights)
        if not any(f"{name!r}" in jax.tree_util.keystr(path[:1]) for name in outside)
    ]
    return sum(inside) + case.num_tokens * case.config.hidden_size * FLOAT_BYTES


@contextlib.contextmanager
def reported_failure(case: Case) -> Iterator[None]:
    """Whatever the compiler objects to becomes a line of the report."""
    try:
        yield
    except Exception as error:  # it may raise anything
        text = f"{type(error).__name__}: {error}"
        report({"case": case.name, "error": " ".join(text.split())[:MOST_ERROR_CHARACTERS]})


@click.command()
@click.argument("target", type=click.Choice(list(gpu_targets.STEP_TARGETS)))
@click.argument("cases", nargs=-1, type=click.Choice([*CASES, *FAULTS]), metavar="[CASE]...")
def main(target: str, cases: Sequence[str]) -> None:
    """Compile the steps for a card and print what each does, as JSON; all cases by default.

    Example: python scripts/compile_step.py h100
    """
    # The plugin would look for a driver; a cached executable would have no thunks.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    report({"target": target, **versions()})
    compiler = StepCompiler(gpu_targets.STEP_TARGETS[target])
    for name in cases or CASES:
        case = {**CASES, **FAULTS}[name]
        report({"starts": name})
        with reported_failure(case):
            report(dataclasses.asdict(compiler.facts(case)))


if __name__ == "__main__":
    main()
