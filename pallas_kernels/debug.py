"""Whether block tables lead into the pool, looked at while a program runs.

No kernel and no interpreter says so: an id out of range reads another block, or ends in an illegal
access. With JAX's own checks on (`JAX_ENABLE_CHECKS=1`) the public functions look, too. A GPU does
not wait for that, and may end the program by itself first: then run the same on a CPU. On a GPU the
look needs the CPU beside it (`JAX_PLATFORMS=cuda,cpu`).
"""

import functools

import jax
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.kv_format import KVRows

AnyArray = Array | np.ndarray


def check_block_ids(
    block_tables: Int[AnyArray, "B W"],
    lanes: Int[AnyArray, " R"],
    starts: Int[AnyArray, " R"],
    ends: Int[AnyArray, " R"],
    *,
    pool: KVRows,
) -> None:
    """Ends the running program if an id that is to be read is none of the pool's.

    Does nothing, and adds nothing to a program, unless JAX's checks are on.

    Args:
        block_tables: Pool block of each logical block, per lane.
        lanes: Row of the block tables that each reader has.
        starts: First position that it reads.
        ends: The position behind its last one; none is read where this is not above `starts`.
        pool: Keys or values of all blocks.

    Raises:
        ValueError: From the callback, so under `jit` as an error of the program; names lane, entry
            and id.
    """
    if jax.config.jax_enable_checks:  # type: ignore[attr-defined]
        _, num_blocks, block_size, *_ = pool.values.shape
        look = functools.partial(_look, num_blocks=num_blocks, block_size=block_size)
        jax.debug.callback(look, block_tables, lanes, starts, ends)


def _look(
    block_tables: AnyArray,
    lanes: AnyArray,
    starts: AnyArray,
    ends: AnyArray,
    *,
    num_blocks: int,
    block_size: int,
) -> None:
    tables, lanes, starts, ends = map(np.asarray, (block_tables, lanes, starts, ends))
    first = np.arange(tables.shape[1]) * block_size
    is_read = (first < ends[:, None]) & (first + block_size > starts[:, None])
    is_read &= (starts < ends)[:, None]
    reach = tables.shape[1] * block_size
    if ends.max(initial=0) > reach:
        reader = ends.argmax()
        raise ValueError(
            f"keys of lane {lanes[reader]} up to position {ends[reader]} are read, and its block "
            f"table ends at {reach}"
        )
    ids = tables[lanes]
    wrong = np.argwhere(is_read & ((ids < 0) | (ids >= num_blocks)))
    if len(wrong):
        reader, entry = wrong[0]
        raise ValueError(
            f"entry {entry} of lane {lanes[reader]}'s block table is {ids[reader, entry]}, and "
            f"keys of it are read; expected 0 to {num_blocks - 1}"
        )
