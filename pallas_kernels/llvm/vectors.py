"""Vectors of float32 numbers, as wide as the registers of this machine."""

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import binding, ir
from numba.core import cgutils

from pallas_kernels.llvm.instructions import FLOAT, WORD, Builder, Value, at


class TileShape(NamedTuple):
    """The largest tile of sums that leaves registers for what is multiplied."""

    rows: int
    vectors: int
    lanes: int


def _tile_shape() -> TileShape:
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return TileShape(rows=6, vectors=4, lanes=16)
    if features.get("avx2"):
        return TileShape(rows=6, vectors=2, lanes=8)
    return TileShape(rows=6, vectors=4, lanes=4)


SHAPE = _tile_shape()
PANEL = SHAPE.vectors * SHAPE.lanes
"""Columns of a tile."""
LANES = SHAPE.lanes

VECTOR = ir.VectorType(FLOAT, LANES)


def place(builder: Builder, base: Value, index: Value, kind: ir.Type) -> Value:
    """Where the number with that index is, as a pointer to `kind`."""
    return at(builder, builder.add(base, builder.mul(index, WORD(4))), kind)


def splat(builder: Builder, value: Value) -> Value:
    """A vector of one number."""
    unset = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(unset, value, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, unset, lanes)


def fused(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """`a * b + c`, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(fma, [a, b, c])


def larger(builder: Builder, a: Value, b: Value) -> Value:
    """The larger number of each lane; the second one where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def folded(
    builder: Builder, operation: Callable[[Builder, Value, Value], Value], vector: Value
) -> Value:
    """The numbers of a vector put together: its halves, then the halves of that, to the last."""
    unset = ir.Constant(VECTOR, ir.Undefined)
    width = LANES // 2
    while width:
        lanes = [lane ^ width for lane in range(LANES)]
        other = ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes)
        vector = operation(builder, vector, builder.shuffle_vector(vector, unset, other))
        width //= 2
    return builder.extract_element(vector, ir.IntType(32)(0))


def added(builder: Builder, a: Value, b: Value) -> Value:
    """`a + b`."""
    return builder.fadd(a, b)


def exchanged(builder: Builder, a: Value, b: Value, bit: int) -> tuple[Value, Value]:
    """Two vectors that have exchanged lanes: those of `a` that have the bit, for those of `b` that
    have not.
    """
    firsts = [lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)]
    seconds = [lane | bit if not lane & bit else LANES + lane for lane in range(LANES)]
    kind = ir.VectorType(ir.IntType(32), LANES)
    first, second = (
        builder.shuffle_vector(a, b, ir.Constant(kind, lanes)) for lanes in (firsts, seconds)
    )
    return first, second
