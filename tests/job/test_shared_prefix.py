"""A job whose rows begin alike, through the real engine on a tiny model."""

import io

import pyarrow.parquet as pq
import pytest
import rich.console
from tiny import write_tiny_llama

from jaxpaged.engine import Engine
from jaxpaged.job import report_table
from jaxpaged.job.runner import run_job

NUM_ROWS = 256
PREFIX = "".join(chr(ord("a") + (7 * i + i // 26) % 26) for i in range(512))
BLOCK_SIZE = 16


@pytest.fixture
def spec(tmp_path, write_rows, make_spec):
    """256 questions behind 512 tokens that all of them begin with: a token is a byte."""
    model = write_tiny_llama(
        tmp_path / "model", hidden=16, layers=1, max_position_embeddings=640, add_bos=False
    )
    write_rows(question=[f"{row:03} is the number" for row in range(NUM_ROWS)])
    return make_spec(
        model=str(model),
        input={"prompt": PREFIX + "{{ question }}"},
        sampling={"max_tokens": 3, "ignore_eos": True},
        engine={"max_model_len": 640, "block_size": BLOCK_SIZE, "num_blocks": 400},
    )


def test_a_prefix_of_256_rows_is_computed_once_and_the_report_says_what_that_saved(
    spec, out
) -> None:
    report = run_job(spec)
    stats = report.run.engine
    questions = stats["prompt_tokens"] - NUM_ROWS * len(PREFIX)
    assert NUM_ROWS < questions < NUM_ROWS * len(PREFIX) / 10
    assert stats["cached_tokens"] == report.output.cached_tokens == (NUM_ROWS - 1) * len(PREFIX)
    # Behind its first token a completion computes all of its tokens but the last one.
    computed = stats["prefill_tokens"] + stats["decode_tokens"]
    assert computed == len(PREFIX) + questions + NUM_ROWS * 2
    cached = pq.read_table(next(out.glob("part-*.parquet")))["cached_tokens"].to_pylist()
    assert sorted(cached) == [0, *[len(PREFIX)] * (NUM_ROWS - 1)]
    console = rich.console.Console(file=io.StringIO(), width=120)
    report_table.show(report, console)
    assert "130,560 of 134,400 prompt tokens came from the cache (97.1%)" in console.file.getvalue()


def test_nothing_is_compiled_once_rows_are_completed(spec, monkeypatch) -> None:
    seen: list[int] = []
    step = Engine.step

    def counted(engine: Engine):
        seen.append(engine.stats.executables)
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    report = run_job(spec)
    assert {*seen} == {report.run.engine["executables"]}
    # Two for steps: of the lanes' decodes alone, and beside a question's tokens; 512 is the most.
    assert len(seen) > NUM_ROWS // 64
