"""Limits, impossible requests and faults of single requests, end to end through the engine."""

import numpy as np
import pytest
from tiny import EOS_ID, byte_id, write_scripted_llama, write_tiny_llama, write_weights

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.engine.memory import available_host_bytes, check_weights, resolve_capacity
from jaxpaged.errors import CapacityError, ConfigError

A = byte_id(65)
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def endless(scripted) -> Engine:
    """A model that says A for ever, with room for 32 tokens."""
    return scripted({A: A}, EngineConfig(max_model_len=32, block_size=4, **SMALL))


@pytest.mark.parametrize(("num_prompt", "num_new"), [(1, 31), (10, 22), (31, 1)])
def test_without_max_tokens_the_model_length_is_the_limit(endless, run, num_prompt, num_new):
    (completion,) = run(endless, [[A] * num_prompt], [SamplingParams()])
    assert completion.completion_tokens == num_new
    assert (completion.finish_reason, completion.stop_reason) == ("length", "max_model_len")


@pytest.mark.parametrize("num_prompt", [32, 33, 100])
def test_a_prompt_that_leaves_no_room_is_an_error_of_its_row(endless, run, num_prompt) -> None:
    prompts = [[A] * 4, [A] * num_prompt, [A] * 4]
    first, bad, last = run(endless, prompts, [SamplingParams(max_tokens=3)] * 3)
    assert bad.error_code == "prompt_too_long"
    assert f"{num_prompt} tokens" in bad.error_message
    assert "max_model_len 32" in bad.error_message
    assert bad.token_ids == ()
    assert first.text == last.text == "AAA"


def test_a_request_that_can_never_fit_is_an_error_at_admission(scripted, run) -> None:
    config = EngineConfig(max_model_len=64, num_blocks=4, block_size=4, **SMALL)
    engine = scripted({A: A}, config)
    prompts = [[A] * 3, [A] * 20, [A] * 3]
    first, bad, last = run(engine, prompts, [SamplingParams(max_tokens=5)] * 3)
    assert bad.error_code == "kv_capacity"
    assert "need 6 blocks of 4, the pool has 4" in bad.error_message
    assert first.text == last.text == "AAAAA"
    (no_limit,) = run(engine, [[A] * 3], [SamplingParams()])
    assert (no_limit.stop_reason, no_limit.completion_tokens) == ("kv_capacity", 14)
    (wish,) = run(engine, [[A] * 3], [SamplingParams(max_tokens=15)])
    assert wish.error_code == "kv_capacity"
    (fits,) = run(engine, [[A] * 3], [SamplingParams(max_tokens=14)])
    assert fits.completion_tokens == 14


def test_an_empty_prompt_and_a_foreign_token_are_errors_of_their_rows(endless, run) -> None:
    prompts = [[], [A, 272], [A]]
    empty, foreign, good = run(endless, prompts, [SamplingParams(max_tokens=2)] * 3)
    assert empty.error_code == "empty_prompt"
    assert foreign.error_code == "bad_type"
    assert good.text == "AA"


@pytest.mark.parametrize("eos", [EOS_ID, 5, 7])
def test_min_tokens_bans_every_stop_token(scripted, run, eos: int) -> None:
    config = EngineConfig(max_model_len=32, **SMALL)
    engine = scripted({}, config, default=eos, eos_token_id=[5, 7])
    at_once, later = run(engine, [[A], [A]], [SamplingParams(), SamplingParams(min_tokens=3)])
    assert at_once.token_ids == (eos,)
    assert len(later.token_ids) == 4
    assert not {EOS_ID, 5, 7} & set(later.token_ids[:3])
    assert later.stop_reason == str(eos)


def test_ignore_eos_with_max_tokens_gives_exactly_that_many(scripted, run) -> None:
    engine = scripted({}, EngineConfig(max_model_len=32, **SMALL))
    (completion,) = run(engine, [[A]], [SamplingParams(ignore_eos=True, max_tokens=7)])
    assert completion.completion_tokens == 7
    assert completion.finish_reason == "length"


def test_too_many_stop_tokens_for_min_tokens_is_an_error_of_the_row(endless, run) -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(10, 30)))
    (completion,) = run(endless, [[A]], [params])
    assert completion.error_code == "bad_row_params"
    assert "at most 16" in completion.error_message


def test_nan_weights_of_one_token_fail_only_the_rows_that_meet_it(tmp_path, run) -> None:
    folder = write_scripted_llama(tmp_path / "model", {A: A})
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][byte_id(66)] = np.nan
    write_weights(folder, tensors)
    config = EngineConfig(max_model_len=32, num_blocks=6, block_size=4, **SMALL)
    engine = Engine.load(folder, config)
    prompts = [[A] * 5, [A, byte_id(66), A], [A] * 6]
    params = [SamplingParams(max_tokens=4)] * 3
    first, bad, last = run(engine, prompts, params)
    assert bad.error_code == "nonfinite_logits"
    assert "behind token 3" in bad.error_message
    assert first.text == last.text == "AAAA"
    # The blocks that held NaN are handed out again: nothing of it may come through.
    again = run(engine, [[A] * 5] * 4, [SamplingParams(max_tokens=4)] * 4)
    assert [c.text for c in again] == ["AAAA"] * 4


def test_order_is_by_request_even_if_later_ones_finish_first(scripted, run) -> None:
    config = EngineConfig(max_model_len=32, num_blocks=7, block_size=4, watermark=0.0, **SMALL)
    engine = scripted({A: A}, config)
    lens = [20, 2, 14, 1, 9, 3]
    completions = run(engine, [[A]] * 6, [SamplingParams(max_tokens=n) for n in lens])
    assert [c.completion_tokens for c in completions] == lens
    assert engine.stats.preemptions > 0


def test_generate_takes_texts_and_token_ids(scripted) -> None:
    engine = scripted({A: byte_id(66), byte_id(66): EOS_ID})
    completions = engine.generate(["xA", [A]], SamplingParams(max_tokens=5))
    assert [c.text for c in completions] == ["B", "B"]
    assert [c.prompt_tokens for c in completions] == [3, 1]


def test_generate_on_a_busy_engine_and_a_reused_id_are_refused(scripted) -> None:
    engine = scripted({A: A})
    engine.add_request(Request(request_id=1, prompt_ids=(A,)))
    with pytest.raises(ConfigError, match="1 requests are unfinished"):
        engine.generate([[A]])
    with pytest.raises(ValueError, match="request 1 is unfinished"):
        engine.add_request(Request(request_id=1, prompt_ids=(A,)))
    engine.step()
    assert engine.abort() == [1]
    assert not engine.has_work()
    engine.check_integrity()


def test_model_length_above_the_models_own_is_refused(tmp_path) -> None:
    folder = write_tiny_llama(tmp_path / "model", max_position_embeddings=64)
    with pytest.raises(ConfigError, match="max_model_len is 65, the model was made for at most 64"):
        Engine.load(folder, EngineConfig(max_model_len=65))


def test_description_says_blocks_tokens_bytes_and_how_many_requests_fit(scripted) -> None:
    config = EngineConfig(max_model_len=64, num_blocks=40, block_size=8)
    text = scripted({}, config).description
    per_token = 2 * 1 * 2 * 68 * 4
    assert "40 blocks x 8 = 320 tokens" in text
    assert f"({per_token:,} bytes a token)" in text
    assert "5 requests of 64 tokens fit at once" in text


def test_pool_that_cannot_fit_names_the_numbers() -> None:
    def resolve(**config):
        return resolve_capacity(
            EngineConfig(**config), available=10_000_000, bytes_per_token=1000, max_model_len=1024
        )

    assert resolve(memory_utilization=0.5, max_num_seqs=64).num_blocks == 312
    assert resolve(memory_utilization=0.5, max_num_seqs=2).num_blocks == 128
    with pytest.raises(CapacityError, match="use at most 625 blocks"):
        resolve(num_blocks=626)
    with pytest.raises(CapacityError, match=r"one block of 16384 tokens needs 0\.02 GiB"):
        resolve(block_size=16384)


def test_weights_that_cannot_fit_are_refused_before_they_are_read() -> None:
    shapes = {"a": (1024, 1024), "b": (1024,)}
    check_weights(shapes, dtype="float32", available=4 * (1024 * 1024 + 1024))
    with pytest.raises(CapacityError, match=r"or engine\.dtype bfloat16") as error:
        check_weights({"a": (2**32,)}, dtype="float32", available=2**30)
    assert "need 16.00 GiB in float32, 1.00 GiB are available" in str(error.value)


def test_a_token_budget_below_the_lanes_is_refused(scripted) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 7: a step could not decode 8"):
        scripted({}, EngineConfig(max_num_batched_tokens=7, max_num_seqs=8))


def test_container_limit_counts_where_it_is_tighter(tmp_path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_host_bytes(meminfo, tmp_path / "none") == 8000 * 1024
    v2 = tmp_path / "v2"
    v2.mkdir()
    (v2 / "memory.max").write_text("5000000\n")
    (v2 / "memory.current").write_text("3000000\n")
    (v2 / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert available_host_bytes(meminfo, v2) == 3_000_000
    (v2 / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, v2) == 8000 * 1024
    v1 = tmp_path / "v1" / "memory"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("2000000\n")
    (v1 / "memory.usage_in_bytes").write_text("500000\n")
    assert available_host_bytes(meminfo, v1.parent) == 1_500_000
