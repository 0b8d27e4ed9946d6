"""What the compiler made of the engine's programs: the pool in place, no copies, no new ones."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.cache import kv_pool
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine.batch import Bucket, SampleBatch
from jaxpaged.engine.model_runner import allocate_pool
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.llama import LayerLoop
from jaxpaged.scheduler import StepPlan

# A pool far larger than everything else a step touches.
CONFIG = EngineConfig(num_blocks=4000, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
POOLS = {
    "float32": CONFIG,
    "bfloat16": dataclasses.replace(CONFIG, dtype="bfloat16"),
    "int8": dataclasses.replace(CONFIG, kv_dtype="int8", num_blocks=12_000),
}


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder(layers=3)


@pytest.fixture(scope="module")
def warm_engine(folder) -> Callable[[str, str], Engine]:
    """An engine with all of its programs, by pool and layer driver."""

    @functools.cache
    def warm(pool: str, layer_loop: LayerLoop) -> Engine:
        checkpoint, config = open_checkpoint(folder), POOLS[pool]
        dtype = jnp.dtype(config.dtype or "float32")
        model = weights.load(checkpoint, dtype=dtype, layer_loop=layer_loop)
        engine = Engine(model, checkpoint.tokenizer(), config)
        engine.warm_up()
        return engine

    return warm


def num_bytes(arrays: object) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))


def analyses(engine: Engine) -> dict[object, Any]:
    """The compiler's figures for each program."""
    return {key: p.memory_analysis() for key, p in engine._runner._compiled.items()}


@pytest.mark.parametrize(
    ("pool", "layer_loop"),
    [("float32", "scan"), ("bfloat16", "scan"), ("int8", "scan"), ("float32", "unrolled")],
)
def test_the_pool_is_updated_in_place_and_nothing_of_its_size_is_copied(
    warm_engine, pool: str, layer_loop: str
) -> None:
    engine = warm_engine(pool, layer_loop)
    runner = engine._runner
    pool_bytes, state_bytes = num_bytes(runner._pool), num_bytes(runner._state)
    found = analyses(engine)
    steps = [key for key in found if isinstance(key, Bucket)]
    assert len(steps) == len(runner._shapes.buckets()) == 2
    for key in (*steps, "copy", "write"):
        assert found[key].alias_size_in_bytes >= pool_bytes, key
    assert found["set_lanes"].alias_size_in_bytes >= state_bytes
    assert found["sample", 64].alias_size_in_bytes >= num_bytes(runner._state.tokens)
    for key, analysis in found.items():
        assert analysis.temp_size_in_bytes < pool_bytes / 20, key


def test_weights_are_arguments_of_the_programs_and_no_constants(warm_engine) -> None:
    engine = warm_engine("float32", "scan")
    runner = engine._runner
    weight_bytes = num_bytes(runner._weights)
    for key, analysis in analyses(engine).items():
        assert analysis.generated_code_size_in_bytes < weight_bytes, key
        if isinstance(key, Bucket):
            # The embedding is used, the head is not: it belongs to the sampler.
            head_bytes = num_bytes(runner._weights["lm_head"])
            pool_bytes = num_bytes(runner._pool)
            assert analysis.argument_size_in_bytes > weight_bytes - head_bytes + pool_bytes


def test_products_of_float32_programs_keep_all_bits(warm_engine) -> None:
    """Elsewhere than on the CPU float32 products are rounded unless asked not to be."""
    runner = warm_engine("float32", "scan")._runner
    shapes = runner._shapes
    arrays = step_batch.build(step_batch.lay_out(StepPlan()), shapes.buckets()[-1], shapes)
    step = (runner._weights, runner._pool, runner._state, arrays)
    hidden, rows, _ = jax.eval_shape(runner._forward, *step)
    samplers = SampleBatch(np.zeros(64, np.int32), np.zeros(64, np.int32))
    ids = np.zeros(64, np.int32)
    programs = {
        "forward": (runner._forward.lower(*step), 11),
        "sample": (runner._sample.lower(*runner._sampler_arguments(rows, samplers)), 1),
        "score": (runner._score.lower(runner._weights, hidden, ids, ids), 1),
    }
    for name, (lowered, num_products) in programs.items():
        lines = lowered.as_text().splitlines()
        products = [line for line in lines if "stablehlo.dot_general" in line]
        assert len(products) >= num_products, name
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products), name


def test_both_drivers_give_the_same_tokens(warm_engine) -> None:
    texts = ["one", "two words", "a much longer prompt than the others have"]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    scanned, unrolled = (
        warm_engine("float32", loop).generate(texts, params) for loop in ("scan", "unrolled")
    )
    assert scanned == unrolled


def test_nothing_is_compiled_after_warm_up_whatever_is_asked_for(folder, run_samples) -> None:
    config = EngineConfig(
        max_num_seqs=20,
        max_num_batched_tokens=256,
        max_model_len=128,
        block_size=4,
        num_blocks=60,
        preemption="swap",
        swap_space=0.1,
    )
    engine = Engine.load(folder, config)
    engine.warm_up()
    num_executables = engine.stats.executables
    # Steps with and without prefill, the sampler, and one of each of the others.
    assert num_executables == len(engine._runner._shapes.buckets()) + 1 + 6
    compile_seconds = engine.stats.compile_seconds
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9, "typical_p": 0.9, "min_p": 0.01, "top_k": 50},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logprobs": 5, "prompt_logprobs": 3},
        {"n": 3, "temperature": 1.0, "seed": 1},
        {"n": 2, "best_of": 4, "temperature": 1.0},
        {"logit_bias": ((9, 3.0),), "bad_words": ("ab", "the"), "min_tokens": 4},
        {"stop": ("x",), "stop_token_ids": (70, 71), "ignore_eos": True},
        {"beam_width": 3, "n": 2},
    ]
    rng = np.random.default_rng(0)
    for round_number in range(2):
        rows = [
            Request(
                request_id=index,
                prompt_ids=tuple(rng.integers(8, 259, rng.integers(1, 100)).tolist()),
                params=SamplingParams(max_tokens=14, **asked[index % len(asked)]),
            )
            for index in range(24)
        ]
        run_samples(engine, rows, steps_between=round_number)
    assert engine.stats.swaps > 0
    assert engine.stats.copied_blocks > 0
    assert engine.stats.executables == num_executables
    assert engine.stats.compile_seconds == compile_seconds


def test_padding_is_dropped_and_other_slots_keep_their_bits(folder) -> None:
    model = weights.load(open_checkpoint(folder), dtype=jnp.dtype("float32"), layer_loop="scan")
    pool = allocate_pool(model, 4, 4, kv_dtype="float32")
    pool = pool._replace(k=pool.k._replace(values=pool.k.values + 5.0))
    rows = jnp.ones((3, *pool.k.values.shape[3:]))
    slots = jnp.asarray([6, 16, 9], jnp.int32)  # 16 is past the last slot: padding
    written = kv_pool.write(pool, jnp.int32(1), slots, rows, 2 * rows)
    flat_k, flat_v = (
        np.asarray(rows.values).reshape(rows.values.shape[0], 16, -1) for rows in written
    )
    assert (flat_k[1, [6, 9]] == 1).all()
    assert (flat_v[1, [6, 9]] == 2).all()
    untouched = np.ones((3, 16), bool)
    untouched[1, [6, 9]] = False
    assert (flat_k[untouched] == 5).all()
    assert (flat_v[untouched] == 0).all()
