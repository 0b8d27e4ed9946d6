"""Requests of a load test: their lengths, what they share, and what is refused."""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.errors import ConfigError, InputSchemaError
from jaxpaged.stress import stress_options, workload
from jaxpaged.stress.workload import LenRange, Shape

COMMON = {"token_ids": list(range(10, 200)), "max_model_len": 64, "seed": 3}


def test_lengths_lie_in_their_ranges_and_follow_the_weights() -> None:
    shape = Shape(
        prompts=(LenRange(least=2, most=4, weight=3.0), LenRange(least=20, most=30, weight=1.0)),
        new_tokens=LenRange(least=5, most=9),
    )
    requests = workload.from_shape(shape, 400, **COMMON)
    lens = [len(request.prompt_ids) for request in requests]
    short = sum(2 <= length <= 4 for length in lens)
    assert short + sum(20 <= length <= 30 for length in lens) == 400
    assert 260 < short < 340
    assert {request.params.max_tokens for request in requests} == {5, 6, 7, 8, 9}
    assert all(request.params.ignore_eos for request in requests)
    assert workload.from_shape(shape, 400, **COMMON) == requests
    assert workload.from_shape(shape, 400, **(COMMON | {"seed": 4})) != requests


def test_prompts_share_a_beginning_as_many_as_asked_for() -> None:
    shape = Shape(prompts=(LenRange(least=20, most=20),), prefix_tokens=12, prefix_share=0.5)
    requests = workload.from_shape(shape, 100, **COMMON)
    beginnings = [request.prompt_ids[:12] for request in requests]
    common = max(beginnings.count(beginning) for beginning in beginnings)
    assert 35 < common < 65
    assert len({request.prompt_ids for request in requests}) == 100


@pytest.mark.parametrize("max_model_len", [2, 3, 40, 4096])
def test_the_usual_mix_fits_every_model(max_model_len: int) -> None:
    limits = COMMON | {"max_model_len": max_model_len}
    requests = workload.from_shape(Shape(), 200, **limits)
    for request in requests:
        assert request.prompt_ids
        assert request.params.max_tokens
        assert len(request.prompt_ids) + request.params.max_tokens <= max_model_len


def test_a_completion_that_would_not_fit_is_shorter_and_a_prompt_is_refused() -> None:
    shape = Shape(prompts=(LenRange(least=60, most=60),), new_tokens=LenRange(least=9, most=9))
    (request,) = workload.from_shape(shape, 1, **COMMON)
    assert request.params.max_tokens == 4
    shape = Shape(prompts=(LenRange(least=64, most=64),))
    with pytest.raises(ConfigError, match="a prompt of 64 tokens leaves no room"):
        workload.from_shape(shape, 1, **COMMON)


def test_lengths_come_from_the_output_of_a_job(tmp_path: pathlib.Path) -> None:
    table = pa.table({"prompt_tokens": [3, 0, 7, 9], "completion_tokens": [5, 6, None, 2]})
    pq.write_table(table, tmp_path / "part-000000.parquet")
    lens = workload.read(tmp_path, 10)
    assert lens == [(3, 5), (9, 2)]
    assert workload.read(tmp_path, 1) == lens[:1]
    requests = workload.from_lens(lens, shape=Shape(), **COMMON)
    found = [(len(request.prompt_ids), request.params.max_tokens) for request in requests]
    assert found == lens


def test_files_without_lengths_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(InputSchemaError, match="no Parquet with columns prompt_tokens and"):
        workload.read(path, 5)
    path.write_text("x")
    with pytest.raises(InputSchemaError, match=r"--lengths: .*rows\.parquet is no Parquet"):
        workload.read(path, 5)
    pq.write_table(pa.table({"prompt_tokens": ["3"], "completion_tokens": [1]}), path)
    with pytest.raises(
        InputSchemaError, match=r"column prompt_tokens of .* is string, not integers"
    ):
        workload.read(path, 5)
    pq.write_table(pa.table({"prompt_tokens": [0, 4], "completion_tokens": [1, -4]}), path)
    with pytest.raises(InputSchemaError, match="has no row with tokens in both columns"):
        workload.read(path, 5)


USUAL = {
    "requests": 8,
    "concurrency": "4",
    "prompts": (),
    "new_tokens": None,
    "lengths": None,
    "prefix": (0, 1.0),
    "memory": None,
    "is_compared": True,
    "checked": 2,
}


def test_options_are_read() -> None:
    texts = {"concurrency": "8,2,8", "prompts": ("16-64:5", "100"), "memory": "2MiB"}
    found = stress_options.options(**(USUAL | texts))
    assert found.concurrency == (2, 8)
    assert found.pool_bytes == 2**21
    assert found.shape.prompts == (
        LenRange(least=16, most=64, weight=5.0),
        LenRange(least=100, most=100),
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": ("64-16",)}, "--prompt: expected tokens such as 128 or 16-64"),
        ({"prompts": ("0-16",)}, "found '0-16'"),
        ({"prompts": ("16:0",)}, "found '16:0'"),
        ({"new_tokens": "many"}, "--new-tokens: expected tokens"),
        ({"concurrency": "0,4"}, "--concurrency: expected numbers such as 16,32,64"),
        ({"concurrency": ""}, "--concurrency: expected numbers"),
        ({"memory": "lots"}, "--memory: expected a size such as 256MiB; found 'lots'"),
        ({"lengths": "x", "new_tokens": "5"}, "--lengths says how long prompts"),
        ({"requests": 3}, "--requests 3 are fewer than --concurrency 4"),
    ],
)
def test_options_that_say_nothing_are_refused(changed, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stress_options.options(**(USUAL | changed))
