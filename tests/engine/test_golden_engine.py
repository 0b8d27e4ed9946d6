"""Beams, penalties, windows and log-probabilities as Hugging Face transformers finds them.

The fixtures were made by `scripts/make_golden.py`; `tests/golden/README.md` says with what. All
cases of a model run in one batch, whatever their parameters.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny import write_tiny_llama

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.request import Completion, TokenLogprob

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
MODELS = ("frequent_stops", "biases", "tied_wide_heads", "mistral", "packaged")

# float32 sums in another order; the packaged model has 30 layers and logits up to 30.
TOLERANCE = collections.defaultdict(lambda: 2e-4, packaged=4e-3)


@dataclasses.dataclass(frozen=True)
class Fixture:
    """The content of a fixture file."""

    models: Mapping[str, Mapping[str, Any]]
    cases: list[dict[str, Any]]

    def of(self, model: str) -> list[dict[str, Any]]:
        return [case for case in self.cases if case["model"] == model]


def load(name: str) -> Fixture:
    return Fixture(**json.loads((GOLDEN / name).read_text()))


@pytest.fixture(scope="module")
def beams() -> Fixture:
    return load("beams.json")


@pytest.fixture(scope="module")
def logprobs() -> Fixture:
    return load("logprobs.json")


@pytest.fixture(scope="module")
def folder_of(packaged_model, tmp_path_factory) -> Callable[[str], pathlib.Path]:
    """Where a fixture's model is; tiny ones are written as they were for transformers."""
    known = {"packaged": packaged_model}

    def find(name: str) -> pathlib.Path:
        if name not in known:
            described = load("beams.json").models[name]
            folder = tmp_path_factory.mktemp("golden") / name
            write_tiny_llama(folder, **described["settings"])
            tensors = safetensors.numpy.load_file(folder / "model.safetensors")
            digest = hashlib.sha256(b"".join(tensors[key].tobytes() for key in sorted(tensors)))
            assert digest.hexdigest() == described["weights"], "tiny models changed: make goldens"
            known[name] = folder
        return known[name]

    return find


def completions(
    engine: Engine, cases: list[dict[str, Any]], more_params: Mapping[str, Any]
) -> list[list[Completion]]:
    """What the engine makes of all cases at once."""
    for index, case in enumerate(cases):
        params = SamplingParams(**case["params"], **more_params)
        engine.add_request(
            Request(request_id=index, prompt_ids=tuple(case["prompt_ids"]), params=params)
        )
    done: dict[int, list[Completion]] = collections.defaultdict(list)
    while engine.has_work():
        for completion in engine.step():
            done[completion.request_id].append(completion)
        engine.check_integrity()
    for samples in done.values():
        assert [completion.sample for completion in samples] == list(range(len(samples)))
    return [done[index] for index in range(len(cases))]


CONFIGS = {
    "roomy": EngineConfig(max_num_seqs=64, max_model_len=160, num_blocks=900, block_size=16),
    # Hardly more than the beams of one request: constant preemption, odd blocks, small chunks.
    "crowded": EngineConfig(
        max_num_seqs=6,
        max_model_len=160,
        num_blocks=60,
        block_size=7,
        max_num_batched_tokens=64,
    ),
}

# That preemption changes nothing, two models show, the second one with a window.
PAIRS = [
    *((model, "roomy") for model in MODELS),
    ("frequent_stops", "crowded"),
    ("mistral", "crowded"),
    pytest.param("biases", "crowded", marks=pytest.mark.slow),
    pytest.param("tied_wide_heads", "crowded", marks=pytest.mark.slow),
]


def check_beams(found: list[Completion], case: dict[str, Any], stop_ids: set[int]) -> None:
    model, expected = case["model"], case["beams"]
    where = f"{model}, {case['params']}, prompt {case['prompt_ids']}"
    assert [list(c.token_ids) for c in found] == [beam["token_ids"] for beam in expected], where
    for completion, beam in zip(found, expected, strict=True):
        last = beam["token_ids"][-1]
        is_stopped = last in stop_ids
        assert completion.finish_reason == ("stop" if is_stopped else "length"), where
        assert completion.stop_reason == (str(last) if is_stopped else "max_tokens"), where
        num_tokens = len(beam["token_ids"])
        tolerance = num_tokens * TOLERANCE[model]
        total = sum(beam["logprobs"])
        penalty = case["params"].get("length_penalty", 1.0)
        assert completion.cumulative_logprob == pytest.approx(total, abs=tolerance), where
        assert completion.score == pytest.approx(
            beam["score"], abs=tolerance / num_tokens**penalty
        ), where


@pytest.mark.parametrize(("model", "config"), PAIRS)
def test_beams_are_those_of_transformers(beams, engine_for, folder_of, model, config) -> None:
    engine = engine_for(folder_of(model), CONFIGS[config])
    cases = beams.of(model)
    if config == "crowded" and len(cases) > 24:
        # A crowd takes its time.
        cases = cases[::4]
    stop_ids = set(engine.tokenizer.eos_ids)
    assert len(cases) >= 8
    for found, case in zip(completions(engine, cases, {}), cases, strict=True):
        check_beams(found, case, stop_ids)


def test_logprobs_of_beams_are_those_of_transformers(beams, engine_for, folder_of) -> None:
    engine = engine_for(folder_of("frequent_stops"), CONFIGS["roomy"])
    # The engine's are the model's own, which penalties and bans do not change.
    plain = [
        case
        for case in beams.of("frequent_stops")
        if not {"repetition_penalty", "min_tokens"} & set(case["params"])
    ]
    for found, case in zip(completions(engine, plain, {"logprobs": 2}), plain, strict=True):
        for completion, beam in zip(found, case["beams"], strict=True):
            assert completion.logprobs is not None
            assert [entry.token_id for entry in completion.logprobs] == beam["token_ids"]
            np.testing.assert_allclose(
                [entry.logprob for entry in completion.logprobs],
                beam["logprobs"],
                atol=TOLERANCE["frequent_stops"],
            )
            assert all(len(entry.top) == 2 for entry in completion.logprobs)


def test_fixtures_of_beams_are_varied(beams, engine_for, folder_of) -> None:
    stop_ids = set(engine_for(folder_of("frequent_stops"), CONFIGS["roomy"]).tokenizer.eos_ids)
    ends = collections.Counter(
        (beam["token_ids"][-1] in stop_ids, len(beam["token_ids"]) < case["params"]["max_tokens"])
        for case in beams.of("frequent_stops")
        for beam in case["beams"]
    )
    # Nothing but a stop token ends a beam early.
    assert ends[False, True] == 0
    assert min(ends[True, True], ends[False, False]) > 40
    by_rule = collections.defaultdict(dict)
    for case in beams.cases:
        settings = dict(case["params"])
        rule = settings.pop("early_stopping", False)
        by_rule[case["model"], str(settings), str(case["prompt_ids"])][rule] = case["beams"]
    for one, other in ((True, False), (True, "never"), (False, "never")):
        pairs = [
            (rules[one], rules[other]) for rules in by_rule.values() if {one, other} <= {*rules}
        ]
        assert sum(a != b for a, b in pairs) > 4, (one, other)


def check_entries(
    found: Sequence[TokenLogprob], golden: dict[str, list[Any]], tolerance: float, where: str
) -> None:
    def close(ours: list[Any], theirs: list[Any]) -> None:
        np.testing.assert_allclose(ours, theirs, atol=tolerance, err_msg=where)

    assert len(found) == len(golden["own"]), where
    if not found:
        return
    close([entry.logprob for entry in found], golden["own"])
    close([[logprob for _, logprob in entry.top] for entry in found], golden["top"])
    for place, entry in enumerate(found):
        top_ids, rank = golden["top_ids"][place], golden["ranks"][place]
        # Of unlikely tokens many are about as likely.
        assert abs(entry.rank - rank) <= (rank > 1) + rank // 20, where
        if (-np.diff(golden["top"][place]) > 2 * tolerance).all():
            # The last of them may be mistaken for the next.
            assert [token for token, _ in entry.top][:-1] == top_ids[:-1], where


@pytest.mark.parametrize(("model", "config"), PAIRS)
def test_tokens_and_logprobs_are_those_of_transformers(
    logprobs, engine_for, folder_of, model: str, config: str
) -> None:
    engine = engine_for(folder_of(model), CONFIGS[config])
    cases = logprobs.of(model)
    assert len(cases) >= 6
    asked = {"logprobs": 5, "prompt_logprobs": 5}
    for (found,), case in zip(completions(engine, cases, asked), cases, strict=True):
        where = f"{model}, {case['params']}, prompt {case['prompt_ids']}"
        assert list(found.token_ids) == case["token_ids"], where
        assert found.logprobs is not None, where
        assert [entry.token_id for entry in found.logprobs] == case["token_ids"], where
        check_entries(found.logprobs, case["logprobs"], TOLERANCE[model], where)
        total = sum(case["logprobs"]["own"])
        assert found.cumulative_logprob == pytest.approx(total, abs=20 * TOLERANCE[model]), where
        assert found.prompt_logprobs is not None, where
        assert [entry.token_id for entry in found.prompt_logprobs] == case["prompt_ids"], where
        first, *others = found.prompt_logprobs
        assert (first.logprob, first.rank, first.top) == (None, None, ()), where
        check_entries(others, case["prompt_logprobs"], TOLERANCE[model], where)


def test_generate_gives_the_beams_of_each_prompt_one_after_the_other(
    beams, engine_for, folder_of
) -> None:
    engine = engine_for(folder_of("frequent_stops"), CONFIGS["roomy"])
    cases = [case for case in beams.of("frequent_stops") if case["params"]["n"] > 1][:2]
    params = cases[0]["params"]
    assert cases[1]["params"] == params
    found = engine.generate([case["prompt_ids"] for case in cases], SamplingParams(**params))
    assert [list(completion.token_ids) for completion in found] == [
        beam["token_ids"] for case in cases for beam in case["beams"]
    ]
    assert [completion.sample for completion in found] == [*range(params["n"])] * 2
