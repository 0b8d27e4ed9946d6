"""Blocks that are shared, taken away and given back: what it saves, and that nobody sees it."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from oracle import Oracle
from tiny import byte_id, write_tiny_llama, write_weights

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.engine import limits, stopping
from jaxpaged.engine.sample_group import SampleGroup
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.request import Completion

WIDE = EngineConfig(
    max_num_seqs=16,
    max_num_batched_tokens=64,
    block_size=4,
    num_blocks=200,
    max_model_len=96,
    watermark=0.0,
    swap_space=0.1,
    preemption="recompute",
)
WITHOUT_CACHE = dataclasses.replace(WIDE, prefix_cache=False)
TIGHT = dataclasses.replace(WIDE, num_blocks=9)
TIGHT_SWAP = dataclasses.replace(TIGHT, preemption="swap")
ONE_LANE = dataclasses.replace(WIDE, max_num_seqs=1)
THREE_LANES = dataclasses.replace(WIDE, max_num_seqs=3)

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(8, 259, count).tolist())


def requests(
    prompts: list[tuple[int, ...]], params: SamplingParams | list[SamplingParams]
) -> list[Request]:
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [
        Request(request_id=index, prompt_ids=prompt, params=one, address=index)
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
    ]


def bare(completion: Completion) -> Completion:
    """Without what is the batch's."""
    return dataclasses.replace(completion, request_id=0, cached_tokens=0)


class Counters:
    """How far an engine's counters moved since."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = dataclasses.replace(engine.stats)

    def __getattr__(self, name: str) -> int:
        return getattr(self._engine.stats, name) - getattr(self._before, name)


@pytest.mark.parametrize("steps_between", [0, 1, 3])
def test_64_rows_that_begin_alike_compute_their_beginning_once(
    tiny_folder, engine_for, run_samples, steps_between: int
) -> None:
    engine = engine_for(tiny_folder(), WIDE)
    counters = Counters(engine)
    shared = tokens(steps_between, 64)
    prompts = [shared + tokens(1000 + row, 3) for row in range(64)]
    found = run_samples(engine, requests(prompts, GREEDY), steps_between=steps_between)
    cached = sorted(completions[0].cached_tokens for completions in found)
    assert cached == [0] + [64] * 63
    assert counters.cached_tokens == 63 * 64
    assert counters.prompt_tokens == 64 * 67
    # Prompts less what was cached; all sampled tokens but the last, and at most one after it.
    computed = counters.prefill_tokens + counters.decode_tokens
    assert 64 + 64 * 3 + 64 * 5 <= computed <= 64 + 64 * 3 + 64 * 6
    # The beginning and three blocks for each of 16 lanes.
    assert engine.stats.peak_used_blocks <= 16 + 16 * 3


def test_without_prefix_cache_rows_that_begin_alike_give_the_same(
    tiny_folder, engine_for, run_samples
) -> None:
    prompts = [tokens(2, 64) + tokens(1000 + row, 3) for row in range(12)]
    with_cache, without = (
        run_samples(engine_for(tiny_folder(), config), requests(prompts, GREEDY))
        for config in (WIDE, WITHOUT_CACHE)
    )
    assert engine_for(tiny_folder(), WITHOUT_CACHE).stats.cached_tokens == 0
    assert [bare(c[0]) for c in with_cache] == [bare(c[0]) for c in without]


def test_samples_of_a_row_share_its_prompt_also_without_prefix_cache(
    tiny_folder, engine_for, run_samples
) -> None:
    engine = engine_for(tiny_folder(), WITHOUT_CACHE)
    counters = Counters(engine)
    params = SamplingParams(max_tokens=4, n=8, temperature=1.0, ignore_eos=True)
    (found,) = run_samples(engine, requests([tokens(3, 42)], params))
    assert [c.sample for c in found] == list(range(8))
    assert len({c.token_ids for c in found}) == 8
    # The prompt once; each sample writes to the half-filled block, the last one has it alone.
    assert counters.prefill_tokens + counters.decode_tokens <= 42 + 8 * 4
    assert counters.copied_blocks == 7


@pytest.mark.parametrize("config", [WIDE, THREE_LANES, TIGHT_SWAP], ids=["wide", "three", "swap"])
def test_samples_are_what_separate_rows_with_their_keys_give(
    tiny_folder, engine_for, run_samples, config: EngineConfig
) -> None:
    params = SamplingParams(
        max_tokens=14, n=4, temperature=1.0, logprobs=2, logit_bias=((7, 4.5),), seed=0
    )
    (request,) = requests([tokens(4, 10)], params)
    engine = engine_for(tiny_folder(), config)
    (forks,) = run_samples(engine, [request])
    assert [c.sample for c in forks] == [0, 1, 2, 3]
    # Forced by the bias: they end after different numbers of tokens, for different reasons.
    assert len({len(c.token_ids) for c in forks}) == 4
    assert {c.finish_reason for c in forks} == {"stop", "length"}
    assert len({c.text for c in forks}) == 4
    alone = engine_for(tiny_folder(), ONE_LANE)
    for sample, fork in enumerate(forks):
        separate = run_as_sample(alone, request, sample)
        assert bare(dataclasses.replace(separate, sample=sample)) == bare(fork)


def run_as_sample(engine: Engine, request: Request, sample: int) -> Completion:
    """What a request gives whose only sample has the random numbers of another one's."""
    rule = stopping.stop_rule(request.params, engine.tokenizer)
    request = dataclasses.replace(request, params=dataclasses.replace(request.params, n=1))
    engine._groups[request.request_id] = SampleGroup(
        [engine._admission.sequence(request, rule, sample=sample)],
        rule,
        engine.tokenizer,
        scheduler=engine._scheduler,
        seed=engine._admission.row_seed(request.params),
    )
    found: list[Completion] = []
    while engine.has_work():
        found += engine.step()
    (completion,) = found
    return completion


@pytest.mark.parametrize("config", [TIGHT, TIGHT_SWAP], ids=["recompute", "swap"])
def test_preemption_is_counted_and_loses_or_doubles_no_token(
    tiny_folder, engine_for, run_samples, config: EngineConfig
) -> None:
    # Penalties would tell if prompt and output were mixed up when they are computed again.
    params = SamplingParams(
        max_tokens=16,
        ignore_eos=True,
        logprobs=2,
        temperature=0.7,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.5,
    )
    prompts = [tokens(20 + row, 8) for row in range(6)]
    roomy, tight = engine_for(tiny_folder(), WIDE), engine_for(tiny_folder(), config)
    before, counters = Counters(roomy), Counters(tight)
    expected = run_samples(roomy, requests(prompts, params))
    found = run_samples(tight, requests(prompts, params))
    assert [bare(c[0]) for c in found] == [bare(c[0]) for c in expected]
    assert {len(c[0].token_ids) for c in found} == {16}
    assert before.recomputes == before.swaps == 0
    assert (counters.recomputes > 0, counters.swaps > 0) == (config is TIGHT, config is TIGHT_SWAP)
    assert tight.stats.peak_used_blocks <= 9


def windowed(tiny_folder) -> pathlib.Path:
    return tiny_folder(model_type="mistral", sliding_window=8)


@pytest.mark.parametrize("has_window", [False, True])
def test_equal_prompts_give_equal_completions_with_and_without_prefix_cache(
    tiny_folder, engine_for, run_samples, has_window: bool
) -> None:
    folder = windowed(tiny_folder) if has_window else tiny_folder()
    prompts = [tokens(30, 29)] * 4
    found = [
        bare(completions[0])
        for config in (WIDE, WITHOUT_CACHE)
        for steps_between in (0, 2)
        for completions in run_samples(
            engine_for(folder, config), requests(prompts, GREEDY), steps_between=steps_between
        )
    ]
    assert len(found) == 16
    assert all(completion == found[0] for completion in found)
    assert list(found[0].token_ids) == Oracle(open_checkpoint(folder)).greedy(list(prompts[0]), 6)


def test_blocks_behind_the_window_are_freed_while_the_sequence_runs(
    tiny_folder, run_samples
) -> None:
    engine = Engine.load(windowed(tiny_folder), dataclasses.replace(WIDE, max_num_seqs=4))
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    run_samples(engine, requests([tokens(31, 2)], params))
    # Eight keys of the window and the new token lie in at most three blocks.
    assert engine.stats.peak_used_blocks <= 4
    run_samples(engine, requests([tokens(40 + row, 2) for row in range(4)], params))
    assert engine.stats.peak_used_blocks <= 4 * 4


def test_a_long_prompt_hits_the_cache_and_takes_only_the_blocks_it_sees(
    tiny_folder, engine_for, run_samples
) -> None:
    engine = engine_for(windowed(tiny_folder), WIDE)
    shared = tokens(32, 72)
    first, second = run_samples(
        engine, requests([(*shared, 9), (*shared, 10)], GREEDY), steps_between=4
    )
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 72)
    oracle = Oracle(open_checkpoint(windowed(tiny_folder)))
    assert list(second[0].token_ids) == oracle.greedy([*shared, 10], 6)


def test_the_first_batch_in_an_int8_pool_gives_what_the_second_gives(
    tiny_folder, run_samples
) -> None:
    engine = Engine.load(tiny_folder(), dataclasses.replace(WITHOUT_CACHE, kv_dtype="int8"))
    rows = requests([tokens(50 + row, 5 + 7 * row) for row in range(5)], GREEDY)
    assert run_samples(engine, rows) == run_samples(engine, rows)


def test_prompt_logprobs_go_together_with_the_prefix_cache(
    tiny_folder, engine_for, run_samples
) -> None:
    params = dataclasses.replace(GREEDY, prompt_logprobs=2)
    prompt = tokens(60, 29)
    engine = engine_for(tiny_folder(), WIDE)
    run_samples(engine, requests([prompt], GREEDY))
    first, second = run_samples(engine, requests([prompt, prompt], params))
    third, without = run_samples(engine, requests([prompt, prompt], [params, GREEDY]))
    assert first[0].prompt_logprobs is not None
    assert bare(first[0]) == bare(second[0]) == bare(third[0])
    assert without[0].cached_tokens == 28
    assert without[0].prompt_logprobs is None


def test_prompt_logprobs_belong_to_their_tokens(tiny_folder, engine_for, run_samples) -> None:
    prompt = tokens(61, 5)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    ((completion,),) = run_samples(engine_for(tiny_folder(), WIDE), requests([prompt], params))
    entries = completion.prompt_logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == list(prompt)
    assert (entries[0].logprob, entries[0].rank, entries[0].top) == (None, None, ())
    logits = Oracle(open_checkpoint(tiny_folder())).logits(list(prompt))
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for place, entry in enumerate(entries[1:]):
        row = logprobs[place]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert entry.top[0][0] == int(row.argmax())
        assert entry.top[0][1] == pytest.approx(row.max(), abs=1e-4)


def test_stop_tokens_wait_for_min_tokens(tiny_folder, engine_for, run_samples) -> None:
    engine = engine_for(tiny_folder(), WIDE)
    prompt = tokens(62, 9)
    ((free,),) = run_samples(engine, requests([prompt], GREEDY))
    stop = free.token_ids[1]
    at_once = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    params = [at_once, dataclasses.replace(at_once, min_tokens=5, max_tokens=9)]
    (early,), (late,) = run_samples(engine, requests([prompt] * 2, params))
    assert (early.token_ids, early.stop_reason) == (free.token_ids[:2], str(stop))
    assert stop not in late.token_ids[:5]
    assert len(late.token_ids) >= 6


@pytest.mark.parametrize("eos", [2, 5, 7])
def test_every_end_of_sequence_token_waits_for_min_tokens_and_can_be_ignored(
    tiny_folder, engine_for, run_samples, eos: int
) -> None:
    towards = SamplingParams(max_tokens=20, logit_bias=((eos, 1000.0),))
    params = [
        towards,
        dataclasses.replace(towards, min_tokens=5),
        dataclasses.replace(towards, ignore_eos=True, max_tokens=7),
    ]
    engine = engine_for(tiny_folder(), WIDE)
    (at_once,), (later,), (ignored,) = run_samples(engine, requests([tokens(63, 9)] * 3, params))
    assert (at_once.token_ids, at_once.finish_reason) == ((eos,), "stop")
    assert not {2, 5, 7} & set(later.token_ids[:5])
    assert (later.token_ids[5:], later.stop_reason) == ((eos,), str(eos))
    assert (ignored.token_ids, ignored.finish_reason) == ((eos,) * 7, "length")


def test_a_neighbour_without_a_seed_changes_nothing(tiny_folder, engine_for, run_samples) -> None:
    engine = engine_for(tiny_folder(), WIDE)
    seeded = SamplingParams(max_tokens=12, temperature=0.8, seed=42, ignore_eos=True)
    others = [dataclasses.replace(seeded, seed=seed) for seed in [None] * 4 + [7] * 4]
    found = [
        run_samples(engine, requests([tokens(64, 9), tokens(65, 9)], [seeded, other]))
        for other in others
    ]
    assert len({first[0].token_ids for first, _ in found}) == 1
    assert len({second[0].token_ids for _, second in found}) == 2


def test_seeded_rows_do_not_depend_on_order_or_lanes(tiny_folder, engine_for, run_samples) -> None:
    rows = [
        Request(
            request_id=row,
            prompt_ids=tokens(70 + row, 3 + row),
            params=SamplingParams(max_tokens=9, temperature=1.0, seed=row, ignore_eos=True),
        )
        for row in range(8)
    ]
    found = []
    for config in (WIDE, ONE_LANE, THREE_LANES):
        engine = engine_for(tiny_folder(), config)
        found.append([bare(c[0]) for c in run_samples(engine, rows)])
        found.append([bare(c[0]) for c in run_samples(engine, rows[::-1])[::-1]])
    assert all(completions == found[0] for completions in found)


def test_equal_seeds_give_equal_tokens_and_others_do_not(
    tiny_folder, engine_for, run_samples
) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=1.5, seed=seed, ignore_eos=True)
        for seed in (0, 0, 1)
    ]
    rows = requests([tokens(66, 9)] * 3, params)
    first, second, third = run_samples(engine_for(tiny_folder(), WIDE), rows)
    assert first[0].token_ids == second[0].token_ids != third[0].token_ids


def test_prompt_logprobs_of_a_large_vocabulary_take_little_memory(tmp_path, run_samples) -> None:
    vocab_size, num_prompt = 32_000, 2_000
    folder = write_tiny_llama(
        tmp_path / "model", vocab_size=vocab_size, max_position_embeddings=2048, layers=1
    )
    engine = Engine.load(folder, dataclasses.replace(WIDE, num_blocks=520, max_model_len=2048))
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    ((completion,),) = run_samples(engine, requests([tokens(67, num_prompt)], params))
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == num_prompt
    assert all(len(entry.top) == 1 for entry in completion.prompt_logprobs[1:])
    temporaries = {
        key: program.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
        for key, program in engine._runner._compiled.items()
    }
    # 64 rows of logits at a time, a few arrays of them at once; 2,000 rows would be 256 MB.
    rows_bytes = 64 * vocab_size * 4
    assert temporaries.pop("score") < 5 * rows_bytes
    # The capacity arithmetic leaves room for it.
    workspace = limits.workspace_bytes(WIDE.max_num_seqs, vocab_size)
    assert workspace / 2 < temporaries.pop(("sample", 64)) < workspace
    assert max(temporaries.values()) < rows_bytes


def test_logits_that_are_not_finite_are_an_error_of_their_row(
    tiny_folder, tmp_path, run_samples
) -> None:
    bad = byte_id(255)
    folder = write_tiny_llama(tmp_path / "model", hidden=64)
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.embed_tokens.weight"][bad] = np.nan
    write_weights(folder, tensors)
    engine = Engine.load(folder, TIGHT)
    shared = (11, 12, 13, 14)
    params = SamplingParams(max_tokens=5, n=3, temperature=1.0, ignore_eos=True)
    rows = requests([(*shared, 15), (*shared, bad, 15), (*shared, 16), (bad,)], params)
    first, broken, last, other = run_samples(engine, rows)
    assert [c.error_code for c in (*broken, *other)] == ["nonfinite_logits"] * 2
    assert broken[0].token_ids == ()
    assert [len(c.token_ids) for c in (*first, *last)] == [5] * 6
    # Blocks that held NaN are used again, and the shared one still is what it was.
    again = run_samples(engine, rows[:1] + rows[2:3])
    for before, after in zip((first, last), again, strict=True):
        assert [bare(c) for c in before] == [bare(c) for c in after]


def test_an_abort_amid_everything_leaves_nothing_behind(
    tiny_folder, engine_for, run_samples
) -> None:
    params = SamplingParams(max_tokens=16, n=2, temperature=1.0, ignore_eos=True)
    rows = requests([tokens(20 + row, 8) for row in range(6)], params)
    engine = engine_for(tiny_folder(), TIGHT_SWAP)
    expected = run_samples(engine, rows)
    for num_steps in (1, 2, 7, 20):
        for request in rows:
            engine.add_request(request)
        for _ in range(num_steps):
            engine.step()
        left = engine.abort()
        assert set(left) <= set(range(6))
        assert not engine.has_work()
        engine.check_integrity()
        assert engine.stats.used_blocks == 0
    found = run_samples(engine, rows)
    assert [list(map(bare, group)) for group in found] == [
        list(map(bare, group)) for group in expected
    ]
    assert jax.tree.leaves(engine._runner._swapped) == []
