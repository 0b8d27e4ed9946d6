"""Linear maps by packed weights as a Pallas kernel for NVIDIA GPUs, by Pallas's Triton backend.

One program per tile of rows and columns goes down the columns: each weight comes from memory in 8
or 4 bits and becomes a number of the rows' dtype in registers. Sums are in float32, in the order of
the input, whatever stands beside a row; they are not split up between programs.

Numbers of int8 are exact in any float, and their scale comes behind the sum. Weights of int4 are
rounded to the rows' dtype.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels import triton
from pallas_kernels.weight_format import GROUP, PackedMatrix

MOST_ROWS = 64
"""Rows of the largest tile."""

_INT4_GROUPS = 2
"""Groups of the matrix's rows that are taken at once."""


class Tile(NamedTuple):
    """What a program computes, and how much of the matrix's rows of int8 it takes at once."""

    rows: int
    columns: int
    inputs: int


def tile(num_rows: int, *, exact: bool) -> Tile:
    """Few rows have narrow tiles, so that there are programs enough to ask for all weights.

    Args:
        num_rows: Of the map's input.
        exact: Products are done in float32, without tensor cores.
    """
    if num_rows <= triton.LEAST_ROWS:
        return Tile(triton.LEAST_ROWS, 32, 16 if exact else 64)
    if exact:
        return Tile(32, 32, 16)
    return Tile(32 if num_rows < MOST_ROWS else MOST_ROWS, 64, 64)


def packed_linear(
    x: Float[Array, "T I"], packed: PackedMatrix, *, interpret: bool = False
) -> Float[Array, "T O"]:
    """See `pallas_kernels.packed_linear`."""
    num_rows, width = x.shape[0], packed.values.shape[1]
    exact = x.dtype == jnp.float32
    size = tile(num_rows, exact=exact)
    kernel = _int8_kernel if packed.minimums is None else _int4_kernel
    factors = packed[1:] if packed.minimums is not None else packed[1:2]
    return triton.call(
        functools.partial(kernel, size=size, exact=exact),
        grid=(pl.cdiv(width, size.columns), pl.cdiv(num_rows, size.rows)),
        outputs=jax.ShapeDtypeStruct((num_rows, width), x.dtype),
        name="packed_linear",
        interpret=interpret,
    )(x, packed.values, *factors)


def _int8_kernel(x_ref, values_ref, scales_ref, out_ref, *, size: Tile, exact: bool) -> None:
    in_width = x_ref.shape[1]
    rows, columns = _place(size)
    is_row, is_column = rows < x_ref.shape[0], columns < out_ref.shape[1]

    def step(index, sums):
        inputs = index * size.inputs + jnp.arange(size.inputs)
        is_input = inputs < in_width
        x = plt.load(
            x_ref.at[rows[:, None], inputs[None, :]],
            mask=is_row[:, None] & is_input[None, :],
            other=0,
        )
        numbers = plt.load(
            values_ref.at[inputs[:, None], columns[None, :]],
            mask=is_input[:, None] & is_column[None, :],
            other=0,
        )
        return sums + triton.dot(x, numbers.astype(x.dtype), exact)

    sums = jnp.zeros((size.rows, size.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, pl.cdiv(in_width, size.inputs), step, sums)
    scales = plt.load(scales_ref.at[0, columns], mask=is_column, other=0)
    _store(out_ref, rows, columns, sums * scales[None, :])


def _int4_kernel(
    x_ref, values_ref, scales_ref, minimums_ref, out_ref, *, size: Tile, exact: bool
) -> None:
    in_width, num_groups = x_ref.shape[1], scales_ref.shape[0]
    rows, columns = _place(size)
    is_row, is_column = rows < x_ref.shape[0], columns < out_ref.shape[1]
    half = GROUP // 2
    pairs = jnp.arange(half)

    def half_of_group(sums, numbers, first, scales, minimums):
        """Adds the products of half a group, whose first row is `first`."""
        inputs = first + pairs
        x = plt.load(
            x_ref.at[rows[:, None], inputs[None, :]],
            mask=is_row[:, None] & (inputs < in_width)[None, :],
            other=0,
        )
        weights = numbers.astype(jnp.float32) * scales[None, :] + minimums[None, :]
        return sums + triton.dot(x, weights.astype(x.dtype), exact)

    def step(index, sums):
        for part in range(_INT4_GROUPS):
            group = index * _INT4_GROUPS + part
            is_there = is_column & (group < num_groups)
            at = (group * half + pairs[:, None], columns[None, :])
            values = plt.load(values_ref.at[*at], mask=is_there[None, :], other=0)
            values = values.astype(jnp.int32)
            scales, minimums = (
                plt.load(ref.at[group, columns], mask=is_there, other=0).astype(jnp.float32)
                for ref in (scales_ref, minimums_ref)
            )
            first = group * GROUP
            sums = half_of_group(sums, values & 15, first, scales, minimums)
            sums = half_of_group(sums, values >> 4, first + half, scales, minimums)
        return sums

    sums = jnp.zeros((size.rows, size.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, pl.cdiv(num_groups, _INT4_GROUPS), step, sums)
    _store(out_ref, rows, columns, sums)


def _place(size: Tile):
    """The rows and columns of a program; those of the same columns are neighbours in time."""
    column, row = pl.program_id(0), pl.program_id(1)
    return row * size.rows + jnp.arange(size.rows), column * size.columns + jnp.arange(size.columns)


def _store(out_ref, rows, columns, sums) -> None:
    is_real = (rows < out_ref.shape[0])[:, None] & (columns < out_ref.shape[1])[None, :]
    at = out_ref.at[rows[:, None], columns[None, :]]
    plt.store(at, sums.astype(out_ref.dtype), mask=is_real)
