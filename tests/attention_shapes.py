"""Named shapes of paged attention, shared by tests and benchmarks, and arrays to go with them."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import NO_WINDOW, KVDType, KVRows, PrefillTiles, kv_format
from pallas_kernels.xla import TILE_QUERIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one case; `context_lens` are per lane, `dtype` is that of the queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    context_lens: tuple[int, ...]
    dtype: str = "float32"


SHAPES = {
    "smollm2_9_3": AttentionShape(
        num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, context_lens=(1, 15, 16, 17, 200)
    ),
    "llama_32_8": AttentionShape(
        num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, context_lens=(1, 31, 32, 33)
    ),
    "no_groups": AttentionShape(
        num_heads=4, num_kv_heads=4, head_dim=8, block_size=4, context_lens=(3, 4, 5, 127, 128, 129)
    ),
    "one_kv_head_odd_block": AttentionShape(
        num_heads=5, num_kv_heads=1, head_dim=16, block_size=5, context_lens=(64, 65, 1, 60) * 3
    ),
    "block_of_one": AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=1, context_lens=(1, 2, 70)
    ),
    "block_above_tile": AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=256, context_lens=(255, 256, 257)
    ),
    "bfloat16": AttentionShape(
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        block_size=16,
        context_lens=(1, 16, 90),
        dtype="bfloat16",
    ),
}


def hopper_shape(
    heads: tuple[int, int], head_dim: int, block_size: int, *context_lens: int
) -> AttentionShape:
    """A shape that the Hopper kernel serves; heads are query heads and key/value heads."""
    return AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        context_lens=context_lens,
        dtype="bfloat16",
    )


# Contexts end at the edges of blocks, tiles of 64 and partitions of 256, and are longer than the
# ring of 2 or 4 tiles; windows start in the middle of blocks, tiles and partitions.
HOPPER_SHAPES = {
    "edges_of_blocks": (hopper_shape((9, 3), 64, 16, 1, 15, 16, 17, 65), NO_WINDOW),
    "edges_of_partitions": (hopper_shape((2, 1), 64, 32, 255, 256, 257), NO_WINDOW),
    "ring_is_used_again": (hopper_shape((4, 1), 128, 16, 63, 64, 250), NO_WINDOW),
    "many_heads": (hopper_shape((32, 8), 128, 64, 33), NO_WINDOW),
    "large_group": (hopper_shape((32, 1), 128, 64, 130), NO_WINDOW),
    "window_of_one": (hopper_shape((3, 1), 64, 64, 1, 65), 1),
    "window_starts_in_a_block": (hopper_shape((2, 1), 128, 16, 10, 300, 530), 273),
    "window_starts_in_a_tile": (hopper_shape((9, 1), 64, 32, 64, 200), 65),
}
"""Shapes of the Hopper kernel, each with a window."""

KV_DTYPES: tuple[KVDType, ...] = ("float32", "bfloat16", "float16", "fp8", "int8", "int4")

TOLERANCE = {
    ("xla", "float32"): 1e-5,
    ("llvm", "float32"): 1e-5,
    ("xla", "bfloat16"): 8e-3,
    ("triton_interpreted", "float32"): 1e-5,
    ("triton_interpreted", "bfloat16"): 2e-2,
}
"""Largest absolute error against the reference for inputs of unit variance.

float32: scores reach 15 here, so their own rounding (1e-6) is relative to each weight. bfloat16:
one rounding of the result, half a unit in the last of 8 bits; the kernels round the weights too.
"""


def stored(x: np.ndarray, kv_dtype: KVDType, *, as_bits: bool = True) -> KVRows:
    """The rows of `x`, `[L, N, S, K, D]`, in the format."""
    dtype, _, has_scales = kv_format.storage(kv_dtype, x.shape[-1], as_bits=as_bits)
    like = KVRows(
        jnp.zeros((1, 1, 1, 1, 1), dtype), jnp.zeros((1, 1, 1, 1)) if has_scales else None
    )
    rows = kv_format.encode(jnp.asarray(x.reshape(-1, *x.shape[3:]), jnp.float32), like)
    values, scales = rows
    return KVRows(
        values.reshape(*x.shape[:4], -1), None if scales is None else scales.reshape(x.shape[:4])
    )


def pools(
    shape: AttentionShape,
    kv_dtype: KVDType = "float32",
    *,
    first_live: tuple[int, ...] | None = None,
    as_bits: bool = True,
):
    """K and V, NaN wherever no lane's context lies, and the block tables.

    Table entries without context point at a block of NaN.

    Args:
        shape: The sizes.
        kv_dtype: How K and V are stored.
        first_live: First position of each lane that may be read, 0 without.
        as_bits: Whether floats are stored as their bits.

    Returns:
        k, v, block_tables (shuffled, each lane its own blocks).
    """
    rng = np.random.default_rng(0)
    size = shape.block_size
    first_live = first_live or (0,) * len(shape.context_lens)
    needed = [-(-n // size) for n in shape.context_lens]
    width = max(needed) + 1
    # The first and the last block stay unused, so that a clipped or wrapped id reads poison.
    num_blocks = sum(needed) + 3
    free = iter(rng.permutation(np.arange(1, num_blocks - 1)))
    tables = np.full((len(needed), width), num_blocks - 1, np.int32)
    live = np.zeros((num_blocks, size), bool)
    for lane, count in enumerate(needed):
        tables[lane, :count] = [next(free) for _ in range(count)]
        positions = np.arange(first_live[lane], shape.context_lens[lane])
        live[tables[lane, positions // size], positions % size] = True
        tables[lane, : first_live[lane] // size] = num_blocks - 1
    full = (2, num_blocks, size, shape.num_kv_heads, shape.head_dim)
    k, v = (rng.standard_normal(full).astype(np.float32) for _ in range(2))
    for pool in (k, v):
        pool[:, ~live] = np.nan
    k, v = (stored(x, kv_dtype, as_bits=as_bits) for x in (k, v))
    return k, v, jnp.asarray(tables)


def queries(shape: AttentionShape, num_tokens: int):
    """Unit-variance queries, `[num_tokens, H, D]`."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim))
    return jnp.asarray(q, jnp.dtype(shape.dtype))


def prefill_tiles(
    lanes: list[int], starts: list[int], lens: list[int], positions: list[int]
) -> PrefillTiles:
    """Tiles of the segments, one after the other, and unused ones up to a multiple of 16."""
    rows = [
        (lane, start + at, min(TILE_QUERIES, length - at), position + at)
        for lane, start, length, position in zip(lanes, starts, lens, positions, strict=True)
        for at in range(0, length, TILE_QUERIES)
    ]
    used = jnp.asarray(len(rows), jnp.int32)
    rows += [(0, 0, 0, 0)] * (-len(rows) % 16)
    columns = [jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)]
    return PrefillTiles(*columns, used)
