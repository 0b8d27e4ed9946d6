"""Log-probabilities, ranks and alternatives against double precision."""

import jax
import numpy as np
import pytest
from sampler_lanes import lanes, logits, row, sample, stack

from jaxpaged import SamplingParams
from jaxpaged.engine import sampling
from jaxpaged.engine.logprobs import MAX_ALTERNATIVES

VOCAB = 300
_score_prompt = jax.jit(sampling.score_prompt)


def reference(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    peak = x.max(axis=-1, keepdims=True)
    return x - peak - np.log(np.exp(x - peak).sum(axis=-1, keepdims=True))


def order(x: np.ndarray) -> np.ndarray:
    """Tokens from the likeliest on, of equals the lowest id first."""
    return np.argsort(-x, axis=-1, kind="stable")


def check(scored, x: np.ndarray) -> None:
    """All fields of rows that want everything."""
    rows = np.arange(len(x))
    expected, best = reference(x), order(x)
    np.testing.assert_allclose(scored.logprobs, expected[rows, scored.tokens], rtol=1e-5, atol=1e-5)
    ranks = np.argsort(best, axis=-1)[rows, scored.tokens] + 1
    np.testing.assert_array_equal(scored.ranks, ranks)
    top = best[:, :MAX_ALTERNATIVES]
    np.testing.assert_array_equal(scored.top_ids, top)
    np.testing.assert_allclose(
        scored.top_logprobs, np.take_along_axis(expected, top, axis=1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0, 1e4])
def test_sampled_tokens_have_the_model_s_own_log_probabilities(scale: float) -> None:
    x = logits(64, VOCAB) * np.float32(scale)
    params = {"temperature": 3.0, "top_k": 250, "top_p": 0.99, "logprobs": 5}
    changed = {"repetition_penalty": 1.5, "logit_bias": ((3, 5.0), (4, -5.0))}
    check(sample(x, lanes(64, vocab=VOCAB, **params, **changed)), x)


def test_prompt_tokens_have_the_model_s_own_log_probabilities() -> None:
    x = np.round(logits(64, VOCAB), 1)  # with ties
    targets = np.random.default_rng(1).integers(0, VOCAB, 64).astype(np.int32)
    scored = sampling.Sampled(*map(np.asarray, _score_prompt(x, targets)))
    np.testing.assert_array_equal(scored.tokens, targets)
    check(scored, x)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_prompt_row_with_a_bad_logit_has_no_log_probability(bad: float) -> None:
    x = logits(64, VOCAB)
    x[1, 17] = bad
    scored = _score_prompt(x, np.full(64, 3, np.int32))
    assert np.flatnonzero(np.isnan(scored.logprobs)).tolist() == [1]


def test_of_equal_logits_the_lowest_ids_come_first_whatever_the_sign_of_zero() -> None:
    x = np.where(np.arange(VOCAB) % 2, np.float32(0), np.float32(-0.0))[None].repeat(64, axis=0)
    targets = np.arange(64, dtype=np.int32)
    scored = _score_prompt(x, targets)
    np.testing.assert_array_equal(scored.ranks, targets + 1)
    np.testing.assert_array_equal(scored.top_ids[0], np.arange(MAX_ALTERNATIVES))
    greedy = sample(x, lanes(64, vocab=VOCAB, logprobs=1))
    assert set(greedy.ranks.tolist()) == {1}


def test_a_small_vocabulary_leaves_places_of_alternatives_unused() -> None:
    x = logits(64, 5)
    scored = _score_prompt(x, np.zeros(64, np.int32))
    np.testing.assert_array_equal(scored.top_ids[:, :5], order(x))
    assert (np.asarray(scored.top_ids)[:, 5:] == -1).all()
    assert (np.asarray(scored.top_logprobs)[:, 5:] == -np.inf).all()


def test_only_what_a_lane_wants_is_given() -> None:
    x = logits(5, VOCAB)
    wishes = ({}, {"logprobs": 0}, {"logprobs": 3}, {"n": 1, "best_of": 3}, {"beam_width": 2})
    got = sample(x, stack([row(SamplingParams(**wish), vocab=VOCAB) for wish in wishes]))
    assert (got.ranks > 0).tolist() == [False, True, True, True, True]
    assert (got.logprobs < 0).tolist() == [False, True, True, True, True]
    assert (got.top_ids[:, 0] >= 0).tolist() == [False, False, True, False, True]
    alone = sample(x, lanes(5, vocab=VOCAB))
    assert not alone.ranks.any()
    assert (alone.top_ids == -1).all()


def test_beams_add_up_processed_log_probabilities_that_are_not_normalised_again() -> None:
    """As Hugging Face does: log-softmax first, then penalties and bans on its result."""
    x = logits(64, VOCAB, seed=3)
    history = np.random.default_rng(4).integers(0, VOCAB, (64, 40)).astype(np.int32)
    wish = SamplingParams(
        beam_width=4,
        repetition_penalty=1.3,
        min_tokens=100,
        logit_bias=((9, 2.0),),
    )
    params = stack([row(wish, num_prompt=5, stop_ids=(7, 8), vocab=VOCAB)] * 64)
    got = sample(x, params, history, 40)
    expected = reference(x)
    expected[:, 9] += 2.0
    expected[:, [7, 8]] = -np.inf
    for lane in range(64):
        seen = np.unique(history[lane])
        factor = np.where(expected[lane, seen] > 0, 1 / 1.3, 1.3)
        expected[lane, seen] *= factor
    top = order(expected)[:, :MAX_ALTERNATIVES]
    np.testing.assert_array_equal(got.top_ids, top)
    np.testing.assert_allclose(
        got.top_logprobs, np.take_along_axis(expected, top, axis=1), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(got.tokens, top[:, 0])
    np.testing.assert_array_equal(got.logprobs, got.top_logprobs[:, 0])
    assert (got.ranks == 1).all()


def test_a_beam_without_changes_has_the_model_s_own_log_probabilities() -> None:
    x = logits(64, VOCAB, seed=3)
    check(sample(x, lanes(64, vocab=VOCAB, beam_width=2)), x)


def test_no_bit_of_a_scored_row_depends_on_the_other_rows() -> None:
    x = logits(64, VOCAB)
    targets = np.arange(64, dtype=np.int32)
    together = _score_prompt(x, targets)
    moved = np.random.default_rng(2).permutation(64)
    again = _score_prompt(x[moved], targets[moved])
    for mine, other in zip(together, again, strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[moved], np.asarray(other))
    others = np.where((np.arange(64) == 5)[:, None], x, logits(64, VOCAB, seed=7) * 50)
    alone = _score_prompt(others, targets)
    for mine, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[5], np.asarray(other)[5])
