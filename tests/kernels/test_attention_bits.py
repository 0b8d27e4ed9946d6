"""A query's attention has the same bits wherever, and beside whatever, it is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import KV_DTYPES, prefill_tiles, stored

import pallas_kernels
from pallas_kernels import NO_WINDOW

LENGTH = 320
HEADS, KV_HEADS, WIDTH = 6, 2, 64
KINDS = [("llvm", "float32"), ("xla", "float32"), ("xla", "bfloat16")]
"""Implementations and what their queries are."""

decode = functools.partial(
    jax.jit(pallas_kernels.decode_attention, static_argnames=("scale", "implementation")),
    layer=jnp.int32(0),
    scale=0.125,
)
prefill = functools.partial(
    jax.jit(pallas_kernels.prefill_attention, static_argnames=("scale", "implementation")),
    layer=jnp.int32(0),
    scale=0.125,
)


def int32(values):
    return jnp.asarray(values, jnp.int32)


@functools.cache
def sequences():
    """Queries, keys and values of two sequences, float32."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, LENGTH, HEADS, WIDTH)).astype(np.float32)
    k, v = (rng.standard_normal((2, LENGTH, KV_HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    return q, k, v


def paged(kv_dtype, block_size: int, *, seed: int = 0, ends=(LENGTH, LENGTH)):
    """K, V and block tables that hold the two sequences up to `ends`, and NaN elsewhere."""
    width = -(-LENGTH // block_size)
    tables = np.random.default_rng(seed).permutation(2 * width + 1)[: 2 * width]
    tables = tables.reshape(2, width)
    paged_rows = []
    for rows in sequences()[1:]:
        flat = np.full((2, width * block_size, *rows.shape[2:]), np.nan, np.float32)
        for lane, end in enumerate(ends):
            flat[lane, :end] = rows[lane, :end]
        pool = np.full((2 * width + 1, block_size, *rows.shape[2:]), np.nan, np.float32)
        pool[tables.reshape(-1)] = flat.reshape(-1, block_size, *rows.shape[2:])
        paged_rows.append(stored(pool[None], kv_dtype))
    return *paged_rows, int32(tables)


def decoded(implementation, q, lanes, lens, where, *, window: int = NO_WINDOW):
    """Bits of the queries' decode attention, padded to a multiple of 64."""
    k, v, tables = where
    num_queries = len(lanes)
    padding = -num_queries % 64
    result = decode(
        jnp.asarray(np.pad(q, ((0, padding), (0, 0), (0, 0)))),
        k,
        v,
        block_tables=tables,
        token_lanes=int32(np.pad(lanes, (0, padding))),
        context_lens=int32(np.pad(lens, (0, padding), constant_values=1)),
        num_queries=jnp.int32(num_queries),
        window=jnp.int32(window),
        implementation=implementation,
    )
    return bits(result)[:num_queries]


def prefilled(
    implementation, dtype: str, cuts, where, *, num_tokens: int = LENGTH, window: int = NO_WINDOW
):
    """Bits of lane 0's prefill, one call for each chunk between the cuts."""
    k, v, tables = where
    q = sequences()[0][0]
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        # Each chunk lies at another place of the token axis.
        at = min(start % 7, num_tokens - (stop - start))
        axis = np.zeros((num_tokens, HEADS, WIDTH), np.float32)
        axis[at : at + stop - start] = q[start:stop]
        result = prefill(
            jnp.asarray(axis, dtype),
            k,
            v,
            block_tables=tables,
            tiles=prefill_tiles([0], [at], [stop - start], [start]),
            window=jnp.int32(window),
            implementation=implementation,
        )
        parts.append(bits(result)[at : at + stop - start])
    return np.concatenate(parts)


def bits(result):
    return np.asarray(result).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize(
    ("implementation", "kv_dtype", "dtype", "block_sizes"),
    [
        ("llvm", "float32", "float32", (1, 5, 64, 200)),
        ("xla", "float32", "float32", (1, 5, 64, 200)),
        ("xla", "float32", "bfloat16", (5,)),
    ]
    + [("xla", kv_dtype, "float32", (5,)) for kv_dtype in KV_DTYPES[1:]],
)
def test_block_size_and_place_in_the_pool_change_no_bit(
    implementation, kv_dtype, dtype: str, block_sizes: tuple[int, ...]
) -> None:
    q = sequences()[0].reshape(-1, HEADS, WIDTH).astype(jnp.dtype(dtype))
    lanes = np.repeat([0, 1], LENGTH)
    lens = np.tile(np.arange(1, LENGTH + 1), 2)
    first = paged(kv_dtype, 16)
    one_each = decoded(implementation, q, lanes, lens, first)
    together = prefilled(implementation, dtype, [100], first)
    for block_size in block_sizes:
        where = paged(kv_dtype, block_size, seed=block_size)
        np.testing.assert_array_equal(decoded(implementation, q, lanes, lens, where), one_each)
        np.testing.assert_array_equal(prefilled(implementation, dtype, [100], where), together)


@pytest.mark.parametrize(("implementation", "dtype"), KINDS)
@pytest.mark.parametrize("window", [50, NO_WINDOW])
def test_chunks_change_no_bit(implementation, dtype: str, window: int) -> None:
    where = paged("float32", 16)
    whole = prefilled(implementation, dtype, [], where, window=window)
    for cuts in ([1], [64, 128], [63, 127, 200], [5, 6, 7, 100, 319], range(23, 320, 23)):
        np.testing.assert_array_equal(
            prefilled(implementation, dtype, cuts, where, window=window), whole
        )
    short = [64, 128, 192, 256]
    for num_tokens in (64, 128, 192):
        parts = prefilled(implementation, dtype, short, where, num_tokens=num_tokens, window=window)
        np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize(("implementation", "dtype"), KINDS)
def test_tokens_that_are_not_written_yet_change_no_bit(implementation, dtype: str) -> None:
    whole = prefilled(implementation, dtype, [], paged("float32", 16))
    q = jnp.asarray(sequences()[0][0], dtype)
    for stop in (1, 17, 64, 129):
        k, v, tables = paged("float32", 16, ends=(stop, 0))
        result = prefill(
            q,
            k,
            v,
            block_tables=tables,
            tiles=prefill_tiles([0], [0], [stop], [0]),
            window=jnp.int32(NO_WINDOW),
            implementation=implementation,
        )
        np.testing.assert_array_equal(bits(result)[:stop], whole[:stop])


@pytest.mark.parametrize(("implementation", "dtype"), KINDS)
@pytest.mark.parametrize("window", [50, NO_WINDOW])
def test_neighbours_change_no_bit(implementation, dtype: str, window: int) -> None:
    q = sequences()[0].reshape(-1, HEADS, WIDTH).astype(jnp.dtype(dtype))
    where = paged("float32", 16)
    rng = np.random.default_rng(3)
    lanes, lens = rng.integers(0, 2, 120), rng.integers(1, LENGTH + 1, 120)
    rows = lanes * LENGTH + lens - 1
    beside = decoded(implementation, q[rows], lanes, lens, where, window=window)
    order = rng.permutation(120)
    shuffled = decoded(
        implementation, q[rows[order]], lanes[order], lens[order], where, window=window
    )
    np.testing.assert_array_equal(shuffled, beside[order])
    for index in (0, 1, 2, 3):
        one = slice(index, index + 1)
        alone = decoded(implementation, q[rows[one]], lanes[one], lens[one], where, window=window)
        np.testing.assert_array_equal(alone, beside[one])


@pytest.mark.parametrize("implementation", ["llvm", "xla"])
def test_other_segments_of_a_prefill_change_no_bit(implementation) -> None:
    q = sequences()[0]
    where = paged("float32", 16)
    whole = prefilled(implementation, "float32", [], where)
    result = prefill(
        jnp.asarray(np.concatenate([q[1, 50:120], q[0, 30:200], q[1, 120:200]])),
        where[0],
        where[1],
        block_tables=where[2],
        tiles=prefill_tiles([1, 0, 1], [0, 70, 240], [70, 170, 80], [50, 30, 120]),
        window=jnp.int32(NO_WINDOW),
        implementation=implementation,
    )
    np.testing.assert_array_equal(bits(result)[70:240], whole[30:200])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("implementation", ["llvm", "xla"])
def test_a_value_that_is_not_finite_reaches_only_the_queries_that_see_it(
    bad: float, implementation
) -> None:
    k, v, tables = paged("float32", 16)
    whole = prefilled(implementation, "float32", [], (k, v, tables))
    at = 70
    place = (0, int(tables[0, at // 16]), at % 16, 1, 3)
    broken = v._replace(values=v.values.at[place].set(bad))
    result = prefilled(implementation, "float32", [], (k, broken, tables), window=200).view(
        np.float32
    )
    group = slice(HEADS // KV_HEADS, HEADS)
    np.testing.assert_array_equal(result[:at].view(np.uint32), whole[:at])
    assert not np.isfinite(result[at : at + 200, group]).all(axis=-1).any()
    assert np.isfinite(result[at + 200 :]).all()
    assert np.isfinite(result[:, : HEADS // KV_HEADS]).all()
