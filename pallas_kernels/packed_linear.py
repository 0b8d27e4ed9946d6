"""Linear maps by packed weights on any device: by XLA, or by a kernel for NVIDIA GPUs."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import triton_linear, weight_format
from pallas_kernels.api import Implementation
from pallas_kernels.weight_format import PackedMatrix


def packed_linear(
    x: Float[Array, "T I"], packed: PackedMatrix, *, implementation: Implementation = "xla"
) -> Float[Array, "T O"]:
    """`x` times the matrix, in the dtype of `x`; the same as `packed_linear_ref`.

    Args:
        x: Rows.
        packed: One matrix, as `weight_format.pack` gives it.
        implementation: Who computes attention beside it: with Mosaic GPU's attention goes Triton's
            linear map. The kernels for CPUs have `quantized_linear`.
    """
    match implementation:
        case "xla":
            return _xla(x, packed)
        case "triton" | "mosaic":
            return triton_linear.packed_linear(x, packed)
        case "triton_interpreted" | "mosaic_interpreted":
            return triton_linear.packed_linear(x, packed, interpret=True)
        case _:
            raise ValueError(f"{implementation} has no linear map by packed weights")


def _xla(x: Float[Array, "T I"], packed: PackedMatrix) -> Float[Array, "T O"]:
    """Whether the matrix is written out whole for a moment is XLA's choice; on a CPU it is."""
    if packed.minimums is None:
        # The scale of a column comes behind the sum: numbers of 8 bits are exact in any float.
        numbers = packed.values.astype(x.dtype)
        sums = jnp.matmul(x, numbers, preferred_element_type=jnp.float32)
        return (sums * packed.scales).astype(x.dtype)
    quantized = weight_format.unpack(packed, x.shape[1])
    return jnp.matmul(x, weight_format.dequantize(quantized).astype(x.dtype))
