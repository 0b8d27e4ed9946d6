"""What the kernels for NVIDIA GPUs promise beside the right numbers, and that wrong ones show.

All of it in Pallas's interpreter, which runs the kernels' own source on a CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import TOLERANCE, AttentionShape, pools, prefill_tiles, queries, stored

import pallas_kernels
from pallas_kernels import NO_WINDOW, KVRows, paged_attention_ref, triton

SHAPE = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, context_lens=(1, 70, 300, 515)
)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def decoded(q, k, v, tables, lanes, lens, *, window: int = NO_WINDOW, **options):
    """Decode attention by a fresh kernel."""
    kernel = jax.jit(functools.partial(triton.decode_attention, scale=0.25, interpret=True))
    return kernel(
        q,
        k,
        v,
        layer=jnp.int32(1),
        block_tables=tables,
        token_lanes=int32(lanes),
        context_lens=int32(lens),
        num_queries=jnp.int32(len(lanes)),
        window=jnp.int32(window),
        **options,
    )


def error(window: int = NO_WINDOW, *, swaps: bool = False, dead_id: int | None = None) -> float:
    """The largest error of decode attention on a pool of NaN but for what is seen.

    Entries of the block tables that hold no such key are `dead_id`, or lead to a block of NaN.
    """
    lens = np.asarray(SHAPE.context_lens)
    first_live = np.maximum(0, lens - window)
    k, v, tables = pools(SHAPE, first_live=tuple(first_live))
    sound = tables
    if dead_id is not None:
        first = np.arange(tables.shape[1]) * SHAPE.block_size
        is_live = (first < lens[:, None]) & (first + SHAPE.block_size > first_live[:, None])
        tables = jnp.where(is_live, tables, dead_id)
    q, lanes = queries(SHAPE, len(lens)), np.arange(len(lens))
    got = decoded(q, *((v, k) if swaps else (k, v)), tables, lanes, lens, window=window)
    expected = paged_attention_ref(
        q,
        k,
        v,
        layer=1,
        block_tables=sound,
        token_lanes=int32(lanes),
        context_lens=int32(lens),
        window=window,
        scale=0.25,
    )
    return float(np.abs(got - expected).max())


def is_caught(value: float) -> bool:
    """Whether the parity tests fail on such an error; NaN compares false."""
    return not value <= TOLERANCE["triton_interpreted", "float32"]


@pytest.mark.parametrize("window", [100, NO_WINDOW])
@pytest.mark.parametrize("dead_id", [None, -1, 10**6])
def test_several_partitions_and_dead_slots_of_nan(window: int, dead_id: int | None) -> None:
    assert not is_caught(error(window, dead_id=dead_id))


def test_swapped_keys_and_values_are_caught() -> None:
    assert is_caught(error(swaps=True))


def test_a_broken_mask_is_caught(monkeypatch) -> None:
    accumulate = triton._accumulate
    monkeypatch.setattr(
        triton,
        "_accumulate",
        lambda softmax, scores, seen, *rest: accumulate(softmax, scores, seen | True, *rest),
    )
    assert is_caught(error())


def test_loads_without_a_mask_are_caught(monkeypatch) -> None:
    load = triton.plt.load
    monkeypatch.setattr(triton.plt, "load", lambda ref, *, mask, other: load(ref))
    assert is_caught(error(window=100))


def test_a_partition_too_few_is_caught(monkeypatch) -> None:
    cdiv = triton.pl.cdiv
    monkeypatch.setattr(
        triton.pl, "cdiv", lambda a, b: cdiv(a, b) - int(b == triton.PARTITION_TOKENS)
    )
    assert is_caught(error())


def test_a_query_has_the_same_bits_alone_and_beside_others_whatever_the_block_size() -> None:
    rng = np.random.default_rng(0)
    length = 300
    rows = [rng.standard_normal((2, length + 20, 1, 16)).astype(np.float32) for _ in range(2)]
    q = jnp.asarray(rng.standard_normal((3, 2, 16)), jnp.float32)
    found = []
    for block_size, lanes in ((16, [0]), (16, [1, 0, 1]), (32, [0]), (4, [0, 1]), (64, [0])):
        width = (length + 20) // block_size
        order = rng.permutation(2 * width)
        tables = int32(order.reshape(2, width))
        k, v = (
            stored(np.stack([pool, pool]), "float32")
            for pool in (_scattered(part, order, block_size) for part in rows)
        )
        at = lanes.index(0)
        own = jnp.roll(q, at, axis=0)[: len(lanes)]
        lens = [length if lane == 0 else 17 for lane in lanes]
        found.append(np.asarray(decoded(own, k, v, tables, lanes, lens))[at])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def _scattered(rows: np.ndarray, order: np.ndarray, block_size: int) -> np.ndarray:
    blocks = rows.reshape(-1, block_size, *rows.shape[2:])
    pool = np.empty_like(blocks)
    pool[order] = blocks
    return pool


@pytest.mark.parametrize("attention", ["decode_attention", "prefill_attention"])
def test_heads_wider_than_any_that_was_compiled_are_refused(attention: str) -> None:
    shape = AttentionShape(
        num_heads=1, num_kv_heads=1, head_dim=320, block_size=16, context_lens=(3,)
    )
    k, v, tables = pools(shape)
    ones = int32([1])
    own = {
        "decode_attention": {
            "token_lanes": 0 * ones,
            "context_lens": ones,
            "num_queries": jnp.int32(1),
        },
        "prefill_attention": {"tiles": prefill_tiles([0], [0], [1], [0])},
    }
    with pytest.raises(
        ValueError, match=r"heads of up to 256 numbers, and these have 320; use xla"
    ):
        getattr(pallas_kernels, attention)(
            queries(shape, 1),
            k,
            v,
            layer=jnp.int32(0),
            block_tables=tables,
            window=jnp.int32(1),
            scale=1.0,
            implementation="triton_interpreted",
            **own[attention],
        )


@pytest.mark.parametrize(
    ("num_numbers", "itemsize", "expected"),
    [
        (2**31, 1, True),
        (2**31 + 1, 1, False),
        (2**32, 1, False),
        (2**32 + 1, 1, True),
        (2**31, 2, True),
        (2**31 + 1, 2, True),
        (2**30 + 1, 4, True),
    ],
)
def test_arrays_whose_places_do_not_fit_are_known(num_numbers, itemsize, expected) -> None:
    """Code for the H100 sign-extends 32 bits for 3 GiB of bytes, and takes 64 for 6 GiB."""
    assert triton.is_addressable(num_numbers, itemsize) == expected


def test_a_pool_that_the_kernels_cannot_address_is_refused() -> None:
    rows = KVRows(jax.ShapeDtypeStruct((3, 2**16, 64, 2, 128), jnp.int8), None)
    assert rows.values.size == 3 * 2**30
    scales = jax.ShapeDtypeStruct(rows.values.shape[:-1], jnp.float32)
    pool = rows._replace(scales=scales)
    lanes = jax.ShapeDtypeStruct((1,), jnp.int32)

    def decode(k, v, q, tables, lanes):
        return pallas_kernels.decode_attention(
            q,
            k,
            v,
            layer=jnp.int32(0),
            block_tables=tables,
            token_lanes=lanes,
            context_lens=lanes,
            num_queries=jnp.int32(1),
            window=jnp.int32(1),
            scale=1.0,
            implementation="triton",
        )

    with pytest.raises(ValueError, match="cannot find every place of 3221225472 numbers"):
        jax.eval_shape(
            decode,
            pool,
            pool,
            jax.ShapeDtypeStruct((1, 2, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((1, 4), jnp.int32),
            lanes,
        )


def test_there_is_no_prefill_by_mosaic() -> None:
    k, v, tables = pools(SHAPE)
    tiles = pallas_kernels.PrefillTiles(*[int32([0])] * 4, jnp.int32(0))
    with pytest.raises(ValueError, match="no prefill attention by Mosaic GPU"):
        pallas_kernels.prefill_attention(
            queries(SHAPE, 64),
            k,
            v,
            layer=jnp.int32(0),
            block_tables=tables,
            tiles=tiles,
            window=jnp.int32(1),
            scale=1.0,
            implementation="mosaic",
        )
