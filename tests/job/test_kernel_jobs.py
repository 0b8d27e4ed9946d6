"""A job through the kernels for GPUs, interpreted, on a tiny model."""

import pytest
from job_output import rows
from stop_after import StopAfter

from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.runner import run_job


def test_a_resumed_job_gives_the_rows_of_one_that_ran_through(
    tmp_path, write_rows, make_spec, out
) -> None:
    write_rows(id=list(range(12)), q=[f"question {7 * i}" for i in range(12)])
    shared = {
        "input": {"prompt_column": "q"},
        "sampling": {"max_tokens": 5, "ignore_eos": True},
        "engine": {"max_num_seqs": 4, "attention": "triton", "num_blocks": 64},
    }
    through = tmp_path / "through"
    spec = make_spec(**shared, output={"path": str(through), "rows_per_part": 6})
    report = run_job(spec)
    assert report.run.engine["implementation"] == "triton_interpreted"
    resumed = make_spec(**shared, output={"path": str(out), "rows_per_part": 6})
    with pytest.raises(JobInterrupted):
        run_job(resumed, should_stop=StopAfter(9))
    report = run_job(resumed)
    assert 0 < report.run.rows < 12
    assert rows(out) == rows(through)
