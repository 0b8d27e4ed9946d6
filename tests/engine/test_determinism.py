"""A row's bytes are its own: whatever the batch, its order, the chunks, blocks or preemptions.

Every setting breaks the work into steps in another way. What a row gives, tokens and
log-probabilities to the last bit, must be what it gives alone in the plainest engine there is.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.config import DType, KVDType, Preemption
from jaxpaged.request import Completion

MAX_MODEL_LEN = 128


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny model and how it computes."""

    dtype: DType = "float32"
    kv_dtype: KVDType | None = None
    window: int | None = None
    is_narrow: bool = False

    def folder(self, tiny_folder: Callable[..., pathlib.Path]) -> pathlib.Path:
        # Too narrow for sums of a row to have one order whatever the number of rows, unless asked.
        width = {"hidden": 32} if self.is_narrow else {}
        window = {"model_type": "mistral", "sliding_window": self.window} if self.window else {}
        return tiny_folder(**width, **window)


MODELS = {
    "float32": Model(),
    "bfloat16_window": Model(dtype="bfloat16", window=12),
    "int8": Model(kv_dtype="int8"),
    "narrow": Model(is_narrow=True),
    "float32_window": Model(window=7),
    "bfloat16": Model(dtype="bfloat16"),
    "float16": Model(kv_dtype="float16"),
    "fp8": Model(kv_dtype="fp8", window=30),
    "int4": Model(dtype="bfloat16", kv_dtype="int4"),
}

SHARED: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "watermark": 0.0,
    "deterministic": True,
}

# Every prompt whole, one row at a time, nothing shared and nothing taken away.
PLAIN = EngineConfig(max_num_seqs=1, prefix_cache=False, num_blocks=8, **SHARED)

SETTINGS = {
    "recompute": EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=33,
        block_size=4,
        num_blocks=32,
        preemption="recompute",
        **SHARED,
    ),
    "swap": EngineConfig(
        max_num_seqs=64, block_size=1, num_blocks=150, preemption="swap", swap_space=0.1, **SHARED
    ),
    "small_chunks": EngineConfig(
        max_num_seqs=3,
        max_num_batched_tokens=7,
        block_size=5,
        num_blocks=26,
        prefix_cache=False,
        preemption="auto",
        **SHARED,
    ),
    "wide": EngineConfig(max_num_seqs=64, block_size=32, num_blocks=256, **SHARED),
}

_RANDOM = np.random.default_rng(11)
_LONG = _RANDOM.integers(8, 259, 90).tolist()
_OTHER = _RANDOM.integers(8, 259, 90).tolist()

_SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 80}
_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
}

# Prompts that begin alike in many lengths, equal ones, and whatever a row can ask for.
ROWS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    (_LONG[:90], {"max_tokens": 15, "logprobs": 3}),
    (_LONG[:64], {"max_tokens": 20, "prompt_logprobs": 2}),
    (_LONG[:40] + _OTHER[:9], {"max_tokens": 20, "logprobs": 3, **_SAMPLED}),
    (_LONG[:40] + _OTHER[:9], {"max_tokens": 20, "logprobs": 3, **_SAMPLED, "seed": 3}),
    (_LONG[:16], {"max_tokens": 24, "logprobs": 0, **_SAMPLED, "n": 3}),
    (_LONG[:21] + _OTHER[40:44], {"max_tokens": 18, "logprobs": 3, "prompt_logprobs": 2, "n": 2}),
    (_OTHER[:1], {"max_tokens": 30, "logprobs": 3, **_PENALTIES}),
    (_OTHER[:65], {"max_tokens": 9, "logprobs": 1, "temperature": 1.5, "min_p": 0.02}),
    (_OTHER[:33], {"max_tokens": 12, **_SAMPLED, **_PENALTIES, "best_of": 4, "n": 2}),
    (_OTHER[:33], {"max_tokens": 1, "prompt_logprobs": 0}),
    (_OTHER[50:53], {"max_tokens": 17, "logprobs": 3, "min_tokens": 8, "logit_bias": ((2, 6.0),)}),
    (_OTHER[:12], {"max_tokens": 26, "logprobs": 3, "typical_p": 0.8, "temperature": 0.7}),
)


def request(row: int, request_id: int) -> Request:
    prompt, params = ROWS[row]
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        address=100 + row,
    )


def bare(completions: list[Completion]) -> list[str]:
    """The completions without what is the batch's and not the row's, as text: equal to the bit."""
    return [repr(dataclasses.replace(c, request_id=0, cached_tokens=0)) for c in completions]


def config_for(model: Model, config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, dtype=model.dtype, kv_dtype=model.kv_dtype)


@pytest.fixture(scope="module")
def alone(tiny_folder, run_samples) -> Callable[[Model], list[list[str]]]:
    """What each row gives alone in the plainest engine, by model."""

    @functools.cache
    def results(model: Model) -> list[list[str]]:
        engine = Engine.load(model.folder(tiny_folder), config_for(model, PLAIN))
        found = [bare(run_samples(engine, [request(row, 0)])[0]) for row in range(len(ROWS))]
        assert engine.stats.cached_tokens == engine.stats.recomputes == engine.stats.swaps == 0
        return found

    return results


def check(
    engine: Engine,
    rows: list[int],
    alone: list[list[str]],
    run_samples: Callable[..., list[list[Completion]]],
    *,
    steps_between: int = 0,
) -> None:
    requests = [request(row, index) for index, row in enumerate(rows)]
    results = run_samples(engine, requests, steps_between=steps_between)
    for row, completions in zip(rows, results, strict=True):
        assert bare(completions) == alone[row], f"row {row} of {rows}, {steps_between} between"


PAIRS = [
    *(("float32", setting) for setting in SETTINGS),
    ("bfloat16_window", "swap"),
    ("bfloat16_window", "recompute"),
    ("int8", "recompute"),
    ("narrow", "recompute"),
]

orders = st.lists(st.sampled_from(range(len(ROWS))), min_size=2, max_size=16)
few = settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize(("name", "setting"), PAIRS)
def test_rows_give_what_they_give_alone(
    name, setting, alone, tiny_folder, engine_for, run_samples
) -> None:
    model = MODELS[name]
    engine = engine_for(model.folder(tiny_folder), config_for(model, SETTINGS[setting]))
    everything = list(range(len(ROWS)))
    for rows in (everything[::-1], everything * 3):
        check(engine, rows, alone(model), run_samples)
    # Or the settings would not show what they are made for.
    stats = engine.stats
    assert (stats.recomputes > 0) or setting != "recompute"
    assert (stats.swaps > 0) or setting != "swap"
    assert (stats.recomputes + stats.swaps > 0) == (setting != "wide")
    assert (stats.cached_tokens > 0) == (setting != "small_chunks")


@pytest.mark.parametrize(("name", "setting"), PAIRS)
def test_rows_give_that_in_any_order_and_whenever_they_come(
    name, setting, alone, tiny_folder, engine_for, run_samples
) -> None:
    model = MODELS[name]
    engine = engine_for(model.folder(tiny_folder), config_for(model, SETTINGS[setting]))
    expected = alone(model)

    @few
    @given(orders, st.integers(0, 3))
    def any_order(rows: list[int], steps_between: int) -> None:
        check(engine, rows, expected, run_samples, steps_between=steps_between)

    any_order()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_give_that_in_any_engine(name, alone, tiny_folder, run_samples) -> None:
    model = MODELS[name]
    expected = alone(model)

    @settings(few, max_examples=12)
    @given(
        rows=orders,
        steps_between=st.integers(0, 3),
        lanes=st.sampled_from([1, 3, 8, 64]),
        block_size=st.sampled_from([1, 4, 5, 16, 32]),
        budget=st.sampled_from([1, 5, 16, 64, 100, 512]),
        more_blocks=st.integers(0, 12),
        preemption=st.sampled_from(["auto", "recompute", "swap"]),
        prefix_cache=st.booleans(),
    )
    def any_engine(
        *,
        rows: list[int],
        steps_between: int,
        lanes: int,
        block_size: int,
        budget: int,
        more_blocks: int,
        preemption: Preemption,
        prefix_cache: bool,
    ) -> None:
        # The longest row just fits.
        config = EngineConfig(
            max_num_seqs=lanes,
            max_num_batched_tokens=max(lanes, budget),
            block_size=block_size,
            num_blocks=-(-104 // block_size) + more_blocks,
            preemption=preemption,
            prefix_cache=prefix_cache,
            **SHARED,
        )
        engine = Engine.load(model.folder(tiny_folder), config_for(model, config))
        check(engine, rows, expected, run_samples, steps_between=steps_between)

    any_engine()
