"""Tiny models and the engine around them."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from oracle import Oracle
from tiny import write_scripted_llama, write_tiny_llama

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.request import Completion


@dataclasses.dataclass(frozen=True)
class TinyCase:
    """A tiny model with prompts and what a dense greedy decoder makes of them."""

    folder: pathlib.Path
    prompts: list[list[int]]
    max_tokens: list[int]
    expected: list[list[int]]


TINY_MODELS = {
    "heads_4_2_with_biases": {
        "heads": 4,
        "kv_heads": 2,
        "hidden": 32,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "heads_9_3_width_64": {"heads": 9, "kv_heads": 3, "hidden": 64, "head_dim": 64},
}

PROMPT_LENS = (1, 15, 16, 17, 3, 40, 64, 65, 5, 29)
NEW_TOKENS = (12, 5, 17, 1, 24, 9, 16, 8, 20, 3)


@pytest.fixture(scope="session", params=TINY_MODELS)
def tiny_case(request, tmp_path_factory) -> TinyCase:
    """Each tiny model once, with the dense oracle's tokens."""
    folder = tmp_path_factory.mktemp("models") / request.param
    write_tiny_llama(folder, **TINY_MODELS[request.param])
    oracle = Oracle(open_checkpoint(folder))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 259, n).tolist() for n in PROMPT_LENS]
    expected = [oracle.greedy(prompt, new) for prompt, new in zip(prompts, NEW_TOKENS, strict=True)]
    return TinyCase(folder, prompts, list(NEW_TOKENS), expected)


@pytest.fixture(scope="session")
def engine_for() -> Callable[[pathlib.Path, EngineConfig], Engine]:
    """One engine per model and settings, shared by the tests: compiling is what takes time."""
    return functools.cache(Engine.load)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory) -> Callable[..., Engine]:
    """Builds an engine on a model that follows each token by a given one."""

    def build(successors: dict[int, int], config: EngineConfig | None = None, **model) -> Engine:
        folder = tmp_path_factory.mktemp("scripted") / "model"
        write_scripted_llama(folder, successors, **model)
        return Engine.load(folder, config or EngineConfig(max_model_len=64, max_num_seqs=8))

    return build


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Callable[..., pathlib.Path]:
    """Folder of a random model of 64 wide; one for each way of asking, shared by all tests.

    Its end-of-sequence tokens are 2 (the tokenizer's), 5 and 7.
    """

    @functools.cache
    def written(**model) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("tiny") / "model"
        return write_tiny_llama(folder, **{"hidden": 64, "eos_token_id": (5, 7)} | model)

    return written


def run_requests(
    engine: Engine, requests: list[Request], *, steps_between: int = 0
) -> list[list[Completion]]:
    """Each request's completions; the engine must be sound after each step and empty at the end.

    Args:
        engine: Has nothing to do yet.
        requests: Their ids have to differ.
        steps_between: Steps run after each request is added; 0 adds all of them at once.
    """
    done: dict[int, list[Completion]] = {}

    def step() -> None:
        for completion in engine.step():
            done.setdefault(completion.request_id, []).append(completion)
        engine.check_integrity()

    for request in requests:
        engine.add_request(request)
        for _ in range(steps_between):
            step()
    while engine.has_work():
        step()
    assert engine.num_unfinished() == 0
    assert engine.stats.used_blocks == engine.stats.running == engine.stats.waiting == 0
    return [done[request.request_id] for request in requests]


def run_all(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    addresses: list[int] | None = None,
) -> list[Completion]:
    """Completions of all prompts, in order; the engine must be empty and sound afterwards."""
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(
            Request(
                request_id=index,
                prompt_ids=tuple(prompt),
                params=param,
                address=index if addresses is None else addresses[index],
            )
        )
    done: dict[int, Completion] = {}
    while engine.has_work():
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
        engine.check_integrity()
    assert engine.num_unfinished() == 0
    return [done[index] for index in range(len(prompts))]


@pytest.fixture(scope="session")
def run() -> Callable[..., list[Completion]]:
    """`run_all` as a fixture."""
    return run_all


@pytest.fixture(scope="session")
def run_samples() -> Callable[..., list[list[Completion]]]:
    """`run_requests` as a fixture."""
    return run_requests
