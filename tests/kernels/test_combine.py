"""The merge of partial results against its reference, and that against attention to all keys."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Partials, combine_ref
from pallas_kernels.partials import PARTITION_TOKENS

# Queries that see nothing (three), a part of one partition, exactly one, parts of several, all
# four, and more than there are.
STARTS = np.asarray([0, 10, 256, 0, 300, 0, 511, 0, 300, 400, 700], np.int32)
ENDS = np.asarray([0, 200, 512, 257, 900, 1024, 513, 1, 300, 10, 5000], np.int32)
KV_HEADS, PARTITIONS, GROUP, WIDTH = 3, 4, 3, 20

IMPLEMENTATIONS = ["xla", "triton_interpreted"]


def softmax_over(scores, values, live):
    """Attention in float64, and where nothing is seen zero."""
    weights = np.where(live, np.exp(scores - scores.max()), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("...c,...cd->...d", weights / np.where(total > 0, total, 1), values)


def scores_and_values():
    rng = np.random.default_rng(0)
    num_keys = PARTITIONS * PARTITION_TOKENS
    scores = 5 * rng.standard_normal((len(ENDS), KV_HEADS, GROUP, num_keys))
    # Partitions whose scores are far apart must not overflow.
    scores[..., :PARTITION_TOKENS] += 90
    values = rng.standard_normal((len(ENDS), KV_HEADS, GROUP, num_keys, WIDTH))
    positions = np.arange(num_keys)
    live = (positions >= STARTS[:, None]) & (positions < ENDS[:, None])
    return scores, values, live[:, None, None, :]


def partials_of(scores, values, live) -> Partials:
    """What each partition comes to; NaN where it has no key that is seen."""
    shape = (*scores.shape[:3], PARTITIONS, PARTITION_TOKENS)
    scores = np.where(live, scores, -np.inf).reshape(shape)
    peak = scores.max(-1)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - peak[..., None])
    weighted = np.einsum("...c,...cd->...d", weights, values.reshape(*shape, WIDTH))
    parts = (weighted, peak, weights.sum(-1))
    dead = np.isinf(peak)
    for part in parts:
        part[dead] = np.nan
    return Partials(*(jnp.asarray(np.moveaxis(part, 3, 2), jnp.float32) for part in parts))


@pytest.fixture(scope="module")
def case():
    scores, values, live = scores_and_values()
    return partials_of(scores, values, live), softmax_over(scores, values, live)


def test_the_reference_equals_attention_to_all_keys(case) -> None:
    partials, expected = case
    got = combine_ref(partials, STARTS, ENDS, dtype=jnp.dtype(jnp.float32))
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert not np.any(got[jnp.asarray([0, 8, 9])])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_merges_equal_the_reference(case, implementation, dtype: str, rtol: float) -> None:
    """bfloat16 differs by the rounding of the result."""
    partials, _ = case
    starts, ends = jnp.asarray(STARTS), jnp.asarray(ENDS)
    got = pallas_kernels.combine(
        partials, starts, ends, dtype=jnp.dtype(dtype), implementation=implementation
    )
    expected = combine_ref(partials, starts, ends, dtype=jnp.dtype(jnp.float32))
    assert got.dtype == dtype
    np.testing.assert_allclose(np.float32(got), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_partition_that_is_left_out_is_noticed(case, implementation) -> None:
    partials, expected = case
    ends = jnp.asarray(np.minimum(ENDS, 3 * PARTITION_TOKENS))
    got = pallas_kernels.combine(
        partials,
        jnp.asarray(STARTS),
        ends,
        dtype=jnp.dtype(jnp.float32),
        implementation=implementation,
    )
    # Of the queries that see the last partition, those that do not see the strong first one.
    changed = np.abs(got - expected).max(axis=(1, 2, 3)) > 1e-3
    assert list(np.flatnonzero(changed)) == [4, 10]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_partition_without_any_weight_has_no_share(case, implementation) -> None:
    partials, _ = case
    without = partials._replace(
        weighted=partials.weighted.at[5, :, 1].set(0), total=partials.total.at[5, :, 1].set(0)
    )
    arguments = (without, jnp.asarray(STARTS), jnp.asarray(ENDS))
    got = pallas_kernels.combine(
        *arguments, dtype=jnp.dtype(jnp.float32), implementation=implementation
    )
    expected = combine_ref(*arguments, dtype=jnp.dtype(jnp.float32))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
