"""Sampling by identities and by distribution; thresholds against a sort in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.engine.admission import random_key
from jaxpaged.engine.sampling import (
    INVALID_TOKEN,
    MAX_BANNED,
    SamplingBatch,
    keep_mask,
    sample,
)

VOCAB = 1000


def batch(num_lanes: int, *, banned=(), seeds=None, draws=0, **params) -> SamplingBatch:
    """A batch with the same parameters in every lane and a key per lane."""
    keys = [random_key(seed, 0) for seed in (seeds or range(num_lanes))]
    banned_ids = np.full((num_lanes, MAX_BANNED), VOCAB, np.int32)
    banned_ids[:, : len(banned)] = banned

    def lanes(name, default, dtype):
        return np.full(num_lanes, params.get(name, default), dtype)

    return SamplingBatch(
        temperature=lanes("temperature", 1.0, np.float32),
        top_k=lanes("top_k", 0, np.int32),
        top_p=lanes("top_p", 1.0, np.float32),
        min_p=lanes("min_p", 0.0, np.float32),
        keys=np.asarray(keys, np.uint32),
        draws=np.full(num_lanes, draws, np.int32),
        banned_ids=banned_ids,
    )


sample_jit = jax.jit(sample)


def logits(num_lanes: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_lanes, VOCAB)) * 2).astype(np.float32)


def test_greedy_takes_the_first_of_the_largest() -> None:
    x = logits(4)
    x[2, [7, 900]] = 50.0
    tokens = sample_jit(jnp.asarray(x), batch(4, temperature=0.0))
    np.testing.assert_array_equal(tokens, x.argmax(axis=1))
    assert tokens[2] == 7


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": VOCAB}, {"top_p": 1.0, "min_p": 0.0}])
def test_flat_logits_without_filters_reach_many_tokens(off) -> None:
    tokens = sample_jit(jnp.zeros((200, VOCAB)), batch(200, **off))
    assert len(set(np.asarray(tokens).tolist())) > 150


def test_top_1_and_tiny_top_p_are_greedy() -> None:
    x = logits(16)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}):
        tokens = sample_jit(jnp.asarray(x), batch(16, **narrow))
        np.testing.assert_array_equal(tokens, x.argmax(axis=1), err_msg=str(narrow))


@pytest.mark.parametrize("top_k", [1, 2, 50, 999])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_kept_tokens_are_those_of_a_sort(top_k: int, top_p: float, min_p: float) -> None:
    x = logits(8, seed=3)
    x -= x.max(axis=1, keepdims=True)
    kept = np.asarray(keep_mask(jnp.asarray(x), batch(8, top_k=top_k, top_p=top_p, min_p=min_p)))
    for lane in range(8):
        order = np.argsort(-x[lane], kind="stable")[:top_k]
        shares = np.exp(x[lane][order].astype(np.float64))
        before = np.cumsum(shares) - shares
        nucleus = order[before < top_p * shares.sum()] if top_p < 1 else order
        expected = {t for t in nucleus if x[lane, t] >= x[lane].max() + np.log(min_p or 1e-300)}
        assert set(np.flatnonzero(kept[lane])) == expected


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    flat = jnp.zeros((200, VOCAB))
    assert set(np.asarray(sample_jit(flat, batch(200, top_k=1))).tolist()) == {0}
    x = np.full((1, VOCAB), -5.0, np.float32)
    x[0, [900, 30, 31, 7]] = [0.0, -1.0, -1.0, -1.0]
    kept = np.asarray(keep_mask(jnp.asarray(x), batch(1, top_k=3)))
    assert np.flatnonzero(kept[0]).tolist() == [7, 30, 900]


@pytest.mark.parametrize(
    "narrow", [{"temperature": t} for t in (1e-5, 1e-8, 1e-20, 1e-38)] + [{"top_p": 1e-50}]
)
@pytest.mark.parametrize("vocab", [272, VOCAB])
def test_extreme_parameters_are_greedy_and_never_leave_the_vocabulary(narrow, vocab) -> None:
    x = logits(64)[:, :vocab] * 20
    tokens = np.asarray(sample_jit(jnp.asarray(x), batch(64, **narrow)))
    np.testing.assert_array_equal(tokens, x.argmax(axis=1))


def test_samples_follow_the_probabilities() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    x = np.full(VOCAB, -np.inf, np.float32)
    places = [0, 255, 256, 511, 999]  # both sides of the borders of the two-level search
    x[places] = np.log(probabilities)
    x[x == -np.inf] = -1e9
    num = 20_000
    rows = jnp.broadcast_to(jnp.asarray(x), (num, VOCAB))
    tokens = np.asarray(sample_jit(rows, batch(num)))
    counts = np.array([(tokens == place).sum() for place in places])
    assert counts.sum() == num
    # Chi-squared with 4 degrees of freedom: 18.5 is exceeded once in a thousand seeds.
    expected = probabilities * num
    assert ((counts - expected) ** 2 / expected).sum() < 18.5


def test_temperature_divides_the_logits() -> None:
    x = np.full((1, VOCAB), -1e9, np.float32)
    x[0, :2] = [0.0, np.log(4.0)]
    num = 20_000
    rows = jnp.broadcast_to(jnp.asarray(x[0]), (num, VOCAB))
    share = np.mean(np.asarray(sample_jit(rows, batch(num, temperature=2.0))) == 1)
    assert abs(share - 2 / 3) < 0.015


def test_a_lane_depends_on_its_key_and_draw_only() -> None:
    x = jnp.asarray(logits(8, seed=1))
    tokens = np.asarray(sample_jit(x, batch(8)))
    order = np.array([5, 0, 7, 2, 1, 6, 3, 4])
    again = np.asarray(sample_jit(x[order], batch(8, seeds=order.tolist())))
    np.testing.assert_array_equal(again, tokens[order])
    later = np.asarray(sample_jit(x, batch(8, draws=1)))
    assert (later != tokens).any()


def test_greedy_lanes_stay_greedy_beside_random_ones() -> None:
    x = logits(4)
    mixed = batch(4)._replace(temperature=np.array([0, 1, 0, 1], np.float32))
    tokens = np.asarray(sample_jit(jnp.asarray(x), mixed))
    np.testing.assert_array_equal(tokens[[0, 2]], x.argmax(axis=1)[[0, 2]])


def test_banned_tokens_are_never_chosen() -> None:
    x = np.zeros((50, VOCAB), np.float32)
    x[:, [3, 4]] = 30.0
    for temperature in (0.0, 1.0):
        tokens = np.asarray(
            sample_jit(jnp.asarray(x), batch(50, banned=[3, 4], temperature=temperature))
        )
        assert not np.isin(tokens, [3, 4]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_lane_with_a_bad_logit_is_reported_and_the_others_are_not(bad: float) -> None:
    x = logits(3)
    x[1, 17] = bad
    for temperature in (0.0, 1.0):
        tokens = np.asarray(sample_jit(jnp.asarray(x), batch(3, temperature=temperature)))
        assert tokens[1] == INVALID_TOKEN
        assert (tokens[[0, 2]] >= 0).all()
