"""What the compiler made of the step: the pool in place, no copies, no new executables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import write_tiny_llama

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.cache import kv_pool
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine.model_runner import allocate_pool
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.scheduler import StepPlan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("step") / "model", layers=3, hidden=64)


def memory(engine: Engine):
    """The compiler's figures for each bucket, and the pool's bytes."""
    runner = engine._runner
    pool_bytes = sum(array.nbytes for array in runner._pool)
    analyses = [runner.compiled(b).memory_analysis() for b in runner._shapes.buckets()]
    return analyses, pool_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pool_is_updated_in_place_and_nothing_of_its_size_is_copied(folder, dtype) -> None:
    # A pool far larger than everything else a step touches.
    config = EngineConfig(
        dtype=dtype, num_blocks=4000, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128
    )
    analyses, pool_bytes = memory(Engine.load(folder, config))
    for analysis in analyses:
        assert analysis.alias_size_in_bytes >= pool_bytes
        assert analysis.temp_size_in_bytes < pool_bytes / 20


def test_the_unrolled_driver_updates_the_pool_in_place_too(folder) -> None:
    model = weights.load(open_checkpoint(folder), dtype=jnp.dtype("float32"), layer_loop="unrolled")
    tokenizer = open_checkpoint(folder).tokenizer()
    config = EngineConfig(
        num_blocks=4000, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128
    )
    engine = Engine(model, tokenizer, config)
    analyses, pool_bytes = memory(engine)
    for analysis in analyses:
        assert analysis.alias_size_in_bytes >= pool_bytes
        assert analysis.temp_size_in_bytes < pool_bytes / 20


def test_both_drivers_give_the_same_tokens(folder) -> None:
    checkpoint = open_checkpoint(folder)
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    texts = ["one", "two words", "a much longer prompt than the others have"]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    results = [
        Engine(
            weights.load(checkpoint, dtype=jnp.dtype("float32"), layer_loop=loop),
            checkpoint.tokenizer(),
            config,
        ).generate(texts, params)
        for loop in ("scan", "unrolled")
    ]
    assert results[0] == results[1]


def test_no_new_executable_after_warm_up(folder) -> None:
    config = EngineConfig(max_num_seqs=20, max_num_batched_tokens=256, max_model_len=128)
    engine = Engine.load(folder, config)
    engine.warm_up()
    buckets = engine._runner._shapes.buckets()
    assert engine.stats.executables == len(buckets) == 4
    rng = np.random.default_rng(0)
    for round_number in range(3):
        prompts = [rng.integers(3, 259, n).tolist() for n in rng.integers(1, 100, 30)]
        temperature = float(round_number)
        engine.generate(prompts, SamplingParams(max_tokens=9, temperature=temperature, top_p=0.9))
    assert engine.stats.executables == len(buckets)
    assert engine.stats.steps > 20


def test_weights_are_arguments_of_the_step_and_no_constants(folder) -> None:
    engine = Engine.load(folder, EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    analyses, _ = memory(engine)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner._weights))
    for analysis in analyses:
        assert analysis.argument_size_in_bytes > weight_bytes
        assert analysis.generated_code_size_in_bytes < weight_bytes


def test_products_of_a_float32_step_keep_all_bits(folder) -> None:
    """Elsewhere than on the CPU float32 products are rounded unless asked not to be."""
    runner = Engine.load(folder, EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))._runner
    shapes = runner._shapes
    empty = StepPlan(decodes=(), prefills=())
    arrays = step_batch.build(empty, shapes.buckets()[-1], shapes)
    text = runner._step.lower(runner._weights, runner._pool, arrays).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 12
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_padding_is_dropped_and_other_slots_keep_their_bits(folder) -> None:
    model = weights.load(open_checkpoint(folder), dtype=jnp.dtype("float32"), layer_loop="scan")
    pool = allocate_pool(model, 4, 4)
    pool = pool._replace(k=pool.k + 5.0)
    rows = jnp.ones((3, *pool.k.shape[3:]))
    slots = jnp.asarray([6, 16, 9], jnp.int32)  # 16 is past the last slot: padding
    written = kv_pool.write(pool, jnp.int32(1), slots, rows, 2 * rows)
    flat_k, flat_v = (np.asarray(x).reshape(x.shape[0], 16, -1) for x in written)
    assert (flat_k[1, [6, 9]] == 1).all()
    assert (flat_v[1, [6, 9]] == 2).all()
    untouched = np.ones((3, 16), bool)
    untouched[1, [6, 9]] = False
    assert (flat_k[untouched] == 5).all()
    assert (flat_v[untouched] == 0).all()
