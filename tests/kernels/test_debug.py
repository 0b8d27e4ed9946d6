"""Block ids out of the pool are named where JAX's checks are on, and only then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import AttentionShape, pools, prefill_tiles, queries

import pallas_kernels
from pallas_kernels import NO_WINDOW

SHAPE = AttentionShape(
    num_heads=2, num_kv_heads=1, head_dim=8, block_size=4, context_lens=(9, 30, 3)
)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def attend(kind: str, entry: tuple[int, int], block: int, window: int = NO_WINDOW):
    """Attention of each lane's last token with one entry of the block tables replaced."""
    k, v, tables = pools(SHAPE)
    shared = {
        "layer": jnp.int32(0),
        "block_tables": tables.at[entry].set(block),
        "window": jnp.int32(window),
        "scale": 1.0,
    }
    lanes, positions = [0, 1, 2], [length - 1 for length in SHAPE.context_lens]
    if kind == "decode":
        shared |= {
            "token_lanes": int32([*lanes, 1]),
            "context_lens": int32([*SHAPE.context_lens, 30]),
            "num_queries": jnp.int32(3),
        }
        run = jax.jit(lambda q: pallas_kernels.decode_attention(q, k, v, **shared))
    else:
        tiles = prefill_tiles(lanes, [0, 1, 2], [1, 1, 1], positions)
        run = jax.jit(lambda q: pallas_kernels.prefill_attention(q, k, v, tiles=tiles, **shared))
    result = run(queries(SHAPE, 4)).block_until_ready()
    jax.effects_barrier()
    return np.asarray(result[:3])


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("block", [-1, 10**6])
def test_an_id_out_of_the_pool_is_named(kind: str, block: int) -> None:
    message = rf"entry 2 of lane 1's block table is {block}, and keys of it are read; expected 0 to"
    with jax.enable_checks(True), pytest.raises(jax.errors.JaxRuntimeError, match=message):
        attend(kind, (1, 2), block)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_entries_that_are_not_read_may_hold_anything(kind: str) -> None:
    with jax.enable_checks(True):
        assert np.isfinite(attend(kind, (0, 3), -1)).all()
        assert np.isfinite(attend(kind, (2, 1), 10**6)).all()
        assert np.isfinite(attend(kind, (1, 0), -1, window=20)).all()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_otherwise_another_block_is_read_and_nobody_says_so(kind: str) -> None:
    # The id is clipped to the last block, which is NaN.
    is_finite = np.isfinite(attend(kind, (1, 2), 10**6)).all(axis=(1, 2))
    assert list(is_finite) == [True, False, True]
