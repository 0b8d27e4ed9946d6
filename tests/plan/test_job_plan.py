"""Plans of jobs: the schedule a run then has, rows that cannot fit, changes that would help."""

import io
import itertools
import json
import random

import jax
import pytest
import rich.console
from click.testing import CliRunner
from tiny import write_tiny_llama

from jaxpaged import Engine, run_job
from jaxpaged.cli import main
from jaxpaged.plan import cards, job_plan, plan_table, sampled_rows
from jaxpaged.plan.job_plan import PlanOptions


def texts(count: int, *, seed: int = 0, shared: str = "") -> list[str]:
    """Prompts of 1 to 40 letters behind what they share."""
    draw = random.Random(seed)
    return [shared + "".join(draw.choices("abcdef", k=draw.randint(1, 40))) for _ in range(count)]


SCHEDULES = {
    "roomy": ({}, {}, ""),
    "crowded": ({"num_blocks": 18}, {"max_tokens": 20}, ""),
    "common_beginning": ({"num_blocks": 30}, {}, "abcdefghijklm"),
    "no_prefix_cache": ({"prefix_cache": False}, {}, "abcdefghijklm"),
    "samples": ({}, {"n": 3, "temperature": 1.0}, ""),
    "scored_prompts": ({"prefix_cache": True}, {"prompt_logprobs": 0}, "abcdefghijklm"),
    "small_steps": ({"max_num_batched_tokens": 8}, {"max_tokens": 12}, ""),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_planned_schedule_is_that_of_the_run(make_spec, name: str) -> None:
    engine, sampling, shared = SCHEDULES[name]
    prompts = [*texts(30, shared=shared), None, "", "x" * 100, *texts(10, seed=1, shared=shared)]
    spec = make_spec(prompts, engine=engine, sampling=sampling)
    plan = job_plan.make(spec, PlanOptions())
    report = run_job(spec)
    ran, planned = report.run.engine, plan.paged
    assert planned is not None
    preemptions = ran["recomputes"] + ran["swaps"]
    assert preemptions > 0 or name != "crowded"
    assert planned.preemptions == preemptions
    assert planned.steps == ran["steps"]
    assert planned.peak_used_blocks == ran["peak_used_blocks"]
    assert planned.prompt_tokens == ran["prompt_tokens"]
    assert planned.cached_tokens == ran["cached_tokens"]
    assert planned.new_tokens == ran["sampled_tokens"]
    assert planned.prefill_tokens == ran["prefill_tokens"]
    assert planned.computed_tokens == ran["prefill_tokens"] + ran["decode_tokens"]
    assert planned.padding_tokens == ran["padding_tokens"]
    assert planned.executables == ran["executables"]
    waste = 1 - ran["live_slot_steps"] / ran["reserved_slot_steps"]
    assert planned.kv_waste_share == pytest.approx(waste, abs=1e-12)
    assert plan.capacity is not None
    assert plan.capacity.num_blocks == ran["num_blocks"]
    found = {error.code: error.count for error in report.errors}
    assert dict(plan.survey.fault_counts) == found
    assert all(plan.survey.faults[code] for code in found)


def test_rows_that_the_engine_refuses_are_refused_in_the_plan(make_spec) -> None:
    beams = {"beam_width": 5, "ignore_eos": False}
    spec = make_spec(texts(6), sampling=beams)
    plan = job_plan.make(spec, PlanOptions())
    assert dict(plan.survey.fault_counts) == {"bad_row_params": 6}
    assert len(plan.survey.faults["bad_row_params"]) == 3
    assert {error.code: error.count for error in run_job(spec).errors} == {"bad_row_params": 6}


def test_new_tokens_are_those_of_rows_that_run(make_spec) -> None:
    cut = {"on_too_long": "truncate_left"}
    plan = job_plan.make(make_spec(["x" * 80, "abc"], input=cut), PlanOptions())
    assert plan.paged is not None
    assert plan.survey.new_lens.total == plan.paged.new_tokens == 16
    plan = job_plan.make(make_spec(["x" * 80, "abc"]), PlanOptions())
    assert (len(plan.survey.new_lens), plan.survey.new_lens.total) == (1, 8)


def test_a_sum_that_there_is_no_memory_for_is_an_error(make_spec) -> None:
    steps = {"max_num_batched_tokens": 100_000, "num_blocks": None, "memory_utilization": 1.0}
    plan = job_plan.make(make_spec(texts(5), engine=steps), PlanOptions(card=cards.find("30MiB")))
    assert plan.exit_code == 5
    assert "weights, KV pool and temporary arrays together" in str(plan.shortage)
    assert "(1) engine.max_num_batched_tokens: below 100,000" in str(plan.shortage)
    assert plan.paged is not None


def test_what_the_output_folder_holds_is_noted(make_spec) -> None:
    spec = make_spec(texts(5))
    assert not any("output" in note for note in job_plan.make(spec, PlanOptions()).notes)
    run_job(spec)
    notes = job_plan.make(spec, PlanOptions()).notes
    assert any("already holds this job, finished" in note for note in notes)
    other = make_spec(texts(5), sampling={"max_tokens": 3})
    assert any("would be refused" in note for note in job_plan.make(other, PlanOptions()).notes)


def test_reserving_the_longest_carries_fewer_sequences_and_takes_more_steps(make_spec) -> None:
    plan = job_plan.make(make_spec(texts(40)), PlanOptions())
    assert plan.paged is not None
    assert plan.static is not None
    # 40 blocks of 4 are two sequences of 64 tokens.
    assert plan.static.peak_running == 2
    assert plan.paged.mean_blocks < 10 < plan.static.mean_blocks == 16
    assert plan.paged.peak_running == 4
    assert plan.static.steps > plan.paged.steps
    assert plan.static.preemptions == 0
    assert plan.static.kv_waste_share > 0.3 > plan.paged.kv_waste_share


def test_a_pool_without_room_for_one_reserved_sequence_has_no_such_schedule(make_spec) -> None:
    plan = job_plan.make(make_spec(texts(5), engine={"num_blocks": 15}), PlanOptions())
    assert plan.paged is not None
    assert plan.static is None


@pytest.mark.parametrize(
    ("policy", "errors", "skipped"),
    [("error", 2, 0), ("truncate_left", 0, 0), ("skip", 0, 2)],
)
def test_each_policy_for_long_prompts_is_told_whichever_the_job_has(
    make_spec, policy: str, errors: int, skipped: int
) -> None:
    prompts = ["x" * 80, "x" * 63, *texts(3)]
    plan = job_plan.make(make_spec(prompts, input={"on_too_long": policy}), PlanOptions())
    survey = plan.survey
    assert survey.too_long == 2
    assert survey.fault_counts["prompt_too_long"] == errors
    assert survey.skipped["prompt_too_long"] == skipped
    assert survey.prompt_lens.quantiles()["max"] == 81
    # What is cut leaves room for 8 tokens: 56 of 81 and of 64 stay.
    assert survey.effects["truncate_middle"].tokens_cut == (81 - 56) + (64 - 56)
    assert survey.effects["error"].rows == survey.effects["skip"].rows == 2


def test_rows_that_the_pool_can_never_hold_are_named_with_what_would_help(make_spec) -> None:
    spec = make_spec(["ab", "cd", "x" * 50], engine={"num_blocks": 10})
    plan = job_plan.make(spec, PlanOptions())
    assert plan.survey.fault_counts["kv_capacity"] == 1
    first, *others = plan.changes
    assert first.text.startswith("engine.num_blocks: left out")
    assert first.num_blocks == 4 * 16
    assert any(change.text.startswith("engine.kv_dtype: int8") for change in others)


def test_changes_come_in_the_order_of_their_price_with_the_pool_after_each(make_spec) -> None:
    # Three quarters of it are the sampler of 64 lanes, the weights, and some blocks.
    spec = make_spec(texts(40), engine={"num_blocks": None, "max_num_seqs": 64})
    tight = job_plan.make(spec, PlanOptions(card=cards.find("1.16MiB")))
    assert tight.paged is not None
    assert tight.capacity is not None
    assert tight.paged.preemptions > 0
    assert 16 <= tight.capacity.num_blocks < 40
    texts_of = [change.text for change in tight.changes]
    assert texts_of == [
        "engine.max_model_len: 48, the longest row's",
        "engine.memory_utilization: 0.9",
        "engine.max_num_seqs: 32",
        "engine.weight_dtype: int8",
        "engine.kv_dtype: int8",
        "a bigger card: l4",
    ]
    blocks = [change.num_blocks for change in tight.changes]
    assert blocks[1] > tight.capacity.num_blocks
    assert blocks[3] > tight.capacity.num_blocks
    assert blocks[4] > tight.capacity.num_blocks
    assert blocks[5] == 64 * 16


def test_a_model_without_grouped_queries_is_told_of_them(make_spec, tmp_path) -> None:
    model = write_tiny_llama(tmp_path / "ungrouped", hidden=64, heads=4, kv_heads=4)
    spec = make_spec(texts(40), engine={"num_blocks": 20}).model_copy(update={"model": str(model)})
    (found,) = [
        change
        for change in job_plan.make(spec, PlanOptions(card=cards.find("8MiB"))).changes
        if "GQA" in change.text
    ]
    assert found.text == "a model with 1 KV heads instead of 4 (GQA)"
    assert found.num_blocks > 0


def test_a_model_that_cannot_fit_is_planned_all_the_same(make_spec) -> None:
    spec = make_spec(texts(5), engine={"num_blocks": None})
    plan = job_plan.make(spec, PlanOptions(card=cards.find("0.1MiB")))
    assert plan.exit_code == 5
    assert plan.paged is None
    assert plan.survey.rows == 5
    assert "the weights in bfloat16" in str(plan.shortage)
    assert plan.changes[-1].text == "a bigger card: l4"
    assert plan.changes[-1].num_blocks == 4 * 16


def test_a_sample_is_spread_over_the_rows_and_stands_for_all(make_spec) -> None:
    plan = job_plan.make(make_spec(texts(400)), PlanOptions(max_rows=100))
    assert plan.survey.rows == 100
    assert plan.scale == 4
    assert any("100 of 400 rows" in note for note in plan.notes)
    # At least four times what the engine is given at once: three times its 4 lanes.
    assert job_plan.make(make_spec(texts(400)), PlanOptions(max_rows=1)).survey.rows == 48
    units = sampled_rows.sample(1_000_000, 5000)
    assert sum(unit.num_rows for unit in units) == 5000
    assert units[-1].start == 980_000
    assert all(a.stop <= b.start for a, b in itertools.pairwise(units))
    assert [
        sum(unit.num_rows for unit in sampled_rows.sample(1000, most)) for most in (3, 60, 99)
    ] == [3, 60, 99]


def test_the_memory_of_prompt_log_probabilities_is_mentioned(make_spec) -> None:
    plan = job_plan.make(make_spec(texts(3), sampling={"prompt_logprobs": 1}), PlanOptions())
    # Ten arrays of 64 rows of 272 float32 logits.
    (note,) = [note for note in plan.notes if "prompt log-probabilities" in note]
    assert "64 tokens at a time, in 0.7 MiB at most" in note


def test_new_tokens_assumes_shorter_completions(make_spec) -> None:
    spec = make_spec(texts(10))
    long, short = (job_plan.make(spec, PlanOptions(new_tokens=n)).paged for n in (None, 2))
    assert long is not None
    assert short is not None
    assert (long.new_tokens, short.new_tokens) == (80, 20)


def test_repetitions_are_counted_in_whole_blocks(make_spec) -> None:
    # With the token in front: 13, 13 and 10 tokens, of which 12, 12 and 8 are in whole blocks.
    plan = job_plan.make(make_spec(["abcdefghijkl", "abcdefghijkl", "abcdefgZZ"]), PlanOptions())
    assert plan.survey.duplicates == 1
    assert plan.survey.shared_tokens == 12 + 8
    assert plan.paged is not None


def test_a_job_without_rows_has_a_plan(make_spec) -> None:
    plan = job_plan.make(make_spec([]), PlanOptions(speed=(100.0, 200.0)))
    assert plan.paged is not None
    assert (plan.paged.steps, plan.seconds) == (0, None)


@pytest.mark.parametrize("weight_dtype", [None, "int8", "int4"])
def test_memory_is_that_of_the_loaded_model(make_spec, model, weight_dtype: str | None) -> None:
    spec = make_spec(texts(5), engine={"weight_dtype": weight_dtype})
    plan = job_plan.make(spec, PlanOptions(compiles=True))
    assert plan.memory is not None
    engine = Engine.load(model, spec.engine_config())
    loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner._weights))
    assert plan.memory.weights_bytes == loaded
    assert plan.memory.pool_bytes == engine.capacity.num_bytes
    assert plan.memory.temporary.by_compiler
    assert 0 < plan.memory.temporary.forward_bytes < 2**24
    assert plan.memory.process_bytes > 2**26


def test_what_quantised_weights_free_goes_to_the_pool(make_spec) -> None:
    derived = {"num_blocks": None, "max_num_seqs": 2000, "memory_utilization": 1.0}
    plans = {
        weight_dtype: job_plan.make(
            make_spec(texts(5), engine={**derived, "weight_dtype": weight_dtype}),
            PlanOptions(card=cards.find("60MiB")),
        )
        for weight_dtype in (None, "int8", "int4")
    }
    held = {}
    for weight_dtype, plan in plans.items():
        assert plan.capacity is not None
        assert plan.memory is not None
        held[weight_dtype] = plan.capacity.num_bytes + plan.memory.weights_bytes
        assert plan.target.weight_dtype == weight_dtype or plan.target.dtype
    pools = [plan.capacity.num_blocks for plan in plans.values() if plan.capacity]
    assert pools[0] < pools[1] < pools[2]
    block_bytes = 4 * plans[None].capacity.bytes_per_token  # type: ignore[union-attr]
    assert max(held.values()) - min(held.values()) <= block_bytes
    (advised,) = (
        change
        for change in advised_changes(make_spec)
        if change.text.startswith("engine.weight_dtype")
    )
    assert advised.text == "engine.weight_dtype: int8"


def advised_changes(make_spec):
    tight = {"num_blocks": None, "max_num_seqs": 20, "memory_utilization": 1.0}
    spec = make_spec(texts(5), engine=tight)
    return job_plan.make(spec, PlanOptions(card=cards.find("1MiB"))).changes


def test_the_table_names_the_weights(make_spec) -> None:
    spec = make_spec(texts(5), engine={"weight_dtype": "int4", "dtype": "float32"})
    console = rich.console.Console(width=120, file=io.StringIO())
    plan_table.show(job_plan.make(spec, PlanOptions()), console)
    assert "float32 with linear maps in int4, attention by" in console.file.getvalue()


# The command


def invoke(spec_path, *options: str):
    return CliRunner().invoke(main, ["plan", str(spec_path), *options])


@pytest.fixture
def job_file(tmp_path, make_spec):
    spec = make_spec(texts(20))
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(spec.model_dump(mode="json", exclude_none=True)))
    return path


def test_the_command_shows_rows_memory_schedule_and_time(job_file) -> None:
    result = invoke(job_file, "--speed", "100-200")
    assert result.exit_code == 0, result.output
    for text in ("prompt tokens", "KV pool", "blocks on demand", "64 tokens reserved", "time: 0:0"):
        assert text in result.output


def test_the_command_gives_json_with_the_same_figures(job_file, make_spec) -> None:
    result = invoke(job_file, "--json", "--device", "a100")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["device"] == "NVIDIA A100 80 GB"
    assert found["survey"]["rows"] == 20
    assert found["paged"]["steps"] > 0
    assert found["memory"]["needed_bytes"] > found["memory"]["pool_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "gtx"], "expected one of l4, rtx4090, a100, h100, h200, or a size"),
        (["--speed", "fast"], "--speed: expected tokens per second such as 750"),
        (["--speed", "9-3"], "found '9-3'"),
        (["--speed", "nan"], "found 'nan'"),
        (["--speed", "1-inf"], "found '1-inf'"),
        (["--speed", "5", "--speed-of", "out"], "exclude each other"),
        (["--speed-of", "nowhere"], "has no report of a run that completed rows"),
        (["--rows", "0"], "Invalid value for '--rows'"),
        (["--device", "l4", "--compile"], "leave --device out"),
    ],
)
def test_bad_flags_are_usage_errors(job_file, options: list[str], message: str) -> None:
    result = invoke(job_file, *options)
    assert result.exit_code == 2
    assert message in result.output


def test_too_little_memory_ends_with_5(job_file) -> None:
    result = invoke(job_file, "--device", "0.1MiB", "--set", "engine.num_blocks=null")
    assert result.exit_code == 5
    assert "does not fit" in result.output
    assert "Cheapest changes: (1)" in result.output


def test_the_speed_of_an_earlier_run_counts(job_file, tmp_path, make_spec) -> None:
    run_job(make_spec(texts(20)))
    result = invoke(job_file, "--speed-of", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "without loading and compiling" in result.output


def test_all_parts_of_a_plan_are_shown_without_an_error(make_spec) -> None:
    prompts = ["x" * 80, None, "<s>x", *texts(60)]
    spec = make_spec(prompts, engine={"num_blocks": 10}, sampling={"max_tokens": 20})
    console = rich.console.Console(width=200, file=io.StringIO())
    plan_table.show(job_plan.make(spec, PlanOptions(max_rows=8)), console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in ("row error null_prompt", "truncate_middle", "what would help", "looked at"):
        assert text in shown
