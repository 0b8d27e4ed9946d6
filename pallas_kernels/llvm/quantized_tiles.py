"""Tiles of weights of few bits, read into vector registers or into a core's cache.

Either way a weight is the same float32 number (see `pallas_kernels.weight_format`) and is summed up
in the same order, so a product's bits are those of the dequantised weights' product in `tiles`.

A row of a panel has `PANEL` numbers: bytes in int8; in int4 `PANEL / 2` bytes, of which byte `j`
has column `j` in its low bits and column `j + PANEL / 2` in its high ones.
"""

from collections.abc import Callable
from typing import Any, no_type_check

from llvmlite import ir
from numba import types

from pallas_kernels.llvm.compiler import outlined
from pallas_kernels.llvm.instructions import WORD, Builder, Value, at, instruction
from pallas_kernels.llvm.tiles import emit_tile
from pallas_kernels.llvm.vectors import LANES, PANEL, SHAPE, VECTOR, fused, place
from pallas_kernels.weight_format import GROUP, WeightDType

_BYTES = ir.VectorType(ir.IntType(8), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)

ROW_BYTES: dict[WeightDType, int] = {"int8": PANEL, "int4": PANEL // 2}
"""Of a row of a panel."""
SCALE_BYTES: dict[WeightDType, int] = {"int8": 4, "int4": 2}

_ALL = tuple(range(SHAPE.vectors))
_HALVES = (_ALL[: SHAPE.vectors // 2], _ALL[SHAPE.vectors // 2 :])
"""Vectors of a row of a panel."""


class _Columns:
    """Some vectors of a panel's columns: their scales, and minimums if there are any, are held in
    registers."""

    def __init__(
        self, builder: Builder, vectors: tuple[int, ...], scales: Value, minimums: Value | None
    ) -> None:
        read = _floats if minimums is None else _bfloats
        self.vectors = vectors
        self.scales = [read(builder, scales, vector) for vector in vectors]
        self.minimums = (
            None if minimums is None else [read(builder, minimums, vector) for vector in vectors]
        )

    def weights(self, builder: Builder, row: Value) -> list[Value]:
        """The weights of a row of a panel, of its address."""
        if self.minimums is None:
            numbers = _int8(builder, row, self.vectors)
            pairs = zip(numbers, self.scales, strict=True)
            return [builder.fmul(number, scale) for number, scale in pairs]
        numbers = _int4(builder, row, self.vectors)
        triples = zip(numbers, self.scales, self.minimums, strict=True)
        return [fused(builder, *triple) for triple in triples]


def _int8(builder: Builder, row: Value, vectors: tuple[int, ...]) -> list[Value]:
    return [
        builder.sitofp(builder.sext(_bytes(builder, row, vector), _INTS), VECTOR)
        for vector in vectors
    ]


def _int4(builder: Builder, row: Value, vectors: tuple[int, ...]) -> list[Value]:
    low, high = ir.Constant(_INTS, [15] * LANES), ir.Constant(_INTS, [4] * LANES)
    half = SHAPE.vectors // 2
    pairs = {
        place: builder.zext(_bytes(builder, row, place), _INTS)
        for place in sorted({vector % half for vector in vectors})
    }
    numbers = [
        builder.and_(pairs[vector], low)
        if vector < half
        else builder.lshr(pairs[vector - half], high)
        for vector in vectors
    ]
    return [builder.sitofp(number, VECTOR) for number in numbers]


def _bytes(builder: Builder, row: Value, vector: int) -> Value:
    return builder.load(at(builder, builder.add(row, WORD(vector * LANES)), _BYTES), align=1)


def _floats(builder: Builder, address: Value, vector: int) -> Value:
    return builder.load(place(builder, address, WORD(vector * LANES), VECTOR), align=4)


def _bfloats(builder: Builder, address: Value, vector: int) -> Value:
    shorts = at(builder, builder.add(address, WORD(2 * vector * LANES)), _SHORTS)
    bits = builder.zext(builder.load(shorts, align=2), _INTS)
    return builder.bitcast(builder.shl(bits, ir.Constant(_INTS, [16] * LANES)), VECTOR)


def _with_minimums(weight_dtype: WeightDType, minimums: Value) -> Value | None:
    return None if weight_dtype == "int8" else minimums


def _tile(weight_dtype: WeightDType, rows: int, vectors: tuple[int, ...] = _ALL) -> Any:
    """`c = a @ b`, or `c += a @ b`, for so many rows of `a`, rows of a panel with one scale, and
    some of its vectors."""

    @instruction(types.void, *[types.intp] * 9)
    def product(
        builder: Builder,
        a: Value,
        a_stride: Value,
        b: Value,
        scales: Value,
        minimums: Value,
        c: Value,
        c_stride: Value,
        inner: Value,
        adds: Value,
    ) -> None:
        columns = _Columns(builder, vectors, scales, _with_minimums(weight_dtype, minimums))
        row_bytes = WORD(ROW_BYTES[weight_dtype])

        def read_weights(builder: Builder, index: Value) -> list[Value]:
            return columns.weights(builder, builder.add(b, builder.mul(index, row_bytes)))

        spots = [(row, vector) for row in range(rows) for vector in vectors]
        tile = {"a": a, "a_stride": a_stride, "c": c, "c_stride": c_stride}
        emit_tile(builder, read_weights, spots, **tile, inner=inner, adds=adds)

    return product


def _dequantize(weight_dtype: WeightDType) -> Any:
    """Weights of rows of a panel with one scale, written out."""

    @instruction(types.void, *[types.intp] * 5)
    def write(
        builder: Builder, b: Value, scales: Value, minimums: Value, target: Value, rows: Value
    ) -> None:
        columns = _Columns(builder, _ALL, scales, _with_minimums(weight_dtype, minimums))
        before = builder.block
        loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(WORD)
        row_bytes = WORD(ROW_BYTES[weight_dtype])
        weights = columns.weights(builder, builder.add(b, builder.mul(index, row_bytes)))
        first = builder.mul(index, WORD(PANEL))
        for vector, weight in enumerate(weights):
            spot = builder.add(first, WORD(vector * LANES))
            builder.store(weight, place(builder, target, spot, VECTOR), align=4)
        following = builder.add(index, WORD(1))
        index.add_incoming(WORD(0), before)
        index.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, rows), loop, after)
        builder.position_at_end(after)

    return write


def few_rows_product(weight_dtype: WeightDType) -> Callable[..., None]:
    """`c = a @ b`, or `c += a @ b`, for a few rows: each weight is read for every eight of them.

    Arguments are addresses, strides in numbers from one row to the next, and counts: `a`,
    `a_stride` of `[rows, inner]`; `b` of rows of a panel, which begin a group; `scales` and
    `minimums` of their groups; `c`, `c_stride` of `[rows, PANEL]`; `rows`; `inner`, at least 1;
    `adds`, whether to add to what is there.
    """
    # Eight rows have room in the registers for half of a panel's columns.
    eight_low, eight_high = (_tile(weight_dtype, 8, half) for half in _HALVES)
    four, two, one = (_tile(weight_dtype, rows) for rows in (4, 2, 1))
    row_bytes = ROW_BYTES[weight_dtype]
    factor_bytes = SCALE_BYTES[weight_dtype] * PANEL
    is_grouped = weight_dtype == "int4"

    @outlined(types.void, *[types.intp] * 10)
    @no_type_check
    def product(a, a_stride, b, scales, minimums, c, c_stride, rows, inner, adds):
        length = GROUP if is_grouped else inner
        for start in range(0, inner, length):
            count = min(length, inner - start)
            a_at, c_at, left = a + 4 * start, c, rows
            begun = adds or start > 0
            while left >= 8:
                eight_low(a_at, a_stride, b, scales, minimums, c_at, c_stride, count, begun)
                eight_high(a_at, a_stride, b, scales, minimums, c_at, c_stride, count, begun)
                a_at, c_at, left = a_at + 32 * a_stride, c_at + 32 * c_stride, left - 8
            if left >= 4:
                four(a_at, a_stride, b, scales, minimums, c_at, c_stride, count, begun)
                a_at, c_at, left = a_at + 16 * a_stride, c_at + 16 * c_stride, left - 4
            if left >= 2:
                two(a_at, a_stride, b, scales, minimums, c_at, c_stride, count, begun)
                a_at, c_at, left = a_at + 8 * a_stride, c_at + 8 * c_stride, left - 2
            if left:
                one(a_at, a_stride, b, scales, minimums, c_at, c_stride, count, begun)
            b += count * row_bytes
            scales += factor_bytes
            minimums += factor_bytes

    return product


def dequantized_panel(weight_dtype: WeightDType) -> Callable[..., None]:
    """Weights of rows of a panel, written out for `tiles.panel_product`.

    Arguments are addresses and a count: `b`, `scales`, `minimums` as in `few_rows_product`;
    `target` of `[rows, PANEL]`; `rows`, at least 1.
    """
    write = _dequantize(weight_dtype)
    row_bytes = ROW_BYTES[weight_dtype]
    factor_bytes = SCALE_BYTES[weight_dtype] * PANEL
    is_grouped = weight_dtype == "int4"

    @outlined(types.void, *[types.intp] * 5)
    @no_type_check
    def dequantize(b, scales, minimums, target, rows):
        length = GROUP if is_grouped else rows
        for start in range(0, rows, length):
            count = min(length, rows - start)
            write(b, scales, minimums, target, count)
            b += count * row_bytes
            target += count * 4 * PANEL
            scales += factor_bytes
            minimums += factor_bytes

    return dequantize
