"""How keys and values are stored: one table of formats, encoded when written, decoded when read.

    kv_dtype   stored as                    error of an element
    float32    float32                      none
    bfloat16   bfloat16, or its bits        2^-8 of itself
    float16    float16, or its bits         2^-11 of itself, infinite above 65,504
    fp8        bits of float8_e4m3fn        2^-4 of itself, 2^-10 of the scale near zero
    int8       int8                         half a step; a step is the row's largest / 127
    int4       uint32 of 8 numbers each     half a step; a step is the row's largest / 7

The last three have a float32 scale for each token and head. No two formats share a storage dtype
on one device, so arrays say by themselves how they are to be read.

Floats may be stored as their bits: XLA on CPU would otherwise move the conversion to float32 in
front of the gather and out of the loop, and convert the whole pool on every step.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

KVDType = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
"""Names of the formats."""

NIBBLES = 8
"""Numbers of 4 bits in a stored word."""

FP8_LARGEST, INT8_LARGEST, INT4_LARGEST = 448.0, 127.0, 7.0

_FLOAT_BITS = {"uint16": jnp.bfloat16, "int16": jnp.float16, "uint8": jnp.float8_e4m3fn}
"""The float that each dtype holds the bits of."""


class KVRows(NamedTuple):
    """Keys, or values, of every layer, block, slot and head, as they are stored."""

    values: Shaped[Array, "L N S K X"]
    """One row per token and head, `D` wide; int4 has `X = D / 8` words."""
    scales: Float[Array, "L N S K"] | None
    """What the row's numbers are multiplied by; None in formats without scales."""


def storage(kv_dtype: KVDType, head_dim: int, *, as_bits: bool) -> tuple[jnp.dtype, int, bool]:
    """Storage dtype, stored width of a row, and whether it has a scale.

    Args:
        kv_dtype: The format.
        head_dim: Numbers in a row.
        as_bits: Store floats as integers of the same bits, as the CPU needs it.

    Raises:
        ValueError: The format cannot store rows of this width.
    """
    match kv_dtype:
        case "float32":
            return jnp.dtype(jnp.float32), head_dim, False
        case "bfloat16":
            return jnp.dtype(jnp.uint16 if as_bits else jnp.bfloat16), head_dim, False
        case "float16":
            return jnp.dtype(jnp.int16 if as_bits else jnp.float16), head_dim, False
        case "fp8":
            # Always its bits: cards before Ada know no such numbers.
            return jnp.dtype(jnp.uint8), head_dim, True
        case "int8":
            return jnp.dtype(jnp.int8), head_dim, True
        case "int4":
            if head_dim % NIBBLES:
                raise ValueError(
                    f"int4 keys and values are stored {NIBBLES} to a word, "
                    f"and the head width {head_dim} is no multiple of that"
                )
            return jnp.dtype(jnp.uint32), head_dim // NIBBLES, True


def width(rows: KVRows) -> int:
    """Numbers of a head, of stored rows."""
    stored = rows.values.shape[-1]
    return stored * NIBBLES if rows.values.dtype == jnp.uint32 else stored


def encode(
    x: Float[Array, "T K D"], like: KVRows
) -> tuple[Shaped[Array, "T K X"], Float[Array, "T K"] | None]:
    """The rows as `like` stores them, and their scales.

    A row of zeros stays zeros. A row that holds an infinity or a NaN is read back without a
    finite number, whatever the format.
    """
    dtype = like.values.dtype
    if like.scales is None:
        rounded = x.astype(_FLOAT_BITS.get(dtype.name, dtype))
        return _as_stored(rounded, dtype), None
    x = x.astype(jnp.float32)
    largest = {"int8": INT8_LARGEST, "uint32": INT4_LARGEST}.get(dtype.name, FP8_LARGEST)
    scales = jnp.max(jnp.abs(x), axis=-1) / largest
    # Rows of zeros, or so small that their scale is zero, must not divide by it.
    divisors = jnp.where(scales > 0, scales, 1.0)[..., None]
    scaled = jnp.clip(x / divisors, -largest, largest)
    if dtype == jnp.int8:
        return jnp.round(scaled).astype(jnp.int8), scales
    if dtype == jnp.uint32:
        return _packed(jnp.round(scaled)), scales
    return _as_stored(scaled.astype(jnp.float8_e4m3fn), dtype), scales


def decode(
    values: Shaped[Array, "*R X"], scales: Float[Array, "*R"] | None
) -> Float[Array, "*R D"]:
    """The stored rows as float32."""
    bits = _FLOAT_BITS.get(values.dtype.name)
    if bits is not None:
        values = jax.lax.bitcast_convert_type(values, bits)
    elif values.dtype == jnp.uint32:
        values = _unpacked(values)
    rows = values.astype(jnp.float32)
    return rows if scales is None else rows * scales[..., None]


def _as_stored(x: Float[Array, "T K D"], dtype: jnp.dtype) -> Shaped[Array, "T K D"]:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


# Number `i * X + j` of a row is nibble `i` of word `j`, so that reading a row is eight shifts of
# all its words, one after the other. A nibble is the number plus 8.


def _packed(x: Float[Array, "T K D"]) -> Shaped[Array, "T K X"]:
    nibbles = (x + 8.0).astype(jnp.uint32).reshape(*x.shape[:-1], NIBBLES, -1)
    return jnp.bitwise_or.reduce(nibbles << _shifts(nibbles.ndim), axis=-2)


def _unpacked(words: Shaped[Array, "*R X"]) -> Shaped[Array, "*R D"]:
    words = words[..., None, :]
    nibbles = (words >> _shifts(words.ndim)) & jnp.uint32(15)
    return (nibbles.astype(jnp.int32) - 8).reshape(*words.shape[:-2], -1)


def _shifts(ndim: int) -> Shaped[Array, "..."]:
    """Shift of each nibble, along the last axis but one."""
    shifts = jnp.arange(0, 4 * NIBBLES, 4, dtype=jnp.uint32)
    return shifts.reshape((1,) * (ndim - 2) + (NIBBLES, 1))
