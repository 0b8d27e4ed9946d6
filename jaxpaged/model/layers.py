"""The parts of a decoder layer: linear map, RMS norm, rotary embedding.

Every module can carry a leading layer axis, so that one set of stacked weights serves a scan.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxpaged.model import rope
from jaxpaged.model.config import Activation, ModelConfig
from jaxpaged.model.config_families import NormScale
from jaxpaged.shapes import AnyArray
from pallas_kernels import Implementation, WeightDType, weight_format

# XLA on CPU sums up small arrays in another order than larger ones; with 64 rows of so many numbers
# or more the order does not depend on how many rows there are, and a product's never does.
_NARROW = 64


class Place(NamedTuple):
    """Which map of a stack it is and which rows are wanted; the kernels for CPUs need to know."""

    layer: Int[Array, ""]
    num_rows: Int[AnyArray, ""]
    """The first rows; what others are mapped to does not matter."""
    adapters: Int[AnyArray, " T"] | None = None
    """Which adapter changes the maps for each row; only maps that have adapters look at it."""


class Panels(nnx.Param):
    """The kernels of all layers as the kernels for CPUs read them: never cut into layers."""


class Linear(nnx.Module):
    """`x @ kernel + bias`, the kernel stored as `[in, out]`."""

    def __init__(
        self, in_width: int, out_width: int, *, bias: bool, lead: tuple[int, ...], dtype: jnp.dtype
    ) -> None:
        self.kernel = nnx.Param(jnp.zeros((*lead, in_width, out_width), dtype))
        self.bias = nnx.Param(jnp.zeros((*lead, out_width), dtype)) if bias else None

    def __call__(
        self, x: Float[Array, "T I"], place: Place, added: Float[Array, "T O"] | None = None
    ) -> Float[Array, "T O"]:
        """The mapped rows, and what is added to them."""
        y = x @ self.kernel[...]
        y = y if self.bias is None else y + self.bias[...][None, :]
        return y if added is None else added + y


class PackedLinear(nnx.Module):
    """The same by the kernel for CPUs, the layers' kernels stored together."""

    def __init__(
        self, in_width: int, out_width: int, *, bias: bool, lead: tuple[int, ...], dtype: jnp.dtype
    ) -> None:
        kernel = jnp.zeros((*lead, in_width, out_width), dtype)
        self.panels = Panels(pallas_kernels.pack(kernel))
        self.bias = nnx.Param(jnp.zeros((*lead, out_width), dtype)) if bias else None
        self.width = out_width

    def __call__(
        self, x: Float[Array, "T I"], place: Place, added: Float[Array, "T O"] | None = None
    ) -> Float[Array, "T O"]:
        """The mapped rows, and what is added to them."""
        y = pallas_kernels.linear(
            x,
            self.panels[...],
            layer=place.layer,
            num_rows=place.num_rows,
            width=self.width,
            added=added,
        )
        return y if self.bias is None else y + self.bias[...][None, :]


class QuantizedLinear(nnx.Module):
    """`Linear` by a kernel of few bits, which is never held in more."""

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        bias: bool,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        weight_dtype: WeightDType,
        implementation: Implementation,
    ) -> None:
        self.kernel = nnx.Param(weight_format.zeros(lead, in_width, out_width, weight_dtype))
        self.bias = nnx.Param(jnp.zeros((*lead, out_width), dtype)) if bias else None
        self.implementation: Implementation = implementation

    def __call__(
        self, x: Float[Array, "T I"], place: Place, added: Float[Array, "T O"] | None = None
    ) -> Float[Array, "T O"]:
        """The mapped rows, and what is added to them."""
        y = pallas_kernels.packed_linear(
            x, self.kernel.get_value(), implementation=self.implementation
        )
        y = y if self.bias is None else y + self.bias[...][None, :]
        return y if added is None else added + y


class QuantizedPackedLinear(nnx.Module):
    """`PackedLinear` by a kernel of few bits."""

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        bias: bool,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        weight_dtype: WeightDType,
    ) -> None:
        self.panels = Panels(pallas_kernels.zero_panels(lead, in_width, out_width, weight_dtype))
        self.bias = nnx.Param(jnp.zeros((*lead, out_width), dtype)) if bias else None
        self.width = out_width

    def __call__(
        self, x: Float[Array, "T I"], place: Place, added: Float[Array, "T O"] | None = None
    ) -> Float[Array, "T O"]:
        """The mapped rows, and what is added to them."""
        y = pallas_kernels.quantized_linear(
            x,
            self.panels.get_value(),
            layer=place.layer,
            num_rows=place.num_rows,
            width=self.width,
            added=added,
        )
        return y if self.bias is None else y + self.bias[...][None, :]


AnyLinear = Linear | PackedLinear | QuantizedLinear | QuantizedPackedLinear


def linear_kind(
    implementation: Implementation, weight_dtype: WeightDType | None = None
) -> Callable[..., AnyLinear]:
    """Linear maps that go with an implementation of attention, of weights quantised or not."""
    if weight_dtype is None:
        return PackedLinear if implementation == "llvm" else Linear
    if implementation == "llvm":
        return functools.partial(QuantizedPackedLinear, weight_dtype=weight_dtype)
    return functools.partial(
        QuantizedLinear, weight_dtype=weight_dtype, implementation=implementation
    )


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467), computed in float32.

    Args:
        width: Of a row.
        eps: Added to the mean square.
        how: How its weights are applied, see `ModelConfig.norm_scale`.
        lead: Leading axes.
        dtype: Of its weights.
    """

    def __init__(
        self, width: int, *, eps: float, how: NormScale, lead: tuple[int, ...], dtype: jnp.dtype
    ) -> None:
        self.scale = nnx.Param(jnp.ones((*lead, width), dtype))
        self.eps = eps
        self.how: NormScale = how
        self.width = width

    def __call__(self, x: Float[Array, "T M"]) -> Float[Array, "T M"]:
        """The normed rows, in the dtype they came in."""
        wide = x.astype(jnp.float32)
        if wide.shape[1] < _NARROW:
            ones = jnp.ones((wide.shape[1], 1), jnp.float32)
            mean_square = jnp.matmul(wide * wide, ones, precision="highest") / wide.shape[1]
        else:
            mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps)
        if self.how == "rounded":
            return normed.astype(x.dtype) * self.scale[...][None, :]
        scale = self.scale[...].astype(jnp.float32)
        scale = scale + 1.0 if self.how == "one_plus" else scale
        return (normed * scale[None, :]).astype(x.dtype)


class Rotary(NamedTuple):
    """Cosine and sine of the rotation angles of each token, float32; once if all layers rotate
    alike, else of each kind of layer."""

    cos: Float[Array, "*K T D2"]
    sin: Float[Array, "*K T D2"]
    kinds: Int[Array, " L"] | None
    """Of every layer, which kind it is; None if all are alike."""

    def of(self, layer: int | Int[Array, ""]) -> tuple[Float[Array, "T D2"], Float[Array, "T D2"]]:
        """The tables of a layer."""
        if self.kinds is None:
            return self.cos, self.sin
        kind = self.kinds[layer]
        return self.cos[kind], self.sin[kind]


def rotary_tables(positions: Int[AnyArray, " T"], config: ModelConfig) -> Rotary:
    """The rotation angles of each position (RoPE, arXiv:2104.09864)."""
    ropes, of_layers = rope.kinds(config)
    tables = [_tables(positions, one) for one in ropes]
    if len(tables) == 1:
        return Rotary(*tables[0], kinds=None)
    cos, sin = (jnp.stack(parts) for parts in zip(*tables, strict=True))
    return Rotary(cos, sin, kinds=jnp.asarray(of_layers, jnp.int32))


def _tables(
    positions: Int[AnyArray, " T"], one: rope.Rope
) -> tuple[Float[Array, "T D2"], Float[Array, "T D2"]]:
    frequencies = jnp.asarray(one.frequencies)
    angles = jnp.asarray(positions, jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if one.scale == 1.0 else (cos * one.scale, sin * one.scale)


def rotate(
    x: Float[Array, "T X D"], tables: tuple[Float[Array, "T R2"], Float[Array, "T R2"]]
) -> Float[Array, "T X D"]:
    """`x` rotated by position, the first half of a head paired with the second; where the tables
    are narrower than that, the beginning of each head is rotated and the rest kept."""
    width = 2 * tables[0].shape[-1]
    if width < x.shape[-1]:
        rotated = rotate(x[..., :width], tables)
        return jnp.concatenate([rotated, x[..., width:]], axis=-1)
    cos, sin = (table[:, None, :].astype(x.dtype) for table in tables)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def activated(x: Float[Array, "T I"], activation: Activation) -> Float[Array, "T I"]:
    """`x` through an activation."""
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=True)


def scaled(x: Float[Array, "T M"], factor: float) -> Float[Array, "T M"]:
    """`x` times a number that is not rounded to its dtype."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def capped(x: Float[Array, "T M"], cap: float | None) -> Float[Array, "T M"]:
    """`cap * tanh(x / cap)`; `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
