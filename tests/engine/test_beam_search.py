"""The beam search against Hugging Face's definition, transcribed, and against brute force."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpaged.engine.beam_search import BeamSearch, Hypothesis, Step
from jaxpaged.request import EarlyStopping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A search over a model whose tokens depend on the one before and on the position."""

    vocab: int = 7
    width: int = 3
    max_tokens: int = 6
    stop_ids: tuple[int, ...] = (2,)
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    seed: int = 0
    stop_boost: float = 0.0
    """Added to the logits of stop tokens."""

    def table(self) -> np.ndarray:
        """Log-probabilities `[position, token before, token]`."""
        random = np.random.default_rng(self.seed)
        logits = 2 * random.standard_normal((self.max_tokens, self.vocab, self.vocab))
        logits[:, :, list(self.stop_ids)] += self.stop_boost
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


CASES = st.builds(
    Case,
    vocab=st.integers(5, 12),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 12),
    stop_ids=st.sampled_from([(), (2,), (0, 4), (1, 2, 3)]),
    length_penalty=st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 5.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    seed=st.integers(0, 2**32),
    stop_boost=st.sampled_from([-3.0, 0.0, 2.0, 4.0]),
)


class Search:
    """A search that runs on a table and keeps the tokens of its running beams."""

    def __init__(
        self, case: Case, *, num_candidates: int | None = None, as_strings: bool = False
    ) -> None:
        self._table = case.table()
        self._num_candidates = num_candidates
        # Stop tokens as the search's own, or found by its caller.
        self._found_ids = case.stop_ids if as_strings else ()
        self.search = BeamSearch(
            width=case.width,
            max_tokens=case.max_tokens,
            stop_ids={} if as_strings else {token: str(token) for token in case.stop_ids},
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
        )
        self.histories: list[list[tuple[int, ...]]] = [[()]]

    def run(self) -> list[Hypothesis]:
        while not self.search.is_finished:
            self.step()
        return self.search.best(1000)

    def step(self) -> Step:
        beams = self.histories[-1]
        assert self.search.num_generated == len(beams[0])
        assert self.search.num_running == len(beams)
        step = self.search.advance([self.candidates(beam) for beam in beams], self.stopped_by)
        after = [(*beams[branch.parent], branch.token_id) for branch in step.branches]
        assert len(set(after)) == len(after)
        for branch, tokens in zip(step.branches, after, strict=True):
            assert branch.cumulative_logprob == pytest.approx(self.total(tokens))
        self.histories.append(after)
        return step

    def stopped_by(self, beam: int, token: int) -> str | None:
        assert beam < len(self.histories[-1])
        return str(token) if token in self._found_ids else None

    def candidates(self, tokens: tuple[int, ...]) -> list[tuple[int, float]]:
        row = self._table[len(tokens), tokens[-1] if tokens else 0]
        order = np.argsort(-row, kind="stable")[: self._num_candidates]
        return list(zip(order.tolist(), row[order].tolist(), strict=True))

    def logprobs(self, tokens: tuple[int, ...]) -> list[float]:
        places = enumerate(zip((0, *tokens), tokens, strict=False))
        return [float(self._table[position, *pair]) for position, pair in places]

    def total(self, tokens: tuple[int, ...]) -> float:
        return sum(self.logprobs(tokens))


def hugging_face(case: Case) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and scores by the definition of transformers' `_beam_search`, for a batch of one.

    Arrays of fixed width in which -1e9 marks what is not there, as in the original.
    """
    table, width, none = case.table(), case.width, -1e9
    running, running_scores = [()] * width, np.full(width, none)
    running_scores[0] = 0.0
    ended, scores, is_ended = [()] * width, np.full(width, none), np.zeros(width, bool)
    num_kept = max(2, 1 + len(case.stop_ids)) * width
    for length in range(1, case.max_tokens + 1):
        rows = np.stack([table[length - 1, tokens[-1] if tokens else 0] for tokens in running])
        flat = (rows + running_scores[:, None]).ravel()
        top = np.argsort(-flat, kind="stable")[:num_kept]
        sums = flat[top]
        kept = [(*running[index // case.vocab], int(index % case.vocab)) for index in top]
        stops = np.array([t[-1] in case.stop_ids or length == case.max_tokens for t in kept])
        going = np.argsort(-(sums + stops * none), kind="stable")[:width]
        running, running_scores = [kept[i] for i in going], (sums + stops * none)[going]
        just_ended = stops & (np.arange(len(kept)) < width)
        merged = np.concatenate([scores, sums / length**case.length_penalty + ~just_ended * none])
        best = np.argsort(-merged, kind="stable")[:width]
        ended, scores = [(ended + kept)[i] for i in best], merged[best]
        is_ended = np.concatenate([is_ended, just_ended])[best]
        is_long = case.early_stopping == "never" and case.length_penalty > 0
        reached = running_scores[0] / (case.max_tokens if is_long else length) ** (
            case.length_penalty
        )
        can_improve = reached > (scores.min() if is_ended.all() else none)
        if not can_improve or (is_ended.all() and case.early_stopping is True) or stops.all():
            break
    return [(t, float(s)) for t, s, e in zip(ended, scores, is_ended, strict=True) if e]


@given(CASES)
@example(Case(width=1, early_stopping=True))
@example(Case(max_tokens=1, width=4))
def test_hypotheses_are_those_of_hugging_face(case: Case) -> None:
    search = Search(case)
    found = search.run()
    expected = hugging_face(case)
    assert [hypothesis.token_ids for hypothesis in found] == [tokens for tokens, _ in expected]
    for hypothesis, (tokens, score) in zip(found, expected, strict=True):
        assert hypothesis.score == pytest.approx(score, rel=1e-12)
        assert hypothesis.logprobs == tuple(search.logprobs(tokens))
        assert hypothesis.cumulative_logprob == pytest.approx(search.total(tokens))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_cases_differ_in_what_early_stopping_gives(early_stopping: EarlyStopping) -> None:
    # Or the property above would show little.
    def lengths(rule: EarlyStopping) -> list[int]:
        searches = [
            Search(Case(seed=seed, max_tokens=12, stop_boost=2.0, early_stopping=rule))
            for seed in range(30)
        ]
        for search in searches:
            search.run()
        return [search.search.num_generated for search in searches]

    others = [rule for rule in (True, False, "never") if rule != early_stopping]
    assert all(lengths(early_stopping) != lengths(other) for other in others)


@given(CASES)
def test_hypotheses_are_complete_and_say_why(case: Case) -> None:
    search = Search(case)
    found = search.run()
    assert len(found) == case.width
    assert len({hypothesis.token_ids for hypothesis in found}) == case.width
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    for hypothesis in found:
        *before, last = hypothesis.token_ids
        assert not set(before) & set(case.stop_ids)
        if last in case.stop_ids:
            assert (hypothesis.finish_reason, hypothesis.stop_reason) == ("stop", str(last))
        else:
            assert (hypothesis.finish_reason, hypothesis.stop_reason) == ("length", None)
            assert len(hypothesis.token_ids) == case.max_tokens
        for length, beam in enumerate(hypothesis.beams):
            assert search.histories[length][beam] == hypothesis.token_ids[:length]
    assert search.search.best(2) == found[:2]


@given(CASES)
def test_as_many_candidates_as_beams_and_stop_tokens_are_enough(case: Case) -> None:
    few = Search(case, num_candidates=case.width + len(case.stop_ids))
    assert few.run() == Search(case).run()


@given(CASES)
def test_what_the_caller_finds_ends_beams_as_stop_tokens_do(case: Case) -> None:
    assert Search(case, as_strings=True).run() == Search(case).run()


@settings(max_examples=30)
@given(CASES.filter(lambda case: case.vocab < 8), st.sampled_from(["never", False]))
def test_a_search_wide_enough_for_everything_finds_the_best(case: Case, rule) -> None:
    # With a penalty of 0 both rules are exact: sums only fall.
    case = dataclasses.replace(
        case, max_tokens=3, width=case.vocab**3, early_stopping=rule, length_penalty=0.0
    )
    going = [token for token in range(case.vocab) if token not in case.stop_ids]
    everything = [
        (*before, last)
        for length in range(1, 4)
        for before in itertools.product(going, repeat=length - 1)
        for last in (range(case.vocab) if length == 3 else case.stop_ids)
    ]
    search = Search(case)
    found = [hypothesis.token_ids for hypothesis in search.run()]
    assert found == sorted(everything, key=search.total, reverse=True)


@given(CASES)
def test_one_beam_that_stops_early_is_greedy(case: Case) -> None:
    search = Search(dataclasses.replace(case, width=1, early_stopping=True))
    tokens: tuple[int, ...] = ()
    while len(tokens) < case.max_tokens and not set(tokens) & set(case.stop_ids):
        tokens = (*tokens, search.candidates(tokens)[0][0])
    assert [hypothesis.token_ids for hypothesis in search.run()] == [tokens]


def small_search(**changes) -> BeamSearch:
    usual = {"width": 2, "max_tokens": 8, "stop_ids": {9: "</s>"}}
    return BeamSearch(**usual | changes)


def test_the_score_counts_the_token_that_ended_the_hypothesis() -> None:
    search = small_search(length_penalty=2.0)
    step = search.advance([[(1, -1.0), (2, -3.0), (9, -4.0)]])
    assert [(b.parent, b.token_id) for b in step.branches] == [(0, 1), (0, 2)]
    search.advance([[(9, -0.5), (3, -1.5)], [(9, -8.0), (3, -9.0)]])
    (best,) = search.best(2)
    assert best.token_ids == (1, 9)
    assert best.cumulative_logprob == -1.5
    assert best.score == -1.5 / 2**2
    assert best.beams == (0, 0)


def test_a_complete_continuation_that_is_not_among_the_likeliest_is_dropped() -> None:
    search = small_search()
    step = search.advance([[(1, -1.0), (2, -1.5), (9, -2.0), (3, -2.5)]])
    assert [branch.token_id for branch in step.branches] == [1, 2]
    assert search.best(2) == []
    step = search.advance([[(9, -0.1), (4, -0.2)], [(5, -9.0)]])
    assert [(branch.parent, branch.token_id) for branch in step.branches] == [(0, 4), (1, 5)]
    assert [hypothesis.token_ids for hypothesis in search.best(2)] == [(1, 9)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_over"),
    [
        (True, 1.0, True),
        # Ended hypotheses score -1; the running beam scores -2.2 / 2 now, -2.2 / 8 at best.
        (False, 1.0, True),
        ("never", 1.0, False),
        # Without a penalty it stays at -2.2.
        ("never", 0.0, True),
        # -2.2 / 4 against -1.
        (False, 2.0, False),
    ],
)
def test_early_stopping_rules(
    early_stopping: EarlyStopping, length_penalty: float, is_over: bool
) -> None:
    search = small_search(early_stopping=early_stopping, length_penalty=length_penalty)
    search.advance([[(9, -0.9), (1, -1.0), (2, -2.0)]])
    assert not search.is_finished
    step = search.advance([[(9, -0.1), (3, -1.2)], [(3, -9.0)]])
    assert search.is_finished == step.is_finished == is_over
    assert search.num_running == len(step.branches) == (0 if is_over else 2)
    assert [hypothesis.token_ids for hypothesis in search.best(2)] == (
        [(1, 9), (9,)] if length_penalty > 0 else [(9,), (1, 9)]
    )


def test_only_likely_continuations_are_asked_about() -> None:
    asked = []

    def stopped_by(beam: int, token: int) -> str | None:
        asked.append((beam, token))
        return "word" if token in (1, 2, 3) else None

    search = small_search(early_stopping="never")
    candidates = [(1, -1.0), (9, -1.1), (3, -1.2), (4, -1.3), (2, -1.4), (5, -1.5), (6, -1.6)]
    step = search.advance([candidates], stopped_by)
    assert asked == [(0, 1), (0, 3), (0, 4), (0, 2), (0, 5)]
    assert [branch.token_id for branch in step.branches] == [4, 5]
    reasons = [(h.token_ids, h.stop_reason) for h in search.best(2)]
    assert reasons == [((1,), "word"), ((9,), "</s>")]


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    search = small_search(max_tokens=1, width=3)
    candidates = [(9, -1.0), (1, -1.1), (2, -1.2), (3, -1.3)]
    step = search.advance([candidates], lambda _, token: "word" if token == 2 else None)
    assert step.is_finished
    assert [(h.token_ids[0], h.finish_reason, h.stop_reason) for h in search.best(3)] == [
        (9, "stop", "</s>"),
        (1, "length", None),
        (2, "stop", "word"),
    ]


def test_banned_tokens_are_no_continuations() -> None:
    search = small_search(width=3, max_tokens=2)
    step = search.advance([[(4, -0.5), (5, -0.9), (6, -math.inf), (-1, -math.inf)]])
    assert [branch.token_id for branch in step.branches] == [4, 5]
    assert search.advance([[(4, -0.5)], [(-1, -math.inf)]]).is_finished
    assert [hypothesis.token_ids for hypothesis in search.best(3)] == [(4, 4)]


def test_a_search_whose_every_continuation_stops_is_over() -> None:
    search = small_search(early_stopping="never")
    assert search.advance([[(1, -0.5), (2, -0.9), (9, -1.0)]], lambda *_: "word").is_finished
    assert [hypothesis.token_ids for hypothesis in search.best(2)] == [(1,), (2,)]


def test_equally_likely_continuations_keep_the_order_of_their_beams() -> None:
    search = small_search(max_tokens=2)
    search.advance([[(1, -1.0), (2, -1.0), (3, -1.0)]])
    search.advance([[(5, -1.0), (4, -1.0)], [(5, -1.0)]])
    assert [hypothesis.token_ids for hypothesis in search.best(2)] == [(1, 5), (1, 4)]


@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_extreme_penalties_of_long_hypotheses_give_numbers(length_penalty: float) -> None:
    search = small_search(
        length_penalty=length_penalty, max_tokens=3000, stop_ids={}, early_stopping="never"
    )
    search.advance([[(1, -0.001), (2, -2.0)]])
    while not search.is_finished:
        search.advance([[(1, -0.001), (2, -2.0)]] * 2)
    best, second = search.best(2)
    assert best.token_ids == (1,) * 3000
    assert -math.inf < second.score <= best.score < 0.0
    assert len(best.beams) == len(best.logprobs) == 3000
