"""How fast the device's memory is: what every other speed is held against."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

REPEATS = 7
MOST_BYTES = 2**31
"""Of the array that is copied: so large that starting the copy takes no noticeable time."""


def seconds_of(call: Callable[[], jax.Array], repeats: int = REPEATS) -> float:
    """The median time of a call, the first one left out."""
    call().block_until_ready()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call().block_until_ready()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def measure(most_bytes: int = MOST_BYTES) -> float:
    """Bytes read and written per second by `x + 1` on a large float32 array."""
    x = jnp.zeros(most_bytes // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1).lower(x).compile()
    return 2 * x.nbytes / seconds_of(lambda: add(x))
