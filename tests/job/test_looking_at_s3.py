"""Status, verify, diff and compare of an output in an object store, which has no lock to ask."""

import pytest
from s3_server import s3_bucket, s3_filesystem, s3_options, s3_server  # noqa: F401  (fixtures)

from jaxpaged.errors import OutputConflictError
from jaxpaged.job import planned_job, rebuilt_report
from jaxpaged.job.look.compare import compare
from jaxpaged.job.look.diff import diff
from jaxpaged.job.look.status import status
from jaxpaged.job.look.verify import verify
from jaxpaged.job.output import output_view
from jaxpaged.job.runner import run_job


def test_an_output_in_a_bucket_is_looked_at_like_a_folder(
    write_rows,
    make_spec,
    engine,
    s3_bucket,  # noqa: F811
    s3_options,  # noqa: F811
):
    write_rows(q=[f"q{i}" for i in range(10)])
    place = {"path": f"{s3_bucket}/out", "rows_per_part": 4}
    storage = s3_options.model_dump(exclude_none=True)
    sections = {"input": {"prompt_column": "q"}, "output": {"rows_per_part": 4}}
    remote = make_spec(**sections | {"output": place}, storage=storage)
    run_job(remote, engine=engine())
    run_job(make_spec(**sections), engine=engine())
    store, local = (planned_job.open_output(spec) for spec in (remote, make_spec(**sections)))

    assert diff(store, local).is_same
    beside = compare(store, local)
    assert (beside.a, beside.b) == (store.url, local.url)
    assert [setting.name for setting in beside.settings] == [
        f"storage.s3.{key}" for key in sorted(storage["s3"]) if key != "anonymous"
    ]
    assert status(store).state == "finished"
    assert (verify(store).problems, verify(store).parts) == ((), 3)
    store.delete(output_view.REPORT)
    store.delete(output_view.PAGE)
    again = rebuilt_report.write(store)
    assert (again.state, again.output.rows, again.output.path) == ("finished", 10, store.url)
    assert b"[q0]" in (store.read(output_view.PAGE) or b"")
    assert output_view.read_json(store, output_view.REPORT) is not None

    # A part is there, its record is not; it depends on whether a writer may be at work.
    store.delete("_SUCCESS")
    store.delete("_jaxpaged/commits/000001-r0.json")
    assert [p.name for p in verify(store).problems] == ["part-000001.parquet"]
    assert status(store).state == "unfinished"
    store.delete("_jaxpaged/attempts/000001.end")
    assert (verify(store).problems, verify(store).is_running) == ((), True)
    found = status(store)
    assert (found.state, found.rows_committed) == ("running", 6)
    with pytest.raises(OutputConflictError, match="a job is running there"):
        rebuilt_report.write(store)
