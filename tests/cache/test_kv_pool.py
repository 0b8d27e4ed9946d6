"""The pool's arrays: what a write touches, blocks with their scales, and nothing copied whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import KV_DTYPES, prefill_tiles

import pallas_kernels
from jaxpaged.cache import kv_pool
from jaxpaged.cache.kv_pool import KVPool
from pallas_kernels import kv_format

LAYERS, BLOCKS, SLOTS, HEADS, WIDTH = 3, 6, 4, 2, 16


def filled_pool(kv_dtype, *, num_blocks: int = BLOCKS) -> KVPool:
    """Random rows in every slot, of K and V and each layer different."""
    shape = (LAYERS, num_blocks, SLOTS, HEADS, WIDTH)
    pool = kv_pool.allocate(shape, kv_dtype, as_bits=True)
    slots = jnp.arange(num_blocks * SLOTS, dtype=jnp.int32)
    rng = np.random.default_rng(0)
    for layer in range(LAYERS):
        k, v = (
            jnp.asarray(rng.standard_normal((len(slots), HEADS, WIDTH)), jnp.float32)
            for _ in range(2)
        )
        pool = kv_pool.write(pool, jnp.int32(layer), slots, k, v)
    return pool


def contents(pool: KVPool) -> np.ndarray:
    """What attention would read, `[2, L, N, S, K, D]`."""
    return np.stack([kv_format.decode(*rows) for rows in jax.tree.map(jnp.asarray, pool)])


def ids(*values: int):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_write_touches_its_slots_and_no_other(kv_dtype) -> None:
    pool = filled_pool(kv_dtype)
    before = contents(pool)
    k = jnp.full((4, HEADS, WIDTH), 3.0)
    slots = ids(6, BLOCKS * SLOTS, 9, BLOCKS * SLOTS + 5)
    pool = kv_pool.write(pool, jnp.int32(1), slots, k, -2 * k)
    after = contents(pool)
    expected = before.reshape(2, LAYERS, BLOCKS * SLOTS, HEADS, WIDTH).copy()
    expected[0, 1, [6, 9]] = 3.0
    expected[1, 1, [6, 9]] = -6.0
    np.testing.assert_allclose(after, expected.reshape(before.shape), rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copied_blocks_have_their_scales(kv_dtype) -> None:
    pool = filled_pool(kv_dtype)
    before = contents(pool)
    # A chain, and padding: every source is read before any target is written.
    pool = kv_pool.copy_blocks(pool, ids(0, 2, 0, 1), ids(2, 4, BLOCKS, BLOCKS + 7))
    expected = before.copy()
    expected[:, :, 2] = before[:, :, 0]
    expected[:, :, 4] = before[:, :, 2]
    np.testing.assert_array_equal(contents(pool), expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_come_back_from_host_memory_with_their_scales(kv_dtype) -> None:
    pool = filled_pool(kv_dtype)
    before = contents(pool)
    blocks = jax.device_get(kv_pool.read_blocks(pool, ids(3, 1, 5)))
    np.testing.assert_array_equal(contents(blocks), before[:, :, [3, 1, 5]])
    other = kv_pool.allocate((LAYERS, BLOCKS, SLOTS, HEADS, WIDTH), kv_dtype, as_bits=True)
    other = kv_pool.write_blocks(other, ids(0, BLOCKS, 2), jax.device_put(blocks))
    expected = np.zeros_like(before)
    expected[:, :, 0], expected[:, :, 2] = before[:, :, 3], before[:, :, 5]
    np.testing.assert_array_equal(contents(other), expected)


def test_rows_that_fill_no_words_are_refused() -> None:
    with pytest.raises(ValueError, match="the head width 20"):
        kv_pool.allocate((1, 1, 1, 1, 20), "int4", as_bits=True)


def step(pool: KVPool, q, rows, slots, tables, window, tiles):
    """What the layers of a model do to the pool."""

    def layer_body(carry, _):
        pool, q, layer = carry
        pool = kv_pool.write(pool, layer, slots, rows, 2 * rows)
        shared = {"layer": layer, "block_tables": tables, "window": window, "scale": 0.1}
        decoded = pallas_kernels.decode_attention(
            q,
            pool.k,
            pool.v,
            token_lanes=slots,
            context_lens=slots,
            num_queries=window,
            **shared,
        )
        prefilled = pallas_kernels.prefill_attention(q, pool.k, pool.v, tiles=tiles, **shared)
        return (pool, q + decoded + prefilled, layer + 1), None

    (pool, q, _), _ = jax.lax.scan(layer_body, (pool, q, jnp.int32(0)), None, length=LAYERS)
    return q, pool


def memory(function, *args):
    """The pool's bytes, those shared by the donated pool and the result, and those beside."""
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile().memory_analysis()
    pool_bytes = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    return pool_bytes, compiled.alias_size_in_bytes, compiled.temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_step_neither_copies_nor_converts_the_pool(kv_dtype, dtype: str) -> None:
    # XLA on CPU would move a conversion of gathered rows in front of the gather, out of the loops.
    pool = kv_pool.allocate((LAYERS, 16_384, SLOTS, HEADS, WIDTH), kv_dtype, as_bits=True)
    slots, tables = jnp.zeros(64, jnp.int32), jnp.zeros((8, 32), jnp.int32)
    q, rows = jnp.zeros((64, 4, WIDTH), dtype), jnp.zeros((64, HEADS, WIDTH), dtype)
    tiles = prefill_tiles([0], [0], [1], [0])
    pool_bytes, aliased, temporary = memory(step, pool, q, rows, slots, tables, jnp.int32(5), tiles)
    assert aliased == pool_bytes
    assert temporary < pool_bytes / 8


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_moved_blocks_take_no_more_than_themselves(kv_dtype) -> None:
    pool = kv_pool.allocate((LAYERS, 4096, SLOTS, HEADS, WIDTH), kv_dtype, as_bits=True)
    some = jnp.zeros(8, jnp.int32)
    blocks = kv_pool.read_blocks(pool, some)
    block_bytes = sum(x.nbytes for x in jax.tree.leaves(blocks))
    for function, args in (
        (kv_pool.copy_blocks, (pool, some, some)),
        (kv_pool.write_blocks, (pool, some, blocks)),
    ):
        pool_bytes, aliased, temporary = memory(function, *args)
        assert aliased == pool_bytes
        assert temporary < 2 * block_bytes + 1024
