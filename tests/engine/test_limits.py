"""Limits, impossible requests and faults of single requests, end to end through the engine."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EOS_ID, byte_id, write_scripted_llama, write_tiny_llama, write_weights

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.engine import limits, memory
from jaxpaged.engine.dry_runner import DryRunner
from jaxpaged.engine.engine import load_model
from jaxpaged.engine.memory import available_host_bytes, check_weights, resolve_capacity
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.llama import Llama

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


def test_too_many_stop_tokens_for_min_tokens_is_an_error_of_the_row(scripted, run) -> None:
    endless = scripted({A: A}, vocab_size=400)
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(330)))
    (completion,) = run(endless, [[A]], [params])
    assert completion.error_code == "bad_row_params"
    assert "at most 320" in completion.error_message


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
    assert engine.stats.recomputes + engine.stats.swaps > 0


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


def test_blocks_longer_than_a_sequence_are_refused(scripted) -> None:
    with pytest.raises(ConfigError, match="block_size is 128, a sequence has at most 64 tokens"):
        scripted({}, EngineConfig(max_model_len=64, block_size=128))


def test_one_text_is_no_list_of_prompts(endless) -> None:
    with pytest.raises(ConfigError, match="takes a list of prompts"):
        endless.generate("AAA")


def test_a_stop_token_outside_the_vocabulary_is_an_error_of_the_row(endless, run) -> None:
    (completion,) = run(endless, [[A]], [SamplingParams(stop_token_ids=(272,))])
    assert completion.error_code == "bad_row_params"
    assert "stop token id 272" in completion.error_message


def test_abort_drops_faulty_requests_too(endless) -> None:
    endless.add_request(Request(request_id=5, prompt_ids=()))
    assert endless.has_work()
    assert endless.abort() == [5]
    assert not endless.has_work()
    assert endless.step() == []


def test_the_watermark_of_the_settings_holds_at_admission(scripted, run) -> None:
    def most_running(watermark: float) -> int:
        config = EngineConfig(
            max_model_len=32, num_blocks=16, block_size=4, watermark=watermark, **SMALL
        )
        engine = scripted({A: A}, config)
        for index in range(4):
            engine.add_request(
                Request(
                    request_id=index,
                    prompt_ids=(A + index,) * 13,
                    params=SamplingParams(max_tokens=2),
                )
            )
        engine.step()
        return engine.num_unfinished() - engine.stats.waiting

    assert most_running(0.0) == 4
    assert most_running(0.5) == 2


def test_the_counters_of_a_small_run_are_exact(scripted, run) -> None:
    config = EngineConfig(max_model_len=32, num_blocks=16, block_size=4, **SMALL)
    engine = scripted({A: A}, config)
    run(engine, [[A] * 6, [A] * 3], [SamplingParams(max_tokens=3)] * 2)
    stats = engine.stats
    # One step with both prefills and two with both decodes, all in buckets of 64 tokens.
    assert (stats.steps, stats.sampled_tokens) == (3, 6)
    assert (stats.prefill_tokens, stats.decode_tokens) == (9, 4)
    assert stats.padding_tokens == (64 - 9) + 2 * (64 - 2)
    assert stats.peak_used_blocks == 4
    assert stats.live_slot_steps == 9 + 11 + 13
    assert stats.reserved_slot_steps == 4 * (3 + 3 + 4)
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    host_seconds = stats.host_seconds
    time.sleep(0.2)
    run(engine, [[A]], [SamplingParams(max_tokens=1)])
    assert stats.host_seconds < host_seconds + 0.2


def test_pool_that_cannot_fit_names_the_numbers() -> None:
    def resolve(**config):
        return resolve_capacity(
            EngineConfig(**config), available=10_000_000, bytes_per_token=1000, max_model_len=1024
        )

    assert resolve(memory_utilization=0.5, max_num_seqs=64).num_blocks == 312
    assert resolve(memory_utilization=0.5, max_num_seqs=2).num_blocks == 128
    with pytest.raises(CapacityError, match=r"engine\.num_blocks: at most 625, or leave it out"):
        resolve(num_blocks=626)
    with pytest.raises(CapacityError, match=r"one block holds 16,384 tokens: 15\.6 MiB needed"):
        resolve(block_size=16384)


def test_what_would_help_a_pool_comes_with_numbers() -> None:
    def refusal(**config) -> str:
        with pytest.raises(CapacityError) as error:
            resolve_capacity(
                EngineConfig(**config),
                available=10_000_000,
                bytes_per_token=1000,
                max_model_len=1024,
                narrower={"int8": 300},
            )
        return str(error.value)

    asked = refusal(num_blocks=1000)
    assert "1,000 blocks of the KV pool: 15.3 MiB needed, 9.5 MiB available" in asked
    assert "(2) engine.kv_dtype: int8, with which they need 4.6 MiB; (3) free 5.7 MiB" in asked
    shared = refusal(memory_utilization=0.001)
    assert "(1) engine.memory_utilization: at least 0.01; (2) engine.kv_dtype: int8" in shared


class ExhaustedRunner(DryRunner):
    """Whose device has no memory left when a step is started."""

    def dispatch(self, plan):
        jnp.zeros(2**44, jnp.float32)


def test_a_device_that_runs_out_of_memory_says_what_to_change(tiny_folder) -> None:
    loaded = load_model(tiny_folder(), EngineConfig(max_model_len=64, **SMALL))
    engine = Engine(*loaded, make_runner=lambda _, limits: ExhaustedRunner(limits.shapes))
    engine.add_request(Request(request_id=1, prompt_ids=(A,)))
    with pytest.raises(CapacityError) as error:
        engine.step()
    message = str(error.value)
    assert message.startswith("running a step: the device ran out of memory: 65536.00 GiB needed, ")
    assert "(1) engine.memory_utilization: 0.4; (2) engine.max_num_seqs: 2; (3) end" in message
    assert error.value.exit_code == 5


def test_static_reservation_needs_room_for_the_longest_sequence(tiny_folder) -> None:
    config = EngineConfig(
        max_model_len=64, num_blocks=7, block_size=8, reservation="static", **SMALL
    )
    message = r"for one sequence of 64 tokens: .* engine\.max_model_len: at most 56"
    with pytest.raises(CapacityError, match=message):
        Engine.load(tiny_folder(), config)


def test_a_sampler_that_cannot_fit_names_the_numbers(scripted, monkeypatch) -> None:
    needed = limits.workspace_bytes(max_num_seqs=200, vocab_size=272)
    assert needed == 10 * 256 * 272 * 4
    free = iter([10**9, needed - 1])
    monkeypatch.setattr(memory, "available_bytes", lambda: next(free))
    message = r"200 sequences from 272 tokens: .* needed, .* engine\.max_num_seqs: at most 192"
    with pytest.raises(CapacityError, match=message):
        scripted({}, EngineConfig(max_model_len=64, max_num_seqs=200))


def test_weights_that_cannot_fit_are_refused_before_they_are_read() -> None:
    shapes = {"a": (1024, 1024), "b": (1024,)}
    check_weights(shapes, dtype="float32", available=4 * (1024 * 1024 + 1024))
    with pytest.raises(CapacityError, match=r"engine\.dtype: bfloat16, .* 8\.00 GiB") as error:
        check_weights({"a": (2**32,)}, dtype="float32", available=2**30)
    assert "in float32: 16.00 GiB needed, 1.00 GiB available" in str(error.value)
    assert "at most 268,435,456 parameters" in str(error.value)


@pytest.mark.parametrize(("name", "is_advised"), [("mlp", True), ("mlp.experts.0", False)])
def test_int8_is_advised_where_it_is_served(name: str, is_advised: bool) -> None:
    shapes = {f"model.layers.0.{name}.up_proj.weight": (4096, 4096)}
    with pytest.raises(CapacityError) as error:
        check_weights(shapes, dtype="float32", available=2**20)
    assert ("engine.weight_dtype: int8" in str(error.value)) == is_advised


def test_a_token_budget_below_the_lanes_is_refused(scripted) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 7: a step could not decode 8"):
        scripted({}, EngineConfig(max_num_batched_tokens=7, max_num_seqs=8))


@pytest.fixture
def proc(tmp_path):
    """A machine with 8,000 kB available and a process in the group /outer/inner."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    groups = "12:memory:/outer/inner\n0::/outer/inner\n"
    (tmp_path / "proc/self/cgroup").write_text(groups)
    return tmp_path / "proc"


def write_limit(folder, limit: str, usage: str, names=("memory.max", "memory.current")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(text + "\n")


def test_without_containers_the_machine_s_memory_is_available(proc, tmp_path) -> None:
    assert available_host_bytes(proc, tmp_path / "none") == 8000 * 1024
    assert available_host_bytes(tmp_path / "no_proc", tmp_path / "none") > 2**20


@pytest.mark.parametrize("group", ["", "outer", "outer/inner"])
def test_the_tightest_container_around_the_process_counts(proc, tmp_path, group: str) -> None:
    cgroup = tmp_path / "cgroup"
    write_limit(cgroup / "outer/inner", "max", "0")
    write_limit(cgroup / group, "5000000", "3000000")
    (cgroup / group / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert available_host_bytes(proc, cgroup) == 3_000_000
    write_limit(cgroup / group, "max", "3000000")
    assert available_host_bytes(proc, cgroup) == 8000 * 1024


def test_limits_of_version_1_containers_count(proc, tmp_path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write_limit(tmp_path / "cgroup/memory/outer", "2000000", "500000", names)
    assert available_host_bytes(proc, tmp_path / "cgroup") == 1_500_000


def tiny_model_by(attention):
    """A model of one layer, whose keys take 128 bytes a token in int8."""
    config = ModelConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        rope_theta=1e4,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )
    return Llama(config, dtype=jnp.dtype(jnp.float32), layer_loop="unrolled", attention=attention)


@pytest.mark.parametrize(
    ("attention", "kv_dtype", "gib", "shrinks"),
    [
        ("triton", "int8", 6, True),
        ("triton", "fp8", 8, True),
        ("triton", "int8", 3.9, False),
        ("triton", "int8", 9, False),
        ("triton", "bfloat16", 12, False),
        ("xla", "int8", 6, False),
    ],
)
def test_pools_that_the_kernels_cannot_address_become_smaller(
    monkeypatch, attention, kv_dtype, gib: float, shrinks: bool
) -> None:
    config = EngineConfig(memory_utilization=1.0, max_num_seqs=1, kv_dtype=kv_dtype)
    model = tiny_model_by(attention)
    monkeypatch.setattr(limits, "partials_bytes", lambda *_: 0)
    found = limits.capacity(config, model, 2**28, kv_dtype=kv_dtype, available=int(gib * 2**30))
    expected = 2**31 if shrinks else found.num_tokens * 128
    assert found.num_tokens * 128 == expected
    assert shrinks or found.num_bytes > 0.95 * gib * 2**30


def test_blocks_asked_for_that_the_kernels_cannot_address_are_refused() -> None:
    config = EngineConfig(num_blocks=3 * 2**19, kv_dtype="int8")
    message = r"1,572,864 .* int8 keys, .* 3\.00 GiB needed, 2\.00 .* most 1,048,576; .* 2,097,153"
    with pytest.raises(CapacityError, match=message):
        limits.capacity(config, tiny_model_by("triton"), 64, kv_dtype="int8", available=2**36)


def test_partial_results_of_long_contexts_are_taken_off_the_pool() -> None:
    config = EngineConfig(memory_utilization=1.0, max_num_seqs=1)
    length = 2**26
    by_kernels, by_xla = (
        limits.capacity(
            config, tiny_model_by(attention), length, kv_dtype="bfloat16", available=2**34
        )
        for attention in ("triton", "xla")
    )
    # 64 queries at least, 2 heads of 64 numbers and 2 more, a partition for 256 tokens.
    partials = 64 * 2 * length // 256 * 66 * 4
    assert abs(by_xla.num_bytes - by_kernels.num_bytes - partials) < 2**20
    with pytest.raises(CapacityError, match="attention for 1 sequences of 268,435,456 tokens: 33"):
        limits.capacity(
            config, tiny_model_by("triton"), 2**28, kv_dtype="bfloat16", available=2**34
        )
