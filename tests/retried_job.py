"""A finished job whose rows tests of `retry` redo, and how they look at what that gave."""

from collections.abc import Callable
from typing import Any

from jaxpaged.job.report import JobReport
from jaxpaged.job.runner import run_job
from jaxpaged.job.spec import JobSpec

SMALL: dict[str, Any] = {
    "input": {"prompt_column": "q"},
    "output": {"rows_per_part": 4},
    "engine": {"max_num_seqs": 2},
}


def finished_job(write_rows: Callable, make_spec: Callable, engine: Callable) -> JobSpec:
    """A finished job of twenty rows in five parts; every third one was cut."""
    texts = [f"q{i}" + "-long" * (i % 3 == 1) for i in range(20)]
    write_rows(id=list(range(20)), q=texts, row_group_size=7)
    spec = make_spec(**SMALL, sampling={"max_tokens": 6})
    run_job(spec, engine=engine())
    return spec


def asked(double) -> list[int]:
    """The rows that an engine was given."""
    return [request.request_id for request in double.requests]


def again(text: str) -> str:
    """What an engine answers that is told from the first one's."""
    return f"({text})"


def done(report: JobReport | None) -> JobReport:
    assert report is not None
    assert report.state == "finished"
    return report
