"""What parameters change on the logits, against plain Python that does it token by token."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from sampler_lanes import CONTEXT, lanes, logits, row, sample, stack

from jaxpaged import SamplingParams
from jaxpaged.engine import lane_params, penalties
from jaxpaged.engine.lane_params import LaneParams
from jaxpaged.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED

VOCAB = 37
BAN = float("-inf")
_apply = jax.jit(penalties.apply)


def apply(x: np.ndarray, params: LaneParams, history: np.ndarray, num_tokens) -> np.ndarray:
    counts = np.broadcast_to(np.asarray(num_tokens, np.int32), len(x))
    return np.asarray(_apply(x, LaneParams(*map(np.asarray, params)), history, counts))


@dataclasses.dataclass(kw_only=True)
class Case:
    """One lane, and by plain Python what becomes of its logits."""

    params: SamplingParams
    history: list[int]
    num_prompt: int
    stop_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    def row(self) -> LaneParams:
        return row(
            self.params,
            num_prompt=self.num_prompt,
            stop_ids=self.stop_ids,
            bad_word_ids=self.bad_word_ids,
            vocab=VOCAB,
        )

    def expected(self, x: np.ndarray) -> list[float]:
        p, completion = self.params, self.history[self.num_prompt :]
        left = [float(value) for value in x]
        for token, value in p.logit_bias:
            left[token] += value
        if len(completion) < p.min_tokens:
            for token in self.stop_ids:
                left[token] = BAN
        for word in self.bad_word_ids:
            before = list(word[:-1])
            if completion[len(completion) - len(before) :] == before:
                left[word[-1]] = BAN
        for token in set(self.history):
            if left[token] > 0:
                left[token] /= p.repetition_penalty
            else:
                left[token] *= p.repetition_penalty
        for token in set(completion):
            left[token] -= p.frequency_penalty * completion.count(token)
            left[token] -= p.presence_penalty
        return left


def check(cases: list[Case]) -> None:
    x = logits(len(cases), VOCAB, seed=4)
    history = np.random.default_rng(5).integers(-1, VOCAB, (len(cases), CONTEXT)).astype(np.int32)
    for lane, case in enumerate(cases):
        history[lane, : len(case.history)] = case.history  # what follows must not count
    counts = [len(case.history) for case in cases]
    changed = apply(x, stack([case.row() for case in cases]), history, counts)
    expected = np.array([case.expected(x[lane]) for lane, case in enumerate(cases)])
    np.testing.assert_allclose(changed, expected, rtol=2e-6, atol=2e-6)


def random_case(rng: np.random.Generator) -> Case:
    history = rng.integers(0, 9, rng.integers(1, CONTEXT + 1)).tolist()

    def pick(off, on):
        return on if rng.random() < 0.5 else off

    words = {tuple(rng.integers(0, 9, rng.integers(1, 4)).tolist()) for _ in range(12)}
    return Case(
        params=SamplingParams(
            repetition_penalty=pick(1.0, float(rng.uniform(0.5, 2))),
            presence_penalty=pick(0.0, float(rng.uniform(-2, 2))),
            frequency_penalty=pick(0.0, float(rng.uniform(-1, 1))),
            logit_bias=pick((), ((3, 1.5), (11, -4.0), (3, 0.5), (30, BAN))),
            min_tokens=pick(0, int(rng.integers(0, CONTEXT))),
        ),
        history=history,
        num_prompt=int(rng.integers(0, len(history) + 1)),
        stop_ids=(1, 3, 36),
        bad_word_ids=pick((), tuple(words)),
    )


def test_random_cases_equal_plain_python() -> None:
    rng = np.random.default_rng(6)
    check([random_case(rng) for _ in range(192)])


def test_prompt_tokens_count_for_the_repetition_penalty_only() -> None:
    prompt = [5, 5, 6]
    shared = {"history": [*prompt, 7], "num_prompt": 3}
    x = np.ones((3, VOCAB), np.float32)
    history = np.array([[5, 5, 6, 7] + [9] * 4] * 3, np.int32)
    cases = [
        Case(params=SamplingParams(repetition_penalty=2.0), **shared),
        Case(params=SamplingParams(presence_penalty=2.0), **shared),
        Case(params=SamplingParams(frequency_penalty=2.0), **shared),
    ]
    changed = apply(x, stack([case.row() for case in cases]), history, 4)
    assert changed[0, 5:8].tolist() == [0.5, 0.5, 0.5]
    assert changed[1, 5:8].tolist() == [1, 1, -1]
    assert changed[2, 5:8].tolist() == [1, 1, -1]
    assert (np.delete(changed, [5, 6, 7], axis=1) == 1).all()


def test_the_split_of_prompt_and_completion_moves_with_every_token() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25, repetition_penalty=1.1)
    tokens = [4, 4, 2, 4, 8, 4, 2, 2]
    check([Case(params=params, history=tokens[:n], num_prompt=2) for n in range(2, 9)])


def test_a_repetition_penalty_lowers_negative_logits_too() -> None:
    x = np.array([[2.0, -2.0, 0.0] + [0.0] * (VOCAB - 3)], np.float32)
    case = Case(params=SamplingParams(repetition_penalty=4.0), history=[0, 1, 2], num_prompt=0)
    changed = apply(x, stack([case.row()]), np.array([[0, 1, 2]], np.int32), 3)
    assert changed[0, :3].tolist() == [0.5, -8.0, 0.0]


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e4])
def test_penalties_leave_finite_logits_finite(penalty: float) -> None:
    x = np.full((1, VOCAB), 1e35, np.float32)
    x[0, 1:3] = [-1e35, 0.0]
    case = Case(params=SamplingParams(repetition_penalty=penalty), history=[0, 1, 2], num_prompt=0)
    changed = apply(x, stack([case.row()]), np.array([[0, 1, 2]], np.int32), 3)
    assert np.isfinite(changed).all()
    assert changed[0, 2] == 0


def test_a_penalty_does_not_bring_back_a_banned_token() -> None:
    params = SamplingParams(
        logit_bias=((2, BAN),),
        repetition_penalty=0.5,
        presence_penalty=-100.0,
        frequency_penalty=-100.0,
    )
    case = Case(params=params, history=[2, 2], num_prompt=1)
    x = logits(1, VOCAB)
    changed = apply(x, stack([case.row()]), np.array([[2, 2]], np.int32), 2)
    assert changed[0, 2] == BAN


def test_a_bias_moves_the_choice_by_as_much_as_it_says() -> None:
    x = np.zeros((3, VOCAB), np.float32)
    x[:, 9] = 3.0
    biases = (((4, 2.5),), ((4, 3.5),), ((4, 2.0), (4, 2.0)))  # a token's entries add up
    rows = [row(SamplingParams(logit_bias=bias), vocab=VOCAB) for bias in biases]
    assert sample(x, stack(rows)).tokens.tolist() == [9, 4, 4]
    odds = lanes(6400, vocab=VOCAB, temperature=1.0, logit_bias=((4, math.log(36.0)),))
    tokens = sample(np.zeros((6400, VOCAB), np.float32), odds).tokens
    assert abs(np.mean(tokens == 4) - 0.5) < 0.02


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_every_stop_token_until_then_and_no_longer(temperature: float) -> None:
    stop_ids = (0, 7, 36)
    params = SamplingParams(temperature=temperature, min_tokens=3)
    one = row(params, num_prompt=4, stop_ids=stop_ids, vocab=VOCAB)
    x = np.zeros((12, VOCAB), np.float32)
    x[np.arange(12), np.resize(stop_ids, 12)] = 30.0
    for num_sampled in range(5):
        tokens = sample(x, stack([one] * 12), num_tokens=4 + num_sampled).tokens
        stopped = np.isin(tokens, stop_ids)
        assert stopped.all() if num_sampled >= 3 else not stopped.any()


def test_a_bad_word_is_banned_where_its_beginning_was_sampled() -> None:
    word = (5, 6, 7)
    ends = {
        (5, 6): True,
        (1, 5, 6): True,
        (5, 5, 6): True,
        (5, 6, 1): False,
        (6, 5): False,
        (6,): False,
        (): False,
    }
    for completion, is_banned in ends.items():
        for prompt in ([], [1, 2], [5]):
            tokens = [*prompt, *completion]
            case = Case(
                params=SamplingParams(),
                history=tokens,
                num_prompt=len(prompt),
                bad_word_ids=(word, (8,)),
            )
            history = np.full((1, CONTEXT), 5, np.int32)
            history[0, : len(tokens)] = tokens
            changed = apply(
                np.zeros((1, VOCAB), np.float32), stack([case.row()]), history, len(tokens)
            )
            banned = set(np.flatnonzero(changed[0] == BAN).tolist())
            assert banned == ({7, 8} if is_banned else {8}), (prompt, completion)


def test_a_bad_word_lies_wholly_in_the_completion() -> None:
    case = Case(params=SamplingParams(), history=[5, 6], num_prompt=1, bad_word_ids=((5, 6, 7),))
    changed = apply(
        np.zeros((1, VOCAB), np.float32), stack([case.row()]), np.array([[5, 6]], np.int32), 2
    )
    assert np.isfinite(changed).all()


def test_the_longest_and_the_most_bad_words_fit() -> None:
    rng = np.random.default_rng(8)
    longest = tuple(range(MAX_BAD_WORD_TOKENS))
    words = {longest}
    while len(words) < MAX_BAD_WORDS:
        words.add(tuple(rng.integers(0, 9, rng.integers(2, MAX_BAD_WORD_TOKENS + 1)).tolist()))
    for length in (0, 3, len(longest) - 2, len(longest) - 1, len(longest)):
        history = [20, *longest[:length]]
        check(
            [
                Case(
                    params=SamplingParams(),
                    history=history,
                    num_prompt=1,
                    bad_word_ids=tuple(words),
                )
            ]
        )


def test_bad_words_are_never_completed_over_a_whole_completion() -> None:
    words = ((1, 2), (2, 1, 1), (3,), (0, 0, 0))
    num = 64
    params = stack(
        [
            row(SamplingParams(temperature=1.0), seed=seed, bad_word_ids=words, vocab=5)
            for seed in range(num)
        ]
    )
    history = np.zeros((num, CONTEXT), np.int32)
    for step in range(CONTEXT):
        history[:, step] = sample(np.zeros((num, 5), np.float32), params, history, step).tokens
    for tokens in history.tolist():
        for word in words:
            windows = [tuple(tokens[i : i + len(word)]) for i in range(CONTEXT)]
            assert word not in windows
    assert set(history.ravel().tolist()) == {0, 1, 2, 4}


def fault(params: SamplingParams, stop_ids=(), bad_word_ids=()) -> str | None:
    return lane_params.fault(params, stop_ids=stop_ids, bad_word_ids=bad_word_ids, vocab_size=1000)


def test_parameters_that_fit_have_no_fault() -> None:
    bias = tuple((token, 1.0) for token in range(MAX_BIASED))
    words = tuple((1, *divmod(i, 9)) for i in range(MAX_BAD_WORDS))
    assert fault(SamplingParams(logit_bias=bias), (5000,), (words * 2)) is None
    assert fault(SamplingParams(min_tokens=1), tuple(range(MAX_BIASED)), ((1,) * 8,)) is None


def test_parameters_that_do_not_fit_are_named() -> None:
    bias = tuple((token, 1.0) for token in range(MAX_BIASED))
    for wanted in (
        fault(SamplingParams(logit_bias=bias, min_tokens=1), (7,)),
        fault(SamplingParams(logit_bias=bias), (), ((MAX_BIASED,),)),
    ):
        assert wanted is not None
        assert "321 tokens; at most 320" in wanted
    assert "vocabulary of 1000" in str(fault(SamplingParams(logit_bias=((1000, 1.0),))))
    words = tuple((i, i) for i in range(MAX_BAD_WORDS + 1))
    assert "65 sequences" in str(fault(SamplingParams(), (), words))
    assert "9 tokens; at most 8" in str(fault(SamplingParams(), (), (tuple(range(9)),)))
