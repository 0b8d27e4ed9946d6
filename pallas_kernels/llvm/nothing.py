"""A call that writes nothing, for arrays whose content does not matter yet."""

from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.llvm import ffi


def leave(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """An array as XLA gets its memory from the system."""
    return ffi.ffi_call("jaxpaged.nothing", jax.ShapeDtypeStruct(shape, dtype))


@no_type_check
def _none(frame):
    return 0


@no_type_check
def _work(frame, item, scratch):
    return


ffi.register("jaxpaged.nothing", count=_none, work=_work)
