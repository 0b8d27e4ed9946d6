"""The same tokens whatever the batch, the chunks, the blocks or the preemptions.

Each engine setting below breaks the work into steps in another way; all must give exactly the
greedy tokens of a dense decoder that runs one sequence at a time.
"""

import dataclasses
import itertools

import pytest
import safetensors.numpy
from tiny import write_scripted_llama, write_weights

from jaxpaged import EngineConfig, SamplingParams

SETTINGS = {
    "one_at_a_time": EngineConfig(max_num_seqs=1, max_num_batched_tokens=64),
    "three_lanes": EngineConfig(max_num_seqs=3, max_num_batched_tokens=64, block_size=1),
    "all_at_once": EngineConfig(max_num_seqs=64, block_size=32),
    "small_chunks": EngineConfig(max_num_seqs=4, max_num_batched_tokens=7, block_size=5),
    "constant_preemption": EngineConfig(
        max_num_seqs=10, num_blocks=21, block_size=4, watermark=0.0
    ),
    "preemption_amid_chunks": EngineConfig(
        max_num_seqs=10, max_num_batched_tokens=11, num_blocks=27, block_size=3, watermark=0.0
    ),
    # The kernels for GPUs, interpreted.
    "kernels_one_at_a_time": EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=64, attention="triton", deterministic=False
    ),
    "kernels": EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=64, attention="triton", deterministic=False
    ),
    "kernels_and_preemption": EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=11,
        num_blocks=27,
        block_size=3,
        watermark=0.0,
        attention="triton",
        deterministic=False,
    ),
}


# Each model has its share of the settings, and all of them at leisure.
NARROW, WIDE = "heads_4_2_with_biases", "heads_9_3_width_64"
QUICK = {(NARROW, name) for name in SETTINGS if name not in ("all_at_once", "kernels")} | {
    (WIDE, "all_at_once"),
    (WIDE, "preemption_amid_chunks"),
    (WIDE, "kernels"),
}
PAIRS = [
    pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow])
    for pair in itertools.product((NARROW, WIDE), SETTINGS)
]


@pytest.mark.parametrize(("tiny_case", "setting"), PAIRS, indirect=["tiny_case"])
def test_tokens_equal_the_dense_oracle(tiny_case, run, engine_for, setting: str) -> None:
    engine = engine_for(tiny_case.folder, SETTINGS[setting])
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in tiny_case.max_tokens]
    completions = run(engine, tiny_case.prompts, params)
    assert [list(c.token_ids) for c in completions] == tiny_case.expected
    assert {c.finish_reason for c in completions} == {"length"}
    preemptions = engine.stats.recomputes + engine.stats.swaps
    assert (preemptions > 0) == ("preemption" in setting)
    assert (engine.stats.implementation == "triton_interpreted") == ("kernels" in setting)


@pytest.mark.parametrize("setting", ["three_lanes", "kernels"])
def test_prompts_that_come_again_take_the_cache_and_give_the_same(
    tiny_case, run, engine_for, setting: str
) -> None:
    engine = engine_for(tiny_case.folder, SETTINGS[setting])
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in tiny_case.max_tokens]
    run(engine, tiny_case.prompts, params)
    cached = engine.stats.cached_tokens
    again = run(engine, tiny_case.prompts, params)
    assert [list(c.token_ids) for c in again] == tiny_case.expected
    assert engine.stats.cached_tokens - cached > sum(map(len, tiny_case.prompts)) / 2


def test_sampled_tokens_do_not_depend_on_batch_order_chunks_or_preemption(
    tiny_case, run, engine_for
) -> None:
    shared = {"temperature": 0.8, "top_p": 0.95, "top_k": 60, "min_p": 0.01, "ignore_eos": True}
    params = [SamplingParams(max_tokens=n, **shared) for n in tiny_case.max_tokens]
    addresses = [1000 + i for i in range(len(params))]
    one_at_a_time = engine_for(tiny_case.folder, SETTINGS["one_at_a_time"])
    solo = run(one_at_a_time, tiny_case.prompts, params, addresses)
    engine = engine_for(tiny_case.folder, SETTINGS["preemption_amid_chunks"])
    preemptions = engine.stats.recomputes + engine.stats.swaps
    mixed = run(engine, tiny_case.prompts[::-1], params[::-1], addresses[::-1])
    assert [c.token_ids for c in mixed[::-1]] == [c.token_ids for c in solo]
    assert engine.stats.recomputes + engine.stats.swaps > preemptions
    elsewhere = run(one_at_a_time, tiny_case.prompts, params, [a + 1 for a in addresses])
    assert [c.token_ids for c in elsewhere] != [c.token_ids for c in solo]


def test_the_seed_of_the_job_changes_samples(tiny_case, run, engine_for) -> None:
    params = [SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)]
    by_seed = [
        run(engine_for(tiny_case.folder, config), tiny_case.prompts[:1], params)[0].token_ids
        for config in (
            SETTINGS["one_at_a_time"],
            dataclasses.replace(SETTINGS["one_at_a_time"], seed=1),
        )
    ]
    assert by_seed[0] != by_seed[1]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_each_filter_reaches_the_device(tiny_case, run, engine_for, narrow) -> None:
    engine = engine_for(tiny_case.folder, SETTINGS["all_at_once"])
    params = [
        SamplingParams(max_tokens=n, temperature=1.0, ignore_eos=True, **narrow)
        for n in tiny_case.max_tokens
    ]
    completions = run(engine, tiny_case.prompts, params)
    assert [list(c.token_ids) for c in completions] == tiny_case.expected


def test_rows_of_equal_own_seed_sample_alike_and_neighbours_do_not_matter(
    tiny_case, run, engine_for
) -> None:
    prompt = tiny_case.prompts[4]
    seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=42, ignore_eos=True)
    unseeded = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    engine = engine_for(tiny_case.folder, SETTINGS["three_lanes"])
    first = run(engine, [prompt, prompt, prompt], [seeded, unseeded, seeded])
    again = run(engine, [prompt, prompt], [unseeded, seeded], [7, 8])
    assert first[0].token_ids == first[2].token_ids == again[1].token_ids
    assert first[0].seed == 42
    assert len({c.token_ids for c in (first[0], first[1], again[0])}) == 3


def test_bfloat16_pool_gives_chunked_the_tokens_of_whole_prefills(
    tiny_case, run, engine_for
) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in tiny_case.max_tokens]
    whole, chunked = (
        run(
            engine_for(
                tiny_case.folder,
                EngineConfig(dtype="bfloat16", max_num_seqs=8, max_num_batched_tokens=budget),
            ),
            tiny_case.prompts,
            params,
        )
        for budget in (128, 16)
    )
    same = [a.token_ids == b.token_ids for a, b in zip(whole, chunked, strict=True)]
    # Both round to the same 8 bits in the pool; other sums differ, so near ties may part.
    assert sum(same) >= len(same) - 2


def test_every_token_of_a_row_draws_its_own_random_number(tmp_path, run, engine_for) -> None:
    folder = write_scripted_llama(tmp_path / "flat", {})
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 0
    write_weights(folder, tensors)
    engine = engine_for(folder, EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    (completion,) = run(engine, [[3]], [params])
    # 40 of 272 equally likely tokens: 37 distinct ones are expected; 25 would be a wonder.
    assert len(set(completion.token_ids)) > 25
