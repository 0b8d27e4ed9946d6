"""Sampling by identities, by distribution, and by what must not matter."""

import jax
import numpy as np
import pytest
from sampler_lanes import CONTEXT, lanes, logits, probabilities, row, sample, stack

from jaxpaged import SamplingParams
from jaxpaged.engine import filters
from jaxpaged.engine.lane_params import LaneParams
from jaxpaged.engine.sampling import INVALID_TOKEN, Sampled

VOCAB = 1000  # not a multiple of the chunks of the two-level search

_keep_mask = jax.jit(filters.keep_mask)


def keep_mask(x: np.ndarray, params: LaneParams) -> np.ndarray:
    return np.asarray(_keep_mask(x, params))


def test_greedy_takes_the_first_of_the_largest() -> None:
    x = logits(4, VOCAB)
    x[2, [7, 900]] = 50.0
    x[3] = -3.0
    tokens = sample(x, lanes(4, vocab=VOCAB)).tokens
    np.testing.assert_array_equal(tokens, x.argmax(axis=1))
    assert tokens[2:].tolist() == [7, 0]


@pytest.mark.parametrize("vocab", [5, 272])
def test_greedy_in_vocabularies_of_any_size(vocab: int) -> None:
    x = np.round(logits(16, vocab))
    np.testing.assert_array_equal(sample(x, lanes(16, vocab=vocab)).tokens, x.argmax(axis=1))


@pytest.mark.parametrize(
    "off", [{}, {"top_k": 0}, {"top_k": -1}, {"top_k": VOCAB}, {"top_k": 2**31 - 1}]
)
def test_flat_logits_without_filters_reach_many_tokens(off) -> None:
    tokens = sample(
        np.zeros((192, VOCAB), np.float32), lanes(192, vocab=VOCAB, temperature=1.0, **off)
    )
    assert len(set(tokens.tokens.tolist())) > 150


@pytest.mark.parametrize("vocab", [272, VOCAB])
@pytest.mark.parametrize(
    "narrow",
    [{"temperature": t} for t in (1e-3, 1e-5, 1e-8, 1e-20, 1e-38, 1e-300)]
    + [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-50}, {"min_p": 1.0}],
)
def test_extreme_parameters_are_greedy_and_never_leave_the_vocabulary(narrow, vocab) -> None:
    x = logits(64, vocab) * 20
    tokens = sample(x, lanes(64, vocab=vocab, **{"temperature": 1.0} | narrow)).tokens
    np.testing.assert_array_equal(tokens, x.argmax(axis=1))


def test_a_huge_temperature_makes_all_tokens_alike() -> None:
    x = logits(192, VOCAB) * 5
    tokens = sample(x, lanes(192, vocab=VOCAB, temperature=1e4)).tokens
    assert len(set(tokens.tolist())) > 150
    assert abs(x[np.arange(192), tokens].mean()) < 1.5


@pytest.mark.parametrize("top_k", [0, 1, 2, 50, 999])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize(("min_p", "typical_p"), [(0.0, 1.0), (0.05, 1.0), (0.0, 0.3), (0.01, 0.9)])
def test_kept_tokens_are_those_of_a_sort(top_k, top_p, min_p, typical_p) -> None:
    wanted = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    x = logits(8, VOCAB, seed=3)
    x -= x.max(axis=1, keepdims=True)
    params = SamplingParams(temperature=1.0, **wanted)
    kept = keep_mask(x, lanes(8, vocab=VOCAB, temperature=1.0, **wanted))
    for lane in range(8):
        np.testing.assert_array_equal(kept[lane], probabilities(x[lane], params) > 0)


def test_typical_sampling_can_leave_out_the_likeliest_token() -> None:
    # One token of 30 %, seventy of 1 %: the entropy is nearer to the surprise of the many.
    x = np.log(np.array([0.3] + [0.01] * 70, np.float32))[None]
    kept = keep_mask(x - x.max(), lanes(1, vocab=71, temperature=1.0, typical_p=0.5))
    assert np.flatnonzero(kept[0]).tolist() == list(range(1, 71))


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    flat = np.zeros((192, VOCAB), np.float32)
    assert set(sample(flat, lanes(192, vocab=VOCAB, temperature=1.0, top_k=1)).tokens) == {0}
    x = np.full((1, VOCAB), -5.0, np.float32)
    x[0, [900, 30, 31, 7]] = [0.0, -1.0, -1.0, -1.0]
    kept = keep_mask(x, lanes(1, vocab=VOCAB, temperature=1.0, top_k=3))
    assert np.flatnonzero(kept[0]).tolist() == [7, 30, 900]


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"typical_p": 0.5},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 200, "min_p": 0.02, "typical_p": 0.95},
        {"temperature": 1.5, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.8},
    ],
    ids=str,
)
def test_samples_follow_the_distribution(wanted) -> None:
    vocab, num = 300, 6400
    params = {"temperature": 1.0} | wanted
    x = logits(1, vocab, seed=5)[0]
    expected = probabilities(x, SamplingParams(**params))
    many = lanes(num, vocab=vocab, **params)
    rows = np.broadcast_to(x, (num, vocab))
    drawn = np.concatenate([sample(rows, many, num_tokens=n).tokens for n in range(4)])
    counts = np.bincount(drawn, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    _assert_likely(counts, expected * len(drawn))


def test_samples_follow_the_probabilities_across_chunks() -> None:
    vocab, num = 300, 6400
    shares = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    x = np.full(vocab, -1e9, np.float32)
    places = [0, 255, 256, 257, 299]  # both sides of the border of the two-level search
    x[places] = np.log(shares)
    rows = np.broadcast_to(x, (num, vocab))
    tokens = sample(rows, lanes(num, vocab=vocab, temperature=1.0)).tokens
    counts = np.array([(tokens == place).sum() for place in places])
    assert counts.sum() == num
    _assert_likely(counts, shares * num)


def test_a_lane_depends_on_its_key_and_draw_only() -> None:
    x, params = logits(8, VOCAB, seed=1), lanes(8, vocab=VOCAB, temperature=1.0)
    tokens = sample(x, params).tokens
    order = np.array([5, 0, 7, 2, 1, 6, 3, 4])
    shuffled = params._replace(keys=params.keys[order])
    np.testing.assert_array_equal(sample(x[order], shuffled).tokens, tokens[order])
    assert (sample(x, params, num_tokens=1).tokens != tokens).any()
    # What counts is how many tokens were sampled, not how long the prompt is.
    longer = params._replace(num_prompt=np.full(8, 5, np.int32))
    np.testing.assert_array_equal(sample(x, longer, num_tokens=5).tokens, tokens)


def test_a_neighbour_without_seed_changes_nothing_of_a_seeded_lane() -> None:
    x = np.broadcast_to(logits(1, VOCAB), (2, VOCAB))
    mine = row(SamplingParams(temperature=1.0, seed=7), seed=7, vocab=VOCAB)
    tokens = set()
    for other in range(20):
        for params in (SamplingParams(temperature=1.0), SamplingParams()):
            pair = stack([mine, row(params, seed=100 + other, vocab=VOCAB)])
            tokens.add(int(sample(x, pair).tokens[0]))
    assert len(tokens) == 1


def _mixed(num: int):
    """Lanes that want something different each, with history and counts."""
    rng = np.random.default_rng(17)

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    rows = []
    for lane in range(num):
        is_beam = pick(True, False, False, False)
        params = SamplingParams(
            temperature=0.0 if is_beam else pick(0.0, 0.7, 1.0, 2.0),
            top_k=pick(0, 0, 5, 50),
            top_p=pick(1.0, 1.0, 0.9, 0.3),
            min_p=pick(0.0, 0.0, 0.02),
            typical_p=pick(1.0, 1.0, 0.8),
            repetition_penalty=pick(1.0, 1.0, 1.3),
            presence_penalty=pick(0.0, 0.0, 0.5),
            frequency_penalty=pick(0.0, 0.0, 0.1),
            logit_bias=pick((), (), ((3, 2.5), (5, float("-inf")))),
            min_tokens=pick(0, 0, 3),
            logprobs=pick(None, None, 0, 4),
            beam_width=2 if is_beam else None,
        )
        words = pick((), (), ((1, 2), (4, 5, 6), (9,)))
        rows.append(
            row(params, seed=lane, num_prompt=2, stop_ids=(8,), bad_word_ids=words, vocab=VOCAB)
        )
    history = rng.integers(0, 12, (num, CONTEXT)).astype(np.int32)
    return logits(num, VOCAB, seed=2), stack(rows), history, rng.integers(3, CONTEXT + 1, num)


def _rows(sampled: Sampled, index) -> list[bytes]:
    return [np.asarray(part[index]).tobytes() for part in sampled]


def test_no_bit_of_a_lane_depends_on_its_neighbours() -> None:
    """Alone among greedy lanes of other logits, with all filters off, a lane is what it was."""
    num = 64
    x, params, history, counts = _mixed(num)
    together = sample(x, params, history, counts)
    others = logits(num, VOCAB, seed=9)
    plain = lanes(num, vocab=VOCAB)
    for lane in range(num):
        is_mine = np.arange(num) == lane

        def alone(mine, other, is_mine=is_mine):
            return np.where(is_mine.reshape(-1, *[1] * (mine.ndim - 1)), mine, other)

        solo = sample(
            alone(x, others),
            type(params)(*map(alone, params, plain)),
            alone(history, np.zeros_like(history)),
            counts,
        )
        assert _rows(solo, lane) == _rows(together, lane), f"lane {lane}"


@pytest.mark.parametrize("num", [64, 128, 192])
def test_no_bit_of_a_lane_depends_on_its_place_or_the_number_of_lanes(num: int) -> None:
    x, params, history, counts = _mixed(64)
    together = sample(x, params, history, counts)
    order = np.random.default_rng(num).permutation(np.arange(num) % 64)
    moved = type(params)(*(part[order] for part in params))
    again = sample(x[order], moved, history[order], counts[order])
    for place, lane in enumerate(order):
        assert _rows(again, place) == _rows(together, lane), f"lane {lane} at {place}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_lane_with_a_bad_logit_is_reported_and_the_others_are_not(bad, temperature) -> None:
    x = logits(3, VOCAB)
    x[1, 17] = bad
    params = lanes(3, vocab=VOCAB, temperature=temperature, logprobs=2, logit_bias=((17, 1.0),))
    sampled = sample(x, params)
    assert sampled.tokens[1] == INVALID_TOKEN
    assert sampled.logprobs[1] == sampled.ranks[1] == 0
    assert (sampled.tokens[[0, 2]] >= 0).all()
    assert np.isfinite(sampled.top_logprobs).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lane_with_no_token_left_is_reported(temperature: float) -> None:
    bans = tuple((token, float("-inf")) for token in range(5))
    params = stack(
        [
            row(SamplingParams(temperature=temperature, logit_bias=bans[:n]), vocab=5)
            for n in (4, 5, 0)
        ]
    )
    tokens = sample(logits(3, 5), params).tokens
    assert tokens[0] == 4
    assert tokens[1] == INVALID_TOKEN
    assert tokens[2] >= 0


def _assert_likely(counts: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's test, at one in ten thousand; rare outcomes are counted together."""
    rare = expected < 8
    cells = [
        (counts[rare].sum(), expected[rare].sum()),
        *zip(counts[~rare], expected[~rare], strict=True),
    ]
    seen, wanted = np.array([cell for cell in cells if cell[1] > 0]).T
    freedom = max(1, len(seen) - 1)
    # The quantile by Wilson and Hilferty.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    assert ((seen - wanted) ** 2 / wanted).sum() < max(limit, 15.2)
