"""Every implementation of paged attention against the reference, on the named shapes."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import (
    KV_DTYPES,
    SHAPES,
    TOLERANCE,
    AttentionShape,
    pools,
    prefill_tiles,
    queries,
    stored,
)

import pallas_kernels
from pallas_kernels import NO_WINDOW, api, paged_attention_ref
from pallas_kernels.llvm import HEAD_MULTIPLE

LAYER = 1
SCALE = 0.3

SHAPES_AND_FORMATS = [(name, "float32") for name in SHAPES] + [
    (name, kv_dtype)
    for name in ("smollm2_9_3", "one_kv_head_odd_block", "bfloat16")
    for kv_dtype in KV_DTYPES[1:]
]
"""Every shape, and every format where blocks fill a tile, where they do not, and in bfloat16."""

# The interpreter takes its time: besides one plain shape, what GPUs run, and odd blocks.
INTERPRETED = {("smollm2_9_3", "float32"), ("one_kv_head_odd_block", "float32")} | {
    ("bfloat16", kv_dtype) for kv_dtype in KV_DTYPES[1:]
}
# Of float32 and of heads that are whole vectors wide.
COMPILED = {
    (name, "float32")
    for name, shape in SHAPES.items()
    if shape.dtype == "float32" and shape.head_dim % HEAD_MULTIPLE == 0
}
CASES = [pytest.param("llvm", *case) for case in sorted(COMPILED)] + [
    pytest.param(implementation, *case, marks=[] if is_quick else [pytest.mark.slow])
    for case in SHAPES_AND_FORMATS
    for implementation, is_quick in (
        ("xla", case[1] == "float32" or case[0] == "bfloat16"),
        ("triton_interpreted", case in INTERPRETED),
    )
]

STATIC = ("scale", "soft_cap", "implementation")
decode = functools.partial(
    jax.jit(pallas_kernels.decode_attention, static_argnames=STATIC), layer=jnp.int32(LAYER)
)
prefill = functools.partial(
    jax.jit(pallas_kernels.prefill_attention, static_argnames=STATIC), layer=jnp.int32(LAYER)
)
reference = functools.partial(
    jax.jit(paged_attention_ref, static_argnames=("layer", "scale", "soft_cap")), layer=LAYER
)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def windows(shape: AttentionShape) -> tuple[int, ...]:
    """Around the edges of blocks, tiles and contexts."""
    size, longest = shape.block_size, max(shape.context_lens)
    return (1, 2, size, size + 1, 63, 64, 65, longest - 1, longest, NO_WINDOW)


def assert_close(got, expected, dtype: str, implementation: str = "xla") -> None:
    assert np.isfinite(np.float32(expected)).all()
    atol = TOLERANCE[implementation, dtype]
    np.testing.assert_allclose(np.float32(got), np.float32(expected), atol=atol)


def dense_attention(q, k, v, scale, soft_cap=None):
    """Causal attention of the last `len(q)` tokens of one sequence in float64 NumPy."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,chd->hqc", q.astype(np.float64), k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    past = k.shape[0] - q.shape[0]
    seen = np.arange(k.shape[0])[None, :] <= np.arange(q.shape[0])[:, None] + past
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqc,chd->qhd", weights, v)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_reference_equals_dense_attention_in_float64(soft_cap: float | None) -> None:
    shape = SHAPES["smollm2_9_3"]
    k, v, tables = pools(shape)
    length, num_queries = shape.context_lens[-1], 7
    lane = len(shape.context_lens) - 1
    q = queries(shape, num_queries)
    k_lane, v_lane = (
        np.asarray(rows.values[LAYER][tables[lane]]).reshape(-1, 3, 64)[:length] for rows in (k, v)
    )
    got = reference(
        q,
        k,
        v,
        block_tables=tables,
        token_lanes=int32([lane] * num_queries),
        context_lens=int32(range(length - num_queries + 1, length + 1)),
        window=NO_WINDOW,
        scale=0.125,
        soft_cap=soft_cap,
    )
    expected = dense_attention(np.asarray(q), k_lane, v_lane, 0.125, soft_cap)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize(("implementation", "name", "kv_dtype"), CASES)
def test_decode_equals_reference(implementation, name: str, kv_dtype) -> None:
    shape = SHAPES[name]
    q = queries(shape, len(shape.context_lens) + 5)
    used = len(shape.context_lens)
    lens = np.asarray(shape.context_lens)
    padded = int32([*lens, *[1] * 5])
    for window in windows(shape):
        k, v, tables = pools(shape, kv_dtype, first_live=tuple(np.maximum(0, lens - window)))
        lanes = int32([*range(used), *[0] * 5])
        shared = {"block_tables": tables, "scale": SCALE}
        got = decode(
            q,
            k,
            v,
            token_lanes=lanes,
            context_lens=padded,
            num_queries=jnp.int32(used),
            window=jnp.int32(window),
            implementation=implementation,
            **shared,
        )
        expected = reference(
            q[:used],
            k,
            v,
            token_lanes=lanes[:used],
            context_lens=padded[:used],
            window=window,
            **shared,
        )
        assert_close(got[:used], expected, shape.dtype, implementation)
        assert not np.any(np.float32(got[used:]))


@pytest.mark.parametrize(("implementation", "name", "kv_dtype"), CASES)
def test_prefill_equals_reference(implementation, name: str, kv_dtype) -> None:
    shape = SHAPES[name]
    # Each lane's segment is the last part of its context; the flat axis has a gap in front.
    gap = 3
    lens = [max(1, (2 * n) // 3) for n in shape.context_lens]
    positions = [n - m for n, m in zip(shape.context_lens, lens, strict=True)]
    starts = [gap + sum(lens[:lane]) for lane in range(len(lens))]
    q = queries(shape, max(64, gap + sum(lens) + 5))
    lanes = np.repeat(np.arange(len(lens)), lens)
    contexts = np.concatenate([p + 1 + np.arange(m) for p, m in zip(positions, lens, strict=True)])
    span = slice(gap, gap + sum(lens))
    for window in (*windows(shape)[::2], NO_WINDOW):
        first_live = tuple(np.maximum(0, np.asarray(positions) - window + 1))
        k, v, tables = pools(shape, kv_dtype, first_live=first_live)
        shared = {"block_tables": tables, "scale": SCALE}
        tiles = prefill_tiles(list(range(len(lens))), starts, lens, positions)
        got = prefill(
            q,
            k,
            v,
            tiles=tiles,
            window=jnp.int32(window),
            implementation=implementation,
            **shared,
        )
        expected = reference(
            q[span],
            k,
            v,
            token_lanes=int32(lanes),
            context_lens=int32(contexts),
            window=window,
            **shared,
        )
        assert_close(got[span], expected, shape.dtype, implementation)
        assert not np.any(np.float32(got[:gap]))
        assert not np.any(np.float32(got[span.stop :]))


@pytest.mark.parametrize("implementation", ["xla", "llvm", "triton_interpreted"])
def test_rows_that_no_tile_covers_are_left_as_they_were(implementation) -> None:
    shape = SHAPES["smollm2_9_3"]
    k, v, tables = pools(shape)
    q = queries(shape, 64)
    shared = {
        "block_tables": tables,
        "scale": SCALE,
        "window": jnp.int32(NO_WINDOW),
        "tiles": prefill_tiles([1, 2], [2, 20], [15, 3], [0, 13]),
        "implementation": implementation,
    }
    onto = prefill(q, k, v, onto=jnp.full_like(q, 7), **shared)
    alone = prefill(q, k, v, **shared)
    is_covered = np.isin(np.arange(64), [*range(2, 17), *range(20, 23)])
    np.testing.assert_array_equal(onto[is_covered], alone[is_covered])
    assert (np.asarray(onto[~is_covered]) == 7).all()
    assert not np.any(alone[~is_covered])


@pytest.mark.parametrize("implementation", ["xla", "llvm", "triton_interpreted"])
def test_a_soft_cap_bounds_the_scores(implementation) -> None:
    shape = SHAPES["smollm2_9_3"]
    k, v, tables = pools(shape)
    lens = shape.context_lens
    lanes = int32(range(len(lens)))
    q = 10 * queries(shape, 64)
    shared = {"block_tables": tables, "scale": SCALE, "window": jnp.int32(NO_WINDOW)}
    alone = {"token_lanes": lanes, "context_lens": int32(lens)}
    capped, plain = (
        reference(q[: len(lens)], k, v, soft_cap=cap, **alone, **shared) for cap in (2.0, None)
    )
    assert np.abs(capped - plain).max() > 0.1
    shared |= {"soft_cap": 2.0, "implementation": implementation}
    decoded = decode(q[: len(lens)], k, v, num_queries=jnp.int32(len(lens)), **alone, **shared)
    assert_close(decoded, capped, shape.dtype, implementation)
    starts = list(range(len(lens)))
    tiles = prefill_tiles(starts, starts, [1] * len(lens), [length - 1 for length in lens])
    prefilled = prefill(q, k, v, tiles=tiles, **shared)
    assert_close(prefilled[: len(lens)], capped, shape.dtype, implementation)


@pytest.mark.parametrize("implementation", ["xla", "llvm"])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, NO_WINDOW])
def test_a_window_is_exactly_so_many_keys_with_the_querys_own(window: int, implementation) -> None:
    """All keys are alike and value `i` is unit vector `i`: the result shows what was seen."""
    shape = AttentionShape(
        num_heads=1, num_kv_heads=1, head_dim=128, block_size=16, context_lens=(128,)
    )
    values = np.eye(128, dtype=np.float32).reshape(1, 8, 16, 1, 128)
    k, v = stored(0 * values, "float32"), stored(values, "float32")
    shared = {
        "layer": jnp.int32(0),
        "block_tables": jnp.arange(8, dtype=jnp.int32)[None],
        "window": jnp.int32(window),
        "scale": SCALE,
        "implementation": implementation,
    }
    q = queries(shape, 128)
    one_each = decode(
        q,
        k,
        v,
        token_lanes=jnp.zeros(128, jnp.int32),
        context_lens=jnp.arange(1, 129, dtype=jnp.int32),
        num_queries=jnp.int32(128),
        **shared,
    )
    together = prefill(q, k, v, tiles=prefill_tiles([0], [0], [128], [0]), **shared)
    positions = np.arange(128)
    seen = (positions <= positions[:, None]) & (positions > positions[:, None] - window)
    for got in (one_each, together):
        np.testing.assert_array_equal(np.asarray(got[:, 0]) > 0, seen)
        np.testing.assert_allclose(got[:, 0], seen / seen.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "fp8"])
def test_floats_stored_as_bits_give_the_same_bits(kv_dtype) -> None:
    shape = SHAPES["bfloat16"]
    q = queries(shape, len(shape.context_lens))
    results = []
    for as_bits in (False, True):
        k, v, tables = pools(shape, kv_dtype, as_bits=as_bits)
        result = decode(
            q,
            k,
            v,
            block_tables=tables,
            token_lanes=jnp.arange(3, dtype=jnp.int32),
            context_lens=int32(shape.context_lens),
            num_queries=jnp.int32(3),
            window=jnp.int32(NO_WINDOW),
            scale=0.125,
        )
        results.append(np.float32(result))
    np.testing.assert_array_equal(*results)


def test_swapped_keys_and_values_are_noticed() -> None:
    shape = SHAPES["no_groups"]
    k, v, tables = pools(shape)
    used = len(shape.context_lens)
    shared = {
        "block_tables": tables,
        "token_lanes": jnp.arange(used, dtype=jnp.int32),
        "context_lens": int32(shape.context_lens),
        "window": NO_WINDOW,
        "scale": SCALE,
    }
    q = queries(shape, used)
    difference = np.asarray(reference(q, k, v, **shared) - reference(q, v, k, **shared))
    assert np.abs(difference).max() > 1000 * TOLERANCE["xla", "float32"]


def test_head_counts_that_do_not_divide_are_refused() -> None:
    shape = SHAPES["llama_32_8"]
    k, v, tables = pools(shape)
    q = queries(shape, 4)[:, :30]
    shared = {"layer": jnp.int32(0), "block_tables": tables, "window": jnp.int32(1), "scale": 1.0}
    message = "30 query heads are no multiple of 8 key/value heads"
    ones = jnp.ones(4, jnp.int32)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.decode_attention(
            q, k, v, token_lanes=ones, context_lens=ones, num_queries=jnp.int32(4), **shared
        )
    with pytest.raises(ValueError, match=message):
        pallas_kernels.prefill_attention(q, k, v, tiles=prefill_tiles([0], [0], [1], [0]), **shared)


def one_query(k, v, q, implementation="xla"):
    """Decode attention of a lane's first token."""
    ones = jnp.ones(1, jnp.int32)
    return pallas_kernels.decode_attention(
        q,
        k,
        v,
        layer=jnp.int32(0),
        block_tables=jnp.zeros((1, 1), jnp.int32),
        token_lanes=0 * ones,
        context_lens=ones,
        num_queries=jnp.int32(1),
        window=jnp.int32(1),
        scale=1.0,
        implementation=implementation,
    )


def test_what_does_not_go_together_is_refused() -> None:
    rows = np.zeros((1, 1, 4, 2, 16), np.float32)
    floats, bytes_ = stored(rows, "float32"), stored(rows, "int8")
    q = jnp.zeros((1, 4, 16))
    with pytest.raises(ValueError, match="expected one shape and format"):
        one_query(floats, bytes_, q)
    with pytest.raises(ValueError, match="queries are 8 wide and keys 16"):
        one_query(stored(rows, "int4"), stored(rows, "int4"), q[:, :, :8])


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "dtype", "message"),
    [
        (24, "float32", "float32", "heads are 24 wide, the kernels for CPUs need a multiple of 16"),
        (16, "int8", "float32", "not made for float32 weights with a int8 pool"),
        (16, "float32", "bfloat16", "not made for bfloat16 weights with a float32 pool"),
    ],
)
def test_what_the_kernels_for_cpus_do_not_serve_is_refused(
    head_dim: int, kv_dtype, dtype: str, message: str
) -> None:
    rows = stored(np.zeros((1, 1, 4, 2, head_dim), np.float32), kv_dtype)
    with pytest.raises(ValueError, match=message):
        one_query(rows, rows, jnp.zeros((1, 4, head_dim), dtype), "llvm")


def test_unknown_implementations_are_refused() -> None:
    # Without the check of types that tests run with, as users do.
    check = inspect.unwrap(api._check_name)
    with pytest.raises(ValueError, match="no implementation 'Xla'; expected one of"):
        check("Xla")
