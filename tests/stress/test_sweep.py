"""Loads on tiny models: what is measured, and that paging carries more in the same memory."""

import itertools
import json
import math
import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner
from flax import nnx
from oracle import Oracle
from tiny import write_tiny_llama, write_weights

from jaxpaged import Engine, EngineConfig, JobSpec
from jaxpaged.cli import main
from jaxpaged.errors import ConfigError
from jaxpaged.model import unpaged, weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.request import Completion, Request
from jaxpaged.stress import check, load, stress_page, sweep
from jaxpaged.stress.sweep import StressOptions
from jaxpaged.stress.workload import LenRange, Shape

SHAPE = Shape(
    prompts=(LenRange(least=2, most=10, weight=5.0), LenRange(least=20, most=40, weight=2.0)),
    new_tokens=LenRange(least=2, most=12),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", hidden=64, heads=4)


@pytest.fixture(scope="module")
def spec(model, tmp_path_factory) -> JobSpec:
    engine = {"max_model_len": 64, "block_size": 4}
    job = {"model": str(model), "input": {"path": "in", "prompt": "x"}, "output": {"path": "out"}}
    return JobSpec.from_dict(job | {"engine": engine}, tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def report(spec):
    options = StressOptions(shape=SHAPE, requests=24, concurrency=(4, 12), checked=6)
    return sweep.stress(spec, options)


def test_paging_carries_more_requests_in_the_same_memory(report) -> None:
    # A quarter of 12 lanes of 64 tokens, in blocks of 4.
    assert {one.num_blocks for one in report.loads} == {3 * 16}
    paged, static = report.widest["paged"], report.widest["static"]
    # All of the pool is reserved: none of it is kept back for what never grows.
    assert static.peak_running == 3
    assert paged.mean_running > 1.5 * static.mean_running
    assert paged.steps < static.steps
    assert static.kv_waste_share > 0.5 > paged.kv_waste_share
    assert [one.concurrency for one in report.loads] == [4, 4, 12, 12]


def test_every_load_completes_the_same_requests(report) -> None:
    for one in report.loads:
        assert (one.requests, one.failed) == (24, {})
        assert one.prompt_tokens == report.prompt_lens.total
        assert one.new_tokens == report.new_lens.total
        assert sum(one.timeline.sampled_tokens) == one.new_tokens
        assert 0 < one.peak_used_blocks <= one.num_blocks
        assert 0 < one.mean_used_share <= 1
        assert one.first_token.median <= one.first_token.p95 <= one.first_token.most
        assert one.between_tokens.most > 0
        assert one.peak_bytes > 2**26


def test_completions_are_those_of_the_decoder_without_a_pool(report) -> None:
    assert report.check is not None
    assert (report.check.requests, report.check.largest_gap) == (6, 0.0)
    assert report.check.equal == report.check.tokens > 12
    assert report.exit_code == 0


def test_a_wrong_token_is_found(model) -> None:
    decoder = loaded(model)
    request = Request(request_id=0, prompt_ids=(40, 41, 42))
    (right,) = Engine.load(model, EngineConfig(max_model_len=64)).generate([[40, 41, 42]])
    good = check.check(decoder, "float32", [(request, right)])
    assert (good.equal, good.is_good) == (good.tokens, True)
    tokens = (*right.token_ids[:3], (right.token_ids[3] + 1) % 272, *right.token_ids[4:])
    wrong = Completion(request_id=0, finish_reason="length", token_ids=tokens)
    bad = check.check(decoder, "float32", [(request, wrong)])
    assert bad.equal < bad.tokens
    assert not bad.is_good
    assert check.check(decoder, "int8", [(request, wrong)]).is_good is None
    # The wider rounding of weights and of keys and values counts.
    assert check._tolerance("bfloat16", "float32") == check._tolerance("float32", "bfloat16") == 0.5


def test_logits_that_are_no_numbers_are_no_agreement(model, tmp_path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(model, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:] = np.nan
    write_weights(folder, tensors)
    request = Request(request_id=0, prompt_ids=(40, 41))
    completion = Completion(request_id=0, finish_reason="length", token_ids=(5, 6))
    found = check.check(loaded(folder), "float32", [(request, completion)])
    assert (found.equal, found.is_good, found.largest_gap) == (0, False, math.inf)
    assert found.to_json()["largest_gap"] is None


def loaded(folder, loop="scan", attention="xla"):
    return weights.load(
        open_checkpoint(folder), dtype=jnp.dtype(jnp.float32), layer_loop=loop, attention=attention
    )


@pytest.mark.parametrize(
    ("loop", "attention", "window"),
    [("scan", "xla", None), ("scan", "llvm", None), ("unrolled", "xla", 5)],
)
def test_the_decoder_without_a_pool_is_the_dense_one(tmp_path, loop, attention, window) -> None:
    kind = {"model_type": "mistral", "sliding_window": window} if window else {}
    folder = write_tiny_llama(tmp_path / "tiny", hidden=64, heads=4, **kind)
    ids = np.random.default_rng(0).integers(3, 259, 20)
    graph, state = nnx.split(loaded(folder, loop, attention))
    rows = np.array([0, 7, 19])
    found = unpaged.logits(graph, state, ids, rows)
    expected = Oracle(open_checkpoint(folder)).logits(ids.tolist())[rows]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_static_reservation_that_cannot_fit_is_a_note(spec) -> None:
    shape = Shape(prompts=(LenRange(least=2, most=4),), new_tokens=LenRange(least=2, most=3))
    # 15 blocks are not one sequence of 64 tokens.
    options = StressOptions(
        shape=shape, requests=4, concurrency=(2,), checked=0, pool_bytes=15 * 4 * token_bytes(spec)
    )
    found = sweep.stress(spec, options)
    assert [one.reservation for one in found.loads] == ["paged"]
    assert found.check is None
    (note,) = found.notes
    assert "static reservation was not tried" in note
    assert "engine.max_model_len: at most 60; (2) --memory: at least" in note
    assert "not compared" in stress_page.render(found)


def token_bytes(spec: JobSpec) -> int:
    config = open_checkpoint(pathlib.Path(spec.model)).config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4


def test_memory_for_less_than_a_block_is_refused(spec) -> None:
    options = StressOptions(shape=SHAPE, requests=2, concurrency=(2,), pool_bytes=100)
    with pytest.raises(ConfigError, match=r"--memory: .* hold not one block of 4 tokens"):
        sweep.stress(spec, options)


def test_requests_that_cannot_run_are_counted_by_code(spec) -> None:
    shape = Shape(prompts=(LenRange(least=40, most=40),), new_tokens=LenRange(least=9, most=9))
    options = StressOptions(
        shape=shape,
        requests=3,
        concurrency=(2,),
        is_compared=False,
        pool_bytes=40 * token_bytes(spec),
    )
    report = sweep.stress(spec, options)
    (found,) = report.loads
    assert found.failed == {"kv_capacity": 3}
    assert found.requests == 0
    assert report.exit_code == 1
    assert "no request completed" in stress_page.render(report)


class Clock:
    """A second for each look."""

    def __init__(self) -> None:
        self._now = itertools.count()

    def __call__(self) -> float:
        return float(next(self._now))


def test_times_are_from_a_request_to_its_first_token_and_between_tokens() -> None:
    watch = load._Watch(Clock())
    watch.given(1)
    watch.begin()
    watch.saw({1: 0}, [])
    watch.saw({1: 1}, [])
    watch.given(2)
    watch.saw({1: 2, 2: 0}, [])
    done = Completion(request_id=1, finish_reason="length", token_ids=(5, 6, 7))
    watch.saw({2: 1}, [done])
    assert watch.first == [2.0, 2.0]
    assert watch.between == [2.0, 1.0]


def test_latencies_are_summed_up_in_milliseconds() -> None:
    found = load.latency([0.001 * number for number in range(101)])
    assert (found.median, found.p95, found.most) == (50.0, 95.0, 100.0)
    two = load.latency([2.0, 1.0])
    assert (two.median, two.p95) == (1000.0, 2000.0)
    assert load.latency([]).most == 0.0


# The command


def test_the_command_shows_the_loads_and_what_paging_gains(spec, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(spec.model_dump(mode="json", exclude_none=True)))
    options = ["--requests", "8", "--concurrency", "4", "--prompt", "2-20", "--new-tokens", "2-5"]
    result = CliRunner().invoke(main, ["stress", str(path), *options])
    assert result.exit_code == 0, result.output
    for text in ("4 paged", "4 static", "at once with blocks on demand", "decoder without a pool"):
        assert text in result.output
    result = CliRunner().invoke(main, ["stress", str(path), *options, "--json", "--no-static"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["reservation"] for one in found["loads"]] == ["paged"]
    assert found["prompt_tokens"]["rows"] == 8


def test_the_page_shows_all_loads_and_refers_to_nothing(report, tmp_path) -> None:
    found = stress_page.write(report, stress_page.prepare(str(tmp_path / "new" / "stress")))
    assert [path.name for path in found] == ["stress.json", "stress.html"]
    loads = json.loads(found[0].read_text())["loads"]
    assert [one["concurrency"] for one in loads] == [4, 4, 12, 12]
    html = found[1].read_text()
    for text in (
        "12 requests in flight",
        "What paging gains",
        "Prompt tokens",
        "static reservation",
    ):
        assert text in html
    assert html.count("<svg") >= 6
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", html)


def test_an_output_that_cannot_be_written_is_found_before_the_load(spec, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(spec.model_dump(mode="json", exclude_none=True)))
    result = CliRunner().invoke(main, ["stress", str(path), "--out", f"{path}/out"])
    assert result.exit_code == 1
    assert "cannot be made: Not a directory" in result.output
    assert "loading" not in result.output


def test_bad_flags_of_the_command_are_usage_errors(spec, tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(spec.model_dump(mode="json", exclude_none=True)))
    for options in (["--concurrency", "x"], ["--prompt", "9-3"], ["--requests", "0"]):
        result = CliRunner().invoke(main, ["stress", str(path), *options])
        assert result.exit_code == 2, result.output
