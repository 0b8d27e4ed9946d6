"""How the weights of a linear map are stored in few bits: quantised, packed, and read again.

    weight_dtype   a weight is                      stored as                 bits, all told
    int8           number * scale                   int8                      8
    int4           number * scale + minimum         uint8 of 2 numbers each   5

Matrices are `[in, out]`. A number of int8 is from -127 to 127, and each column has a scale
(float32). A number of int4 is from 0 to 15, and of each column every `GROUP` rows have a scale and
a minimum (bfloat16).

A weight as it is read again is exactly one float32 number, however it is computed: a number of 4
bits times a bfloat16 fits float32, so only the sum (of int8 the product) is rounded. It is at most
half a scale away from the weight that was quantised.

The order of numbers in memory is a backend's own: `pack` is for XLA and the kernels for GPUs,
`pallas_kernels.linear_map.pack_quantized` for those for CPUs.
"""

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

AnyArray = Array | np.ndarray

WeightDType = Literal["int8", "int4"]
"""Names of the formats."""

GROUP = 32
"""Rows of int4 that share a scale and a minimum; the last ones of a matrix may be fewer."""

INT8_LARGEST, INT4_LARGEST = 127, 15

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Quantized(NamedTuple):
    """Matrices as numbers and what these stand for, before they are packed."""

    numbers: Int[AnyArray, "*L I O"]
    scales: Float[AnyArray, "*L N O"]
    """Of each group of rows; of int8 all rows are one."""
    minimums: Float[AnyArray, "*L N O"] | None
    """Of each group; None in int8."""


class PackedMatrix(NamedTuple):
    """Matrices as XLA and the kernels for GPUs read them."""

    values: Int[AnyArray, "*L Y O"]
    """int8: the numbers. int4: row `r` of a group's half a group of rows has number `r` of the
    group in its low bits and number `r + GROUP / 2` in its high ones; groups are filled up."""
    scales: Float[AnyArray, "*L N O"]
    minimums: Float[AnyArray, "*L N O"] | None


def num_groups(in_width: int, weight_dtype: WeightDType) -> int:
    """Groups of rows of a matrix with so many."""
    return 1 if weight_dtype == "int8" else -(-in_width // GROUP)


def num_bytes(in_width: int, out_width: int, weight_dtype: WeightDType) -> int:
    """Bytes of a matrix as `pack` gives it."""
    if weight_dtype == "int8":
        return out_width * (in_width + 4)
    return out_width * num_groups(in_width, weight_dtype) * (GROUP // 2 + 4)


@runtime_checkable
class HasMinimums(Protocol):
    """Matrices in this format, however they are packed."""

    @property
    def minimums(self) -> Any:  # noqa: ANN401 - an array or its shape
        """Of each group; None in int8."""


def weight_dtype_of(matrix: HasMinimums) -> WeightDType:
    """The format; matrices say by themselves how they are to be read."""
    return "int8" if matrix.minimums is None else "int4"


def quantize(kernel: Float[np.ndarray, "*L I O"], weight_dtype: WeightDType) -> Quantized:
    """The matrices' numbers, on the host.

    Each weight becomes the number that is read as the weight nearest to it. A column, or of int4
    a group, of zeros stays zeros. One that holds an infinity or a NaN is read without a finite
    number.
    """
    kernel = np.asarray(kernel, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        return _int8(kernel) if weight_dtype == "int8" else _int4(kernel)


def dequantize(quantized: Quantized) -> Float[AnyArray, "*L I O"]:
    """The matrices in float32, as they are read again."""
    numbers, scales, minimums = quantized
    if minimums is None:
        return numbers.astype(np.float32) * scales
    in_width = numbers.shape[-2]
    numpy: Any = jnp if isinstance(numbers, Array) else np
    padding = [(0, 0)] * (numbers.ndim - 2) + [(0, -in_width % GROUP), (0, 0)]
    groups = numpy.pad(numbers, padding)
    groups = groups.reshape(*scales.shape[:-1], GROUP, scales.shape[-1]).astype(np.float32)
    weights = groups * _wide(scales) + _wide(minimums)
    return weights.reshape(*numbers.shape[:-2], -1, scales.shape[-1])[..., :in_width, :]


def pack(quantized: Quantized) -> PackedMatrix:
    """The matrices for XLA and the kernels for GPUs."""
    numbers, scales, minimums = quantized
    if minimums is None:
        return PackedMatrix(numbers, scales, None)
    groups = _in_groups(np.asarray(numbers))
    low, high = groups[..., : GROUP // 2, :], groups[..., GROUP // 2 :, :]
    values = (low | high << 4).reshape(*numbers.shape[:-2], -1, numbers.shape[-1])
    return PackedMatrix(values, scales, minimums)


def unpack(packed: PackedMatrix, in_width: int) -> Quantized:
    """What was packed.

    Args:
        packed: The matrices.
        in_width: Their rows, which packed ones of int4 do not tell.
    """
    values, scales, minimums = packed
    if minimums is None:
        return Quantized(values, scales, None)
    numpy: Any = jnp if isinstance(values, Array) else np
    lead, out_width = values.shape[:-2], values.shape[-1]
    halves = values.reshape(*lead, -1, GROUP // 2, out_width)
    numbers = numpy.concatenate([halves & 15, halves >> 4], axis=-2)
    return Quantized(numbers.reshape(*lead, -1, out_width)[..., :in_width, :], scales, minimums)


def zeros(
    lead: tuple[int, ...], in_width: int, out_width: int, weight_dtype: WeightDType
) -> PackedMatrix:
    """Packed matrices of zeros, with these axes in front."""
    groups = num_groups(in_width, weight_dtype)
    if weight_dtype == "int8":
        values = jnp.zeros((*lead, in_width, out_width), jnp.int8)
        return PackedMatrix(values, jnp.zeros((*lead, groups, out_width), jnp.float32), None)
    values = jnp.zeros((*lead, groups * GROUP // 2, out_width), jnp.uint8)
    of_groups = jnp.zeros((*lead, groups, out_width), jnp.bfloat16)
    return PackedMatrix(values, of_groups, of_groups)


def packed_linear_ref(x: Float[Array, "T I"], packed: PackedMatrix) -> Float[Array, "T O"]:
    """What a linear map by packed weights is: `x` times what they are read as, in float32."""
    kernel = jnp.asarray(dequantize(unpack(packed, x.shape[1])))
    return jnp.matmul(x.astype(jnp.float32), kernel, precision="highest")


def _int8(kernel: np.ndarray) -> Quantized:
    scales = np.max(np.abs(kernel), axis=-2, keepdims=True) / np.float32(INT8_LARGEST)
    numbers = _nearest(kernel, scales, -INT8_LARGEST, INT8_LARGEST)
    return Quantized(numbers.astype(np.int8), _or_nan(scales), None)


def _int4(kernel: np.ndarray) -> Quantized:
    groups = _in_groups(kernel)
    minimums = _rounded_down(np.min(groups, axis=-2))
    reach = np.max(groups, axis=-2) - minimums
    scales = (reach / np.float32(INT4_LARGEST)).astype(_BFLOAT16).astype(np.float32)
    numbers = _nearest(groups - minimums[..., None, :], scales[..., None, :], 0, INT4_LARGEST)
    numbers = numbers.astype(np.uint8).reshape(*kernel.shape[:-2], -1, kernel.shape[-1])
    scales, minimums = _or_nan(scales), _or_nan(minimums)
    return Quantized(
        numbers[..., : kernel.shape[-2], :],
        scales.astype(_BFLOAT16),
        minimums.astype(_BFLOAT16),
    )


def _in_groups(rows: np.ndarray) -> np.ndarray:
    """`[*L, N, GROUP, O]`; the last row again and again where the last group is filled up."""
    padding = [(0, 0)] * rows.ndim
    padding[-2] = (0, -rows.shape[-2] % GROUP)
    padded = np.pad(rows, padding, mode="edge")
    return padded.reshape(*rows.shape[:-2], -1, GROUP, rows.shape[-1])


def _nearest(values: np.ndarray, scales: np.ndarray, least: int, most: int) -> np.ndarray:
    # Of zeros, or of numbers so small that their scale is zero, all become the number zero.
    found = values / np.where(scales > 0, scales, np.float32(1))
    np.rint(found, out=found)
    np.clip(found, least, most, out=found)
    return np.nan_to_num(found, copy=False)


def _rounded_down(values: np.ndarray) -> np.ndarray:
    """The values, or the next ones below them that bfloat16 has: no weight is below a minimum."""
    near = values.astype(_BFLOAT16)
    below = np.nextafter(near, _BFLOAT16.type(-np.inf)).astype(np.float32)
    near = near.astype(np.float32)
    return np.where(near > values, below, near)


def _wide(of_groups: AnyArray) -> Float[AnyArray, "*L N 1 O"]:
    return of_groups.astype(np.float32)[..., None, :]


def _or_nan(values: np.ndarray) -> np.ndarray:
    """Infinite ones become NaN: a number of zero times one would hide it otherwise."""
    return np.where(np.isfinite(values), values, np.float32(np.nan))
