"""Every implementation of paged attention against the reference, on the named shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import SHAPES, TOLERANCE, pools, prefill_tiles, queries

import pallas_kernels
from pallas_kernels import paged_attention_ref

LAYER = 1


def dense_attention(q, k, v, scale):
    """Causal attention of the last `len(q)` tokens of one sequence in float64 NumPy."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,chd->hqc", q.astype(np.float64), k) * scale
    past = k.shape[0] - q.shape[0]
    seen = np.arange(k.shape[0])[None, :] <= np.arange(q.shape[0])[:, None] + past
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqc,chd->qhd", weights, v)


def reference(q, k, v, tables, lanes, lens, scale):
    return paged_attention_ref(
        q,
        k,
        v,
        layer=LAYER,
        block_tables=tables,
        token_lanes=jnp.asarray(lanes, jnp.int32),
        context_lens=jnp.asarray(lens, jnp.int32),
        scale=scale,
    )


def test_reference_equals_dense_attention_in_float64() -> None:
    shape = SHAPES["smollm2_9_3"]
    k, v, tables = pools(shape)
    length, num_queries = shape.context_lens[-1], 7
    lane = len(shape.context_lens) - 1
    q = queries(shape, num_queries)
    lens = np.arange(length - num_queries + 1, length + 1)
    k_lane, v_lane = (
        np.asarray(pool[LAYER][tables[lane]]).reshape(-1, *pool.shape[3:])[:length]
        for pool in (k, v)
    )
    # The reference gathers whole tables, so poison in its unused entries must not matter.
    got = reference(q, jnp.nan_to_num(k), v, tables, [lane] * num_queries, lens, 0.125)
    expected = dense_attention(np.asarray(q), k_lane, v_lane, 0.125)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_decode_equals_reference(name: str) -> None:
    shape = SHAPES[name]
    k, v, tables = pools(shape)
    q = queries(shape, len(shape.context_lens))
    lens, scale = jnp.asarray(shape.context_lens, jnp.int32), 0.3
    num_lanes = len(shape.context_lens) - 1
    got = jax.jit(pallas_kernels.decode_attention, static_argnames="scale")(
        q,
        k,
        v,
        layer=jnp.int32(LAYER),
        block_tables=tables,
        context_lens=lens,
        num_lanes=jnp.int32(num_lanes),
        scale=scale,
    )
    k = jnp.nan_to_num(k)
    expected = reference(q, k, v, tables, range(len(lens)), shape.context_lens, scale)
    np.testing.assert_allclose(
        np.float32(got[:num_lanes]), np.float32(expected[:num_lanes]), atol=TOLERANCE[shape.dtype]
    )
    assert not np.any(np.float32(got[num_lanes:]))


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_equals_reference(name: str) -> None:
    shape = SHAPES[name]
    k, v, tables = pools(shape)
    # Each lane's segment is the last part of its context; the flat axis has a gap in front.
    gap = 3
    lens = [max(1, (2 * n) // 3) for n in shape.context_lens]
    positions = [n - m for n, m in zip(shape.context_lens, lens, strict=True)]
    starts = [gap + sum(lens[:lane]) for lane in range(len(lens))]
    num_tokens = max(64, gap + sum(lens) + 5)
    q = queries(shape, num_tokens)
    got = jax.jit(pallas_kernels.prefill_attention, static_argnames="scale")(
        q,
        k,
        v,
        layer=jnp.int32(LAYER),
        block_tables=tables,
        tiles=prefill_tiles(starts, lens, positions),
        scale=0.3,
    )
    lanes = np.repeat(np.arange(len(lens)), lens)
    contexts = np.concatenate([p + 1 + np.arange(m) for p, m in zip(positions, lens, strict=True)])
    k = jnp.nan_to_num(k)
    span = slice(gap, gap + sum(lens))
    expected = reference(q[span], k, v, tables, lanes, contexts, 0.3)
    np.testing.assert_allclose(
        np.float32(got[span]), np.float32(expected), atol=TOLERANCE[shape.dtype]
    )
    assert not np.any(np.float32(got[:gap]))
    assert not np.any(np.float32(got[span.stop :]))


def test_bfloat16_stored_as_bits_gives_the_same_bits() -> None:
    shape = SHAPES["bfloat16"]
    k, v, tables = pools(shape)
    k_bits, v_bits = (jax.lax.bitcast_convert_type(pool, jnp.uint16) for pool in (k, v))
    q = queries(shape, len(shape.context_lens))
    shared = {
        "layer": jnp.int32(LAYER),
        "block_tables": tables,
        "context_lens": jnp.asarray(shape.context_lens, jnp.int32),
        "num_lanes": jnp.int32(len(shape.context_lens)),
        "scale": 0.125,
    }
    plain = pallas_kernels.decode_attention(q, k, v, **shared)
    bits = pallas_kernels.decode_attention(q, k_bits, v_bits, **shared)
    np.testing.assert_array_equal(np.float32(plain), np.float32(bits))


def test_a_lane_does_not_depend_on_its_neighbours_in_the_tile() -> None:
    shape = SHAPES["smollm2_9_3"]
    k, v, tables = pools(shape)
    q = queries(shape, len(shape.context_lens))

    def attend(lens):
        return pallas_kernels.decode_attention(
            q,
            k,
            v,
            layer=jnp.int32(LAYER),
            block_tables=tables,
            context_lens=jnp.asarray(lens, jnp.int32),
            num_lanes=jnp.int32(len(lens)),
            scale=0.125,
        )

    alone, beside = attend((1, 15, 1, 1, 1)), attend(shape.context_lens)
    np.testing.assert_array_equal(np.asarray(alone[1]), np.asarray(beside[1]))


def test_swapped_keys_and_values_are_noticed() -> None:
    shape = SHAPES["no_groups"]
    k, v, tables = pools(shape)
    k, v = jnp.nan_to_num(k), jnp.nan_to_num(v)
    q = queries(shape, len(shape.context_lens))
    lanes = range(len(shape.context_lens))
    right = reference(q, k, v, tables, lanes, shape.context_lens, 0.3)
    swapped = reference(q, v, k, tables, lanes, shape.context_lens, 0.3)
    assert np.abs(np.asarray(right - swapped)).max() > 1000 * TOLERANCE["float32"]


def test_head_counts_that_do_not_divide_are_refused() -> None:
    shape = SHAPES["llama_32_8"]
    k, v, tables = pools(shape)
    with pytest.raises(ValueError, match="30 query heads are no multiple of 8 key/value heads"):
        pallas_kernels.decode_attention(
            queries(shape, 4)[:, :30],
            k,
            v,
            layer=jnp.int32(0),
            block_tables=tables,
            context_lens=jnp.ones(4, jnp.int32),
            num_lanes=jnp.int32(4),
            scale=1.0,
        )
