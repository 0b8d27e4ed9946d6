"""The fixtures of generations against the dense oracle: no engine between them and the search.

What differs here is wrong in the search, the oracle or a fixture; what only differs in
`test_golden_engine` is wrong in the engine.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import Oracle
from tiny import write_tiny_llama

from jaxpaged.engine.beam_search import BeamSearch, Hypothesis
from jaxpaged.model.checkpoint import open_checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = ("frequent_stops", "biases", "tied_wide_heads", "mistral")


@dataclasses.dataclass(frozen=True)
class Dense:
    """A tiny model of the fixtures, one sequence at a time."""

    oracle: Oracle
    stop_ids: frozenset[int]

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """Behind every token, `[T, V]`."""
        logits = self.oracle.logits(token_ids)
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module", params=TINY)
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def dense(model, tmp_path_factory) -> Dense:
    folder = tmp_path_factory.mktemp("golden") / model
    settings = json.loads((GOLDEN / "beams.json").read_text())["models"][model]["settings"]
    checkpoint = open_checkpoint(write_tiny_llama(folder, **settings))
    return Dense(Oracle(checkpoint), checkpoint.tokenizer().eos_ids)


@pytest.fixture(scope="module")
def cases_of(model) -> Callable[[str], list[dict[str, Any]]]:
    def cases(name: str) -> list[dict[str, Any]]:
        return [
            case
            for case in json.loads((GOLDEN / name).read_text())["cases"]
            if case["model"] == model
        ]

    return cases


def changed(dense: Dense, scores: np.ndarray, history: list[int], case: dict[str, Any]):
    """Scores of next tokens with repetition penalty and bans."""
    params, scores = case["params"], scores.copy()
    seen = sorted(set(history))
    penalty = params.get("repetition_penalty", 1.0)
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    if len(history) - len(case["prompt_ids"]) < params.get("min_tokens", 0):
        scores[sorted(dense.stop_ids)] = -np.inf
    return scores


def search(dense: Dense, case: dict[str, Any]) -> list[Hypothesis]:
    params, prompt_ids = case["params"], case["prompt_ids"]
    width = params["beam_width"]
    beams = BeamSearch(
        width=width,
        max_tokens=params["max_tokens"],
        stop_ids={token: str(token) for token in dense.stop_ids},
        length_penalty=params.get("length_penalty", 1.0),
        early_stopping=params.get("early_stopping", False),
    )
    histories = [prompt_ids]
    while histories:
        candidates = []
        for history in histories:
            scores = changed(dense, dense.logprobs(history)[-1], history, case)
            top = np.argsort(-scores, kind="stable")[: width + len(dense.stop_ids)]
            candidates.append(list(zip(top.tolist(), scores[top].tolist(), strict=True)))
        step = beams.advance(candidates)
        histories = [[*histories[branch.parent], branch.token_id] for branch in step.branches]
    return beams.best(params["n"])


def test_beams_are_those_of_transformers(dense, cases_of) -> None:
    cases = cases_of("beams.json")
    assert len(cases) >= 8
    for case in cases:
        found, where = search(dense, case), str(case)
        assert [list(h.token_ids) for h in found] == [b["token_ids"] for b in case["beams"]], where
        for hypothesis, beam in zip(found, case["beams"], strict=True):
            np.testing.assert_allclose(hypothesis.logprobs, beam["logprobs"], atol=2e-4)
            assert hypothesis.score == pytest.approx(beam["score"], abs=1e-3, rel=1e-3), where


def test_greedy_tokens_and_logprobs_are_those_of_transformers(dense, cases_of) -> None:
    cases = cases_of("logprobs.json")
    assert len(cases) >= 8
    for case in cases:
        prompt_ids, token_ids = case["prompt_ids"], case["token_ids"]
        assert len(token_ids) == case["params"]["max_tokens"] or token_ids[-1] in dense.stop_ids
        history = prompt_ids + token_ids
        logits, logprobs = dense.oracle.logits(history), dense.logprobs(history)
        for place in range(len(prompt_ids), len(history)):
            scores = changed(dense, logits[place - 1], history[:place], case)
            assert history[place] == scores.argmax(), str(case)
        prompt, sampled = case["prompt_logprobs"], case["logprobs"]
        rows, tokens = np.arange(len(history) - 1), history[1:]
        own = logprobs[rows, tokens]
        np.testing.assert_allclose(own, prompt["own"] + sampled["own"], atol=2e-4)
        top_ids = np.array(prompt["top_ids"] + sampled["top_ids"])
        top = np.array(prompt["top"] + sampled["top"])
        np.testing.assert_allclose(logprobs[rows[:, None], top_ids], top, atol=2e-4)
        np.testing.assert_allclose(np.sort(logprobs[:-1])[:, :-6:-1], top, atol=2e-4)
        ranks = np.array(prompt["ranks"] + sampled["ranks"])
        assert ((own[:, None] >= top - 4e-4).sum(axis=1) >= 6 - ranks).all()
