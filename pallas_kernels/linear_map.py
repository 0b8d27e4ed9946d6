"""Linear maps for CPUs: of the live rows only, by weights in the order they are read.

XLA's products on a CPU take all rows of the padded step and, in a loop over layers, copy each
layer's weights before they read them. The kernels are in `llvm/linear_map.py` and need numba, which
is an extra: they are imported when they are called.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.weight_format import Quantized, WeightDType, num_groups

AnyArray = Array | np.ndarray


class QuantizedPanels(NamedTuple):
    """Matrices of `weight_format` in panels; each part as `pack` gives it."""

    values: Int[AnyArray, "*L P I X"]
    """int8: the numbers. int4: the first half of a row's columns in the low bits, the second in
    the high ones."""
    scales: Float[AnyArray, "*L P N C"]
    minimums: Float[AnyArray, "*L P N C"] | None


def pack(kernel: Num[AnyArray, "*L I O"]) -> Num[AnyArray, "*L P I C"]:
    """Matrices in panels: all rows of the first `C` columns, then of the next; zeros at the end.

    How wide a panel is depends on the machine.
    """
    from pallas_kernels.llvm.vectors import PANEL

    padding = [(0, 0)] * (kernel.ndim - 1) + [(0, -kernel.shape[-1] % PANEL)]
    numpy = jnp if isinstance(kernel, Array) else np
    panels = numpy.pad(kernel, padding).reshape(*kernel.shape[:-1], -1, PANEL)
    return numpy.swapaxes(panels, -3, -2)


def pack_quantized(quantized: Quantized) -> QuantizedPanels:
    """Matrices of few bits in panels."""
    numbers, scales, minimums = quantized
    values = pack(numbers)
    if minimums is None:
        return QuantizedPanels(values, pack(scales), None)
    half = values.shape[-1] // 2
    values = values[..., :half] | values[..., half:] << 4
    return QuantizedPanels(values, pack(scales), pack(minimums))


def zero_panels(
    lead: tuple[int, ...], in_width: int, out_width: int, weight_dtype: WeightDType
) -> QuantizedPanels:
    """Panels of matrices of few bits that are zero, with these axes in front."""
    shape = (*lead, in_width, out_width)
    groups = (*lead, num_groups(in_width, weight_dtype), out_width)
    if weight_dtype == "int8":
        quantized = Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(groups, jnp.float32), None)
    else:
        factors = jnp.zeros(groups, jnp.bfloat16)
        quantized = Quantized(jnp.zeros(shape, jnp.uint8), factors, factors)
    return pack_quantized(quantized)


def linear(
    x: Float[Array, "T I"],
    panels: Float[Array, "L P I C"],
    *,
    layer: Int[AnyArray, ""],
    num_rows: Int[AnyArray, ""],
    width: int,
    added: Float[Array, "T O"] | None = None,
) -> Float[Array, "T O"]:
    """`x` times the matrix of a layer, and what is added; the same as `linear_ref`.

    A row's bits depend on that row and the matrix only.

    Args:
        x: Float32.
        panels: The matrices of all layers, as `pack` gives them.
        layer: Which of them.
        num_rows: Rows that are computed; those behind them are zero.
        width: Columns of the matrix, `O`.
        added: Added to the rows that are computed.
    """
    from pallas_kernels.llvm import linear_map as kernels

    return kernels.linear(x, panels, layer=layer, num_rows=num_rows, width=width, added=added)


def quantized_linear(
    x: Float[Array, "T I"],
    panels: QuantizedPanels,
    *,
    layer: Int[AnyArray, ""],
    num_rows: Int[AnyArray, ""],
    width: int,
    added: Float[Array, "T O"] | None = None,
) -> Float[Array, "T O"]:
    """As `linear`, to its bits, for matrices of few bits: of what they are read as.

    No matrix is written out.
    """
    from pallas_kernels.llvm import quantized_linear as kernels

    return kernels.linear(x, panels, layer=layer, num_rows=num_rows, width=width, added=added)


def head(
    x: Float[Array, "R M"], table: Float[Array, "V M"], *, num_rows: Int[AnyArray, ""]
) -> Float[Array, "R V"]:
    """`x @ table.T` for the first `num_rows` rows, the others zero; the same as `head_ref`.

    A row's bits depend on that row and the table only.
    """
    from pallas_kernels.llvm import linear_map as kernels

    return kernels.head(x, table, num_rows=num_rows)


def linear_ref(
    x: Float[Array, "T I"],
    kernel: Float[Array, "L I O"],
    *,
    layer: int,
    num_rows: int,
    added: Float[Array, "T O"] | None = None,
) -> Float[Array, "T O"]:
    """What `linear` is, of the matrices as they were before `pack`."""
    y = x @ kernel[layer] + (0 if added is None else added)
    return jnp.where(jnp.arange(x.shape[0])[:, None] < num_rows, y, 0)


def head_ref(
    x: Float[Array, "R M"], table: Float[Array, "V M"], *, num_rows: int
) -> Float[Array, "R V"]:
    """What `head` is."""
    return jnp.where(jnp.arange(x.shape[0])[:, None] < num_rows, x @ table.T, 0)
