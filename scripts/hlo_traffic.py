"""What a program does to a card's memory, counted in its text.

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
import dataclasses
import re
from collections.abc import Iterator

import hlo
from hlo import Computation, Instruction, Module

KERNEL = re.compile(r'name = "(\w+)"')

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
                part = hlo.num_bytes(item.shape) / max(1, hlo.num_bytes(body[operand].shape))
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
                hlo.source_of(computation, operand).opcode == "parameter"
                for operand in item.operands
            )
            for made in hlo.root_of(body) if body else [item]:
                size = hlo.num_bytes(made.shape)
                is_move = made.opcode in MOVES or (
                    made.opcode in LAYOUTS and is_of_arguments and name == module.entry
                )
                if is_move and size >= least_bytes:
                    found.append(f"{item.name}: {made.opcode} to {made.shape}, {size} bytes")
    return found


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
    beyond: dict[str, float] = collections.defaultdict(float)
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
        operand, source = computation[name], hlo.source_of(computation, name)
        size = hlo.num_bytes(operand.shape)
        if size == sizes.pool_bytes and is_scatter:
            continue
        if size == sizes.pool_bytes and kernel == "paged_decode":
            yield sizes.live_bytes, sizes.live_bytes, True
            continue
        if kernel == "paged_combine" and _is_partial(operand.shape):
            fraction *= sizes.live_part
        moved = size * fraction
        is_weight = source.opcode == "parameter" and hlo.arrays(source.shape)[0][0] == "bf16"
        yield moved, moved / _splits(module, source), is_weight and size != sizes.pool_bytes
    outputs = [part.shape for part in hlo.root_of(body)] if body else [item.shape]
    for shape in outputs:
        size = hlo.num_bytes(shape)
        if size == sizes.pool_bytes and is_scatter:
            yield sizes.new_bytes, sizes.new_bytes, True
        elif kernel == "paged_decode":
            yield size * sizes.live_part, size * sizes.live_part, False
        else:
            yield size, size / _splits(module, item), False


def _is_partial(shape: str) -> bool:
    """A result of a partition: query, head, partition, query head, and perhaps width."""
    return all(dtype == "f32" and len(sizes) >= 4 for dtype, sizes in hlo.arrays(shape))


def _splits(module: Module, item: Instruction) -> int:
    """How many times larger than in bfloat16 a split product is; 1 of anything else."""
    body = module.body(item)
    if body is None or hlo.root_of(body)[0].opcode != "dot":
        return 1
    ((dtype, sizes),) = hlo.arrays(item.shape)
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
