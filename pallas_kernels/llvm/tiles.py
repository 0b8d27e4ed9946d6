"""Products of small tiles, held in vector registers: what all kernels here spend their time in.

A tile's shape is the largest whose sums, with the vectors that are multiplied, fit the registers.
Every number of a product is summed up by fused multiply-adds in the order of the inner axis, from
zero or from what is there: its bits depend neither on the tile's shape nor on its neighbours.
"""

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

from llvmlite import ir
from numba import types

from pallas_kernels.llvm.compiler import outlined
from pallas_kernels.llvm.instructions import FLOAT, WORD, Builder, Value, instruction
from pallas_kernels.llvm.vectors import (
    LANES,
    SHAPE,
    VECTOR,
    added,
    exchanged,
    folded,
    fused,
    place,
    splat,
)

ReadWeights = Callable[[Builder, Value], list[Value]]
"""Emits the vectors of a row of the other side of a product, of the row's index."""


def emit_tile(
    builder: Builder,
    read_weights: ReadWeights,
    spots: Sequence[tuple[int, int]],
    *,
    a: Value,
    a_stride: Value,
    c: Value,
    c_stride: Value,
    inner: Value,
    adds: Value,
) -> None:
    """Emits `c = a @ b`, or `c += a @ b` where `adds` is not zero.

    Args:
        builder: Emits.
        read_weights: Of `b`: a vector for each that is named in `spots`, in their order.
        spots: Row and vector of each vector of the tile, rows first.
        a: Address of `[rows, inner]`.
        a_stride: Numbers from one of its rows to the next.
        c: Address of the tile.
        c_stride: Numbers from one of its rows to the next.
        inner: At least 1.
        adds: Whether to add to what is there.
    """

    def target(row: int, vector: int) -> Value:
        offset = builder.mul(c_stride, WORD(row))
        return place(builder, c, builder.add(offset, WORD(vector * LANES)), VECTOR)

    entry = builder.block
    read, before, loop, after = (
        builder.append_basic_block(name) for name in ("read", "before", "loop", "after")
    )
    builder.cbranch(builder.icmp_signed("!=", adds, WORD(0)), read, before)
    builder.position_at_end(read)
    there = [builder.load(target(*spot), align=4) for spot in spots]
    builder.branch(before)
    builder.position_at_end(before)
    starts = []
    for value in there:
        start = builder.phi(VECTOR)
        start.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), entry)
        start.add_incoming(value, read)
        starts.append(start)
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(WORD)
    sums = [builder.phi(VECTOR) for _ in spots]
    b_vectors = read_weights(builder, index)
    new_sums = []
    for row in range(len(spots) // len(b_vectors)):
        offset = builder.add(builder.mul(a_stride, WORD(row)), index)
        factor = splat(builder, builder.load(place(builder, a, offset, FLOAT), align=4))
        own = sums[row * len(b_vectors) : (row + 1) * len(b_vectors)]
        new_sums += [
            fused(builder, factor, b_vector, sum_)
            for b_vector, sum_ in zip(b_vectors, own, strict=True)
        ]
    following = builder.add(index, WORD(1))
    index.add_incoming(WORD(0), before)
    index.add_incoming(following, loop)
    for sum_, start, new in zip(sums, starts, new_sums, strict=True):
        sum_.add_incoming(start, before)
        sum_.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, inner), loop, after)
    builder.position_at_end(after)
    for spot, value in zip(spots, new_sums, strict=True):
        builder.store(value, target(*spot), align=4)


def _tile_product(rows: int, vectors: int) -> Any:
    """The product for a tile of so many rows and vectors."""

    @instruction(types.void, *[types.intp] * 8)
    def product(
        builder: Builder,
        a: Value,
        a_stride: Value,
        b: Value,
        b_stride: Value,
        c: Value,
        c_stride: Value,
        inner: Value,
        adds: Value,
    ) -> None:
        def read_weights(builder: Builder, index: Value) -> list[Value]:
            b_row = builder.mul(index, b_stride)
            spots = (builder.add(b_row, WORD(v * LANES)) for v in range(vectors))
            return [builder.load(place(builder, b, spot, VECTOR), align=4) for spot in spots]

        spots = [(row, vector) for row in range(rows) for vector in range(vectors)]
        tile = {"a": a, "a_stride": a_stride, "c": c, "c_stride": c_stride}
        emit_tile(builder, read_weights, spots, **tile, inner=inner, adds=adds)

    return product


def _product_of_rows(vectors: int) -> Any:
    """The product for any number of rows, cut into tiles of so many vectors."""
    most = SHAPE.rows
    full, four, two, one = (_tile_product(rows, vectors) for rows in (most, 4, 2, 1))

    @outlined(types.void, *[types.intp] * 9)
    @no_type_check
    def product(a, a_stride, b, b_stride, c, c_stride, rows, inner, adds):
        a_row, c_row = 4 * a_stride, 4 * c_stride
        while rows >= most:
            full(a, a_stride, b, b_stride, c, c_stride, inner, adds)
            a, c, rows = a + most * a_row, c + most * c_row, rows - most
        if rows >= 4:
            four(a, a_stride, b, b_stride, c, c_stride, inner, adds)
            a, c, rows = a + 4 * a_row, c + 4 * c_row, rows - 4
        if rows >= 2:
            two(a, a_stride, b, b_stride, c, c_stride, inner, adds)
            a, c, rows = a + 2 * a_row, c + 2 * c_row, rows - 2
        if rows:
            one(a, a_stride, b, b_stride, c, c_stride, inner, adds)

    return product


panel_product = _product_of_rows(SHAPE.vectors)
"""`c = a @ b`, or `c += a @ b`, for `PANEL` columns and any number of rows.

Arguments are addresses, strides in numbers from one row to the next, and counts: `a`, `a_stride` of
`[rows, inner]`; `b`, `b_stride` of `[inner, PANEL]`; `c`, `c_stride` of `[rows, PANEL]`; `rows`, at
least 0; `inner`, at least 1; `adds`, whether to add to what is there.
"""
strip_product = _product_of_rows(1)
"""As `panel_product`, for `LANES` columns."""


def _dots(others: int) -> Any:
    """Dot products of a row with so many others: `LANES`, or one, to the same bits."""

    @instruction(types.void, *[types.intp] * 5)
    def products(
        builder: Builder, a: Value, b: Value, b_stride: Value, c: Value, inner: Value
    ) -> None:
        before = builder.block
        loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(WORD)
        sums = [builder.phi(VECTOR) for _ in range(others)]
        a_vector = builder.load(place(builder, a, index, VECTOR), align=4)
        new_sums = []
        for row, sum_ in enumerate(sums):
            offset = builder.add(builder.mul(b_stride, WORD(row)), index)
            b_vector = builder.load(place(builder, b, offset, VECTOR), align=4)
            new_sums.append(fused(builder, a_vector, b_vector, sum_))
        following = builder.add(index, WORD(LANES))
        index.add_incoming(WORD(0), before)
        index.add_incoming(following, loop)
        for sum_, new in zip(sums, new_sums, strict=True):
            sum_.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
            sum_.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, inner), loop, after)
        builder.position_at_end(after)
        if others == 1:
            builder.store(folded(builder, added, new_sums[0]), place(builder, c, WORD(0), FLOAT))
            return
        # Two vectors at a time are folded into one, until lane i holds the sum of row i.
        bit = LANES // 2
        while bit:
            pairs = [exchanged(builder, new_sums[i], new_sums[i + bit], bit) for i in range(bit)]
            new_sums = [builder.fadd(*pair) for pair in pairs]
            bit //= 2
        builder.store(new_sums[0], place(builder, c, WORD(0), VECTOR), align=4)

    return products


_dots_of_lanes, _dots_of_one = _dots(LANES), _dots(1)


@outlined(types.void, *[types.intp] * 5)
@no_type_check
def dots(a, b, b_stride, c, inner):
    """`c[i] = a @ b[i]` for `LANES` i, of addresses; `inner` is a multiple of `LANES`."""
    _dots_of_lanes(a, b, b_stride, c, inner)


@outlined(types.void, *[types.intp] * 4)
@no_type_check
def dot_product(a, b, c, inner):
    """`c = a @ b`, of addresses, to the bits of `dots`."""
    _dots_of_one(a, b, 0, c, inner)


@instruction(types.void, *[types.intp] * 4)
def _turn_block(builder: Builder, a: Value, a_stride: Value, b: Value, b_stride: Value) -> None:
    """`b = a.T` for `LANES` rows and columns: bit by bit, rows and lanes change places."""
    rows: list[Value] = [
        builder.load(place(builder, a, builder.mul(a_stride, WORD(row)), VECTOR), align=4)
        for row in range(LANES)
    ]
    bit = 1
    while bit < LANES:
        for row in range(LANES):
            if not row & bit:
                rows[row], rows[row | bit] = exchanged(builder, rows[row], rows[row | bit], bit)
        bit *= 2
    for row, vector in enumerate(rows):
        builder.store(vector, place(builder, b, builder.mul(b_stride, WORD(row)), VECTOR), align=4)


@outlined(types.void, *[types.intp] * 6)
@no_type_check
def turn(a, a_stride, b, b_stride, rows, columns):
    """`b = a.T`, of addresses; rows and columns are multiples of `LANES`."""
    for row in range(0, rows, LANES):
        for column in range(0, columns, LANES):
            _turn_block(
                a + 4 * (row * a_stride + column), a_stride,
                b + 4 * (column * b_stride + row), b_stride,
            )  # fmt: skip
