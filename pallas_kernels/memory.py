"""Arrays on a CPU that take memory only where they are written."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def untouched(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An array of anything. XLA's own would be written once, and so take all of its memory."""
    # Needs numba, which is an extra.
    from pallas_kernels.llvm import nothing

    return jax.jit(lambda: nothing.leave(shape, dtype))()
