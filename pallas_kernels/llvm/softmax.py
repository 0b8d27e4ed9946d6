"""The online softmax of a row of scores, in vectors (Milakov and Gimelshein, arXiv:1805.02867)."""

from typing import no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.llvm.compiler import outlined
from pallas_kernels.llvm.instructions import WORD, Builder, Value, floats, instruction
from pallas_kernels.llvm.vectors import LANES, VECTOR, added, folded, fused, larger, place, splat

TILE = 64
"""Scores of a row that are taken in at once."""

MASKED = -1e30
"""The score of a key that a query does not see."""
LEAST = -1e29
"""The peak before any key: above `MASKED`, so that masked keys never weigh anything."""

_INTS = ir.VectorType(ir.IntType(32), LANES)

LOG2_E = 1.44269504088896341
"""Scores are taken times this: exp(x) is 2 to the power of it."""

# 2^r for |r| <= 1/2 is 1 plus r times this polynomial: the coefficients of Cephes' exp2f, right to
# 1.7e-7 of the result. 2^0 is exactly 1.
_COEFFICIENTS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)
# Up to this power the result is exactly zero: the bits of its exponent are.
_LEAST_POWER = -127.0


def _constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def _exp2(builder: Builder, x: Value) -> Value:
    """Of numbers up to zero; NaN stays NaN."""
    least = _constant(_LEAST_POWER)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    kind = ir.FunctionType(VECTOR, [VECTOR])
    rint = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
    n = builder.call(rint, [x])
    r = builder.fsub(x, n)
    p = _constant(_COEFFICIENTS[0])
    for coefficient in (*_COEFFICIENTS[1:], 1.0):
        p = fused(builder, p, r, _constant(coefficient))
    exponent = builder.add(builder.fptosi(n, _INTS), ir.Constant(_INTS, [127] * LANES))
    bits = builder.shl(exponent, ir.Constant(_INTS, [23] * LANES))
    return builder.fmul(p, builder.bitcast(bits, VECTOR))


@instruction(types.float32, types.intp)
def _largest(builder: Builder, scores: Value) -> Value:
    """The largest of `TILE` numbers."""
    largest = builder.load(place(builder, scores, WORD(0), VECTOR), align=4)
    for at in range(LANES, TILE, LANES):
        vector = builder.load(place(builder, scores, WORD(at), VECTOR), align=4)
        largest = larger(builder, vector, largest)
    return folded(builder, larger, largest)


@instruction(types.float32, types.intp, types.float32)
def _weigh(builder: Builder, scores: Value, peak: Value) -> Value:
    """Puts 2^(score - peak) in place of `TILE` scores; their sum."""
    peaks = splat(builder, peak)
    total = _constant(0.0)
    for at in range(0, TILE, LANES):
        where = place(builder, scores, WORD(at), VECTOR)
        weights = _exp2(builder, builder.fsub(builder.load(where, align=4), peaks))
        builder.store(weights, where, align=4)
        total = builder.fadd(total, weights)
    return folded(builder, added, total)


@instruction(types.float32, types.float32)
def _exp2_one(builder: Builder, x: Value) -> Value:
    return builder.extract_element(_exp2(builder, splat(builder, x)), ir.IntType(32)(0))


@outlined(types.void, *[types.intp] * 4)
@no_type_check
def accumulate(scores, state, weighted, width):
    """Takes `TILE` scores in: they become weights, and what was there before is scaled to them.

    Args:
        scores: Address of the row's scores times `LOG2_E`; `MASKED` where a key is not seen.
        state: Address of the largest score so far and of the sum of weights.
        weighted: Address of the weighted sum of values; the caller adds those of these keys.
        width: Numbers of that sum.
    """
    running = floats(state)
    peak = max(running[0], _largest(scores))
    total = _weigh(scores, peak)
    if peak > running[0]:
        factor = _exp2_one(running[0] - peak)
        row = floats(weighted)
        for index in range(width):
            row[index] *= factor
        running[1] *= factor
        running[0] = peak
    running[1] += total
