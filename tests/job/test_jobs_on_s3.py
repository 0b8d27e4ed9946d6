"""Whole jobs on a server that speaks S3: what readers see, and what goes wrong on the way."""

import io
import json
import logging
import pathlib
import signal
import socket
import sys
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow.parquet as pq
import pytest
from bucket_place import BucketPlace, Row
from click.testing import CliRunner, Result
from failing_engine import FailingEngine
from job_output import Watch
from nursery import Nursery
from s3_proxy import (
    Held,
    S3Proxy,
    S3Request,
    aged,
    lost_answer,
    lost_request,
    refused,
    unconditional,
)
from s3_server import s3_bucket, s3_filesystem, s3_options, s3_server  # noqa: F401  (fixtures)
from stop_after import NEVER, StopAfter

from jaxpaged.cli import main
from jaxpaged.errors import (
    IdentityError,
    InputSchemaError,
    JaxPagedError,
    OutputConflictError,
    StorageError,
)
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look.diff import diff
from jaxpaged.job.look.status import status
from jaxpaged.job.look.verify import verify
from jaxpaged.job.output.attempt import LEASE_SECONDS
from jaxpaged.job.planned_job import RunOptions, open_output
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job

TESTS = pathlib.Path(__file__).resolve().parents[1]
PASSING = {
    "the request is lost": lost_request,
    "the answer is lost": lost_answer,
    "it fails": refused(500, "InternalError"),
    "there is too much to do": refused(503, "SlowDown"),
    "another request is in the way": refused(409, "ConditionalRequestConflict"),
}
SIGNS_OF_LIFE = r"attempts/\d+\.(json|beat)"


@pytest.fixture
def proxy(s3_server) -> Iterator[S3Proxy]:  # noqa: F811
    proxy = S3Proxy(s3_server)
    yield proxy
    proxy.close()


@pytest.fixture
def place(proxy, model, s3_bucket, s3_filesystem) -> BucketPlace:  # noqa: F811
    return BucketPlace(s3_bucket, s3_filesystem, proxy=proxy, model=model)


@pytest.fixture
def filled(place) -> BucketPlace:
    """With ten rows for three parts."""
    place.put("a.parquet", id=list(range(10)), q=[f"q{i}" for i in range(10)])
    return place


@pytest.fixture
def double(tokenizer) -> Callable[[], FailingEngine]:
    return lambda: FailingEngine(tokenizer, max_num_seqs=2)


class Looks:
    """Reads the output after each change that could show."""

    def __init__(self, place: BucketPlace) -> None:
        self._place = place
        self._seen: list[list[Row]] = []
        self._failed: list[Exception] = []
        place.proxy.on_change = self._look

    def take(self) -> list[list[Row]]:
        """What was seen since this was asked last."""
        if self._failed:
            raise self._failed[0]
        seen, self._seen = self._seen, []
        return seen

    def _look(self, request: S3Request) -> None:
        if any(name in request.key for name in ("/part-", "_SUCCESS", "/commits/")):
            try:
                self._seen.append(self._place.rows())
            except Exception as error:
                self._failed.append(error)


def check_finished(place: BucketPlace, num_rows: int = 10) -> None:
    found = verify(place.store)
    assert (found.problems, found.is_finished, found.is_running) == ((), True, False)
    assert status(place.store).state == "finished"
    assert [row["id"] for row in place.rows()] == list(range(num_rows))
    assert place.names("journal") == []


def test_readers_see_whole_parts_at_every_step(place, double, write_rows, make_spec):
    columns = {"id": list(range(15)), "q": [None if i == 6 else f"q{i % 9}" for i in range(15)]}
    for name, rows in (("a.parquet", slice(0, 11)), ("b.parquet", slice(11, 15))):
        part = {key: values[rows] for key, values in columns.items()}
        place.put(name, row_group_size=3, **part)
        write_rows(name, row_group_size=3, **part)
    looks, first, second = Looks(place), double(), double()

    with pytest.raises(JobInterrupted, match=rf"stopped after 7 of 15 rows, .* in {place.out};"):
        run_job(place.spec(), engine=first, should_stop=StopAfter(3))
    assert place.names("journal") == ["_jaxpaged/journal/000001/00000000"]
    assert "_SUCCESS" not in place.names()
    report = run_job(place.spec(), engine=second)

    assert len(first.finished) == 6
    assert second.begun == set(range(15)) - first.finished - {6}
    assert (report.state, report.run.attempt, report.output.rows) == ("finished", 2, 15)
    rows, looks = place.rows(), looks.take()
    assert all(seen == rows[: len(seen)] for seen in looks)
    counts = [len(seen) for seen in looks]
    assert counts == sorted(counts)
    # Whether a look comes before the first part is the reader's luck.
    assert set(counts) - {0} == {4, 8, 12, 15}
    check_finished(place, 15)
    assert run_job(place.spec()).state == "already finished"
    local = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 4})
    run_job(local, engine=double())
    found = diff(place.store, open_output(local))
    assert (found.is_same, found.same, found.jobs) == (True, 15, ())


def test_extended_and_retried_rows_take_their_places_at_once(filled, double):
    run_job(filled.spec(), engine=double())
    before = filled.rows()
    filled.put("0.parquet", id=[10, 11, 12], q=["long text", "b", "c"])
    looks, engine = Looks(filled), double()

    report = run_job(filled.spec(), engine=engine, options=RunOptions(extends=True))

    assert (report.state, engine.begun) == ("finished", {10, 11, 12})
    extended = filled.rows()
    assert extended[:10] == before
    seen = looks.take()
    assert {len(rows) for rows in seen} == {10, 13}
    assert all(rows == extended[: len(rows)] for rows in seen)

    engine, storage = double(), filled.spec().storage
    retry = {"where": "q LIKE 'long%' OR id = 1", "settings": ["sampling.max_tokens=3"]}
    with pytest.raises(JobInterrupted):
        retry_job(filled.out, **retry, storage=storage, engine=engine, should_stop=StopAfter(0))
    report = retry_job(filled.out, storage=storage, engine=engine)

    assert report is not None
    assert (report.state, engine.begun) == ("finished", {1, 10})
    retried = filled.rows()
    pairs = list(zip(extended, retried, strict=True))
    assert [old["id"] for old, new in pairs if old != new] == [1, 10]
    seen = looks.take()
    for rows in seen:
        assert all(row in pair for row, pair in zip(rows, pairs, strict=True))
    assert [rows for rows in (extended, retried) if rows not in seen] == []
    check_finished(filled, 13)


def test_an_input_object_that_changed_is_refused(filled, double):
    columns = {"id": list(range(10)), "q": [f"q{i}" for i in range(10)]}
    with pytest.raises(JobInterrupted):
        run_job(filled.spec(), engine=double(), should_stop=StopAfter(3))
    before, engine = filled.names(), double()

    filled.put("a.parquet", **columns | {"q": [f"p{i}" for i in range(10)]})
    with pytest.raises(IdentityError) as caught:
        run_job(filled.spec(), engine=engine)

    assert caught.value.exit_code == 3
    assert "input file a.parquet: content 'etag:" in str(caught.value)
    assert (filled.names(), engine.begun) == (before, set())

    # The same bytes are the same file.
    filled.put("a.parquet", **columns)
    stop = StopAfter(NEVER, lambda: filled.put("a.parquet", **columns | {"id": [0] * 10}))
    with pytest.raises(InputSchemaError, match=r"in/a.parquet: changed while the job was running"):
        run_job(filled.spec(), engine=engine, should_stop=stop)
    assert {row["id"] for row in filled.rows()} == {0, 1, 2, 3}
    filled.put("a.parquet", **columns)
    run_job(filled.spec(), engine=engine)
    check_finished(filled)


def test_what_passes_is_waited_for(filled, double):
    proxy, kinds = filled.proxy, list(PASSING.values())
    filled.put("b.parquet", id=list(range(10, 20)), q=["q"] * 10)
    for number, trick in enumerate(kinds):
        proxy.play("PUT", f"part-{number:06d}.parquet", trick, times=1)
        proxy.play("PUT", f"{(number + 1) % 5:06d}-r0.json", trick, times=1)
    # For longer than the libraries below try.
    proxy.play("PUT", "000001.json", lost_answer, times=5)
    proxy.play("PUT", "_SUCCESS", refused(503, "SlowDown"), times=1)

    report = run_job(filled.spec(), engine=double())

    assert (report.state, report.run.attempt, report.output.parts) == ("finished", 1, 5)
    tries = [str(request) for request in proxy.requests if request.method == "PUT"]
    assert sum("/part-" in request for request in tries) == 10
    assert sum("/000001.json" in request for request in tries) == 6
    check_finished(filled, 20)


def test_what_does_not_pass_ends_the_job_and_costs_nothing(filled, double):
    filled.proxy.play("PUT", "part-000001.parquet", refused(403, "AccessDenied"))
    first, second = double(), double()

    with pytest.raises(StorageError, match=rf"cannot write {filled.out}/part-000001.*the rights"):
        run_job(filled.spec(), engine=first)
    assert [row["id"] for row in filled.rows()] == [0, 1, 2, 3]
    state = status(filled.store)
    assert (state.state, state.rows_committed) == ("failed", 4)
    filled.proxy.mend()
    run_job(filled.spec(), engine=second)

    assert first.finished.isdisjoint(second.begun)
    check_finished(filled)


def test_a_killed_writer_is_waited_for_and_replaced(filled, double, tmp_path):
    kills = {
        "part-000000.parquet": Held(after="effect"),
        "000001-r0.json": Held(after="effect"),
        "report.json": Held(after="effect"),
    }
    order, watch, pid = {"command": "run", "job": filled.job()}, Watch(), 0
    with Nursery([sys.executable, str(TESTS / "killable_job.py")], tmp_path / "log") as nursery:
        for name, held in kills.items():
            filled.proxy.mend()
            filled.proxy.play("HEAD", SIGNS_OF_LIFE, aged(LEASE_SECONDS))
            filled.proxy.play("PUT", name, held)
            child = nursery.start(order)
            held.wait()
            pid = child.pid
            child.kill()
            assert child.wait() == -signal.SIGKILL
            held.let_go()
            rows = filled.rows()
            assert [row["id"] for row in rows] == list(range(len(rows)))

    filled.proxy.mend()
    engine = double()
    with pytest.raises(OutputConflictError, match=rf"attempt 3 on host .*, process {pid},"):
        run_job(filled.spec(), engine=engine)
    filled.proxy.play("HEAD", SIGNS_OF_LIFE, aged(LEASE_SECONDS))
    report = run_job(filled.spec(), engine=engine, progress=watch)

    assert (report.state, report.run.attempt, engine.begun) == ("finished", 4, set())
    adopted = [json.loads(filled.read(name))["adopted_by"] for name in filled.names("commits")]
    assert adopted == [2, None, None]
    assert [one.state for one in status(filled.store).attempts] == ["killed"] * 3 + ["finished"]
    check_finished(filled)


@pytest.mark.parametrize("after", ["no effect", "effect"])
def test_a_late_writer_takes_nothing_from_its_successor(filled, double, after):
    held = Held(after=after)
    filled.proxy.play("PUT", "part-000001.parquet", held, times=1)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(run_job, filled.spec(), engine=double())
        held.wait()
        filled.proxy.play("HEAD", SIGNS_OF_LIFE, aged(LEASE_SECONDS))
        report = run_job(filled.spec(), engine=double())
        records = {name: filled.read(name) for name in filled.names("commits")}
        held.let_go()
        with pytest.raises(OutputConflictError) as caught:
            late.result()

    assert caught.value.exit_code == 6
    assert (report.state, report.run.attempt) == ("finished", 2)
    assert {name: filled.read(name) for name in filled.names("commits")} == records
    assert verify(filled.store).problems == ()
    assert [row["id"] for row in filled.rows()] == list(range(10))


def test_a_server_without_conditions_is_told_of(filled, double):
    watch = Watch()
    filled.proxy.play("PUT", ".*", unconditional)

    with pytest.raises(JobInterrupted):
        run_job(filled.spec(), engine=double(), should_stop=StopAfter(2), progress=watch)
    run_job(filled.spec(), engine=double(), progress=watch)

    told = [note for note in watch.notes if "overwrites objects even when asked not to" in note]
    assert len(told) == 2
    check_finished(filled)


NAMES = {"key": "T_KEY", "secret": "T_SECRET", "token": "T_TOKEN"}
VALUES = {
    "T_KEY": "AKIAFORSEARCHING",
    "T_SECRET": "s3cr3t/for+search=",
    "T_TOKEN": "t0k3n/of+mine==",
}
TELLTALE = f"the server said so: {', '.join(f'{name}={value}' for name, value in VALUES.items())}"


@pytest.fixture
def storage(monkeypatch) -> dict[str, Any]:
    """The section of a job whose credentials can be searched for."""
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    return {"s3": {key: f"${{ENV:{name}}}" for key, name in NAMES.items()}}


def found_secrets(text: str) -> list[str]:
    texts = [text, urllib.parse.unquote(text)]
    return [name for name, value in VALUES.items() if any(value in one for one in texts)]


def test_credentials_are_written_nowhere(filled, storage, double, caplog, capfd):
    caplog.set_level(logging.INFO)
    section = filled.job()["storage"]["s3"] | storage["s3"]
    spec, watch = filled.spec(storage={"s3": section}, output={"prompt": True}), Watch()
    filled.proxy.play("PUT", "part-000001.parquet", refused(403, "SignatureDoesNotMatch", TELLTALE))

    with pytest.raises(StorageError) as caught:
        run_job(spec, engine=double(), progress=watch)
    filled.proxy.mend()
    report = run_job(spec, engine=double(), progress=watch)
    retried = retry_job(filled.out, where="id = 1", storage=spec.storage, engine=double())

    # They were used.
    assert VALUES["T_KEY"] in filled.proxy.requests[-1].headers["authorization"]
    assert filled.proxy.requests[-1].headers["x-amz-security-token"] == VALUES["T_TOKEN"]
    said = [str(watch.notes), str(report), str(retried), caplog.text, *capfd.readouterr()]
    said.append("".join(traceback.format_exception(caught.value)))
    for name in filled.names():
        data = filled.read(name)
        said.append(data.decode("latin-1"))
        if ".parquet" in name:
            table = pq.read_table(io.BytesIO(data))
            said.append(f"{table.to_pylist()} {table.schema.metadata}")
    assert [found_secrets(text) for text in said] == [[]] * len(said)
    assert "${ENV:T_SECRET}" in filled.read("_jaxpaged/job.json").decode()


@pytest.mark.parametrize("stage", ["in", "out"])
@pytest.mark.parametrize("trouble", ["wrong", "expired", "no bucket"])
def test_no_message_shows_credentials(filled, storage, double, stage, trouble):
    status, code, expected = {
        "wrong": (403, "InvalidAccessKeyId", "the credentials need the rights"),
        # Why a HEAD is refused nobody says.
        "expired": (400, "ExpiredToken", "the server said so|Bad Request"),
        "no bucket": (404, "NoSuchBucket", "there is no such bucket"),
    }[trouble]
    for method in ("GET", "HEAD", "PUT"):
        filled.proxy.play(method, f"{stage}(/.*)?", refused(status, code, TELLTALE))
    section = filled.job()["storage"]["s3"] | storage["s3"]

    with pytest.raises(JaxPagedError, match=expected) as caught:
        run_job(filled.spec(storage={"s3": section}), engine=double())

    assert filled.out.removesuffix("out") + stage in str(caught.value)
    assert found_secrets("".join(traceback.format_exception(caught.value))) == []


def test_a_server_that_is_not_there_is_named_and_no_credential_is(filled, storage, double):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        section = filled.job()["storage"]["s3"] | storage["s3"] | {"endpoint_url": endpoint}

        with pytest.raises(StorageError, match=endpoint) as caught:
            run_job(filled.spec(storage={"s3": section}), engine=double())

    assert found_secrets("".join(traceback.format_exception(caught.value))) == []


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output + result.stderr
    assert found_secrets(result.output + result.stderr) == []
    return result


def test_the_commands_reach_a_bucket(filled, storage, tmp_path, monkeypatch):
    # Of sizes that other tests compile, too.
    sizes = {"max_model_len": 32, "num_blocks": 16, "max_num_seqs": 2}
    content = filled.job(sampling={"max_tokens": 3}, engine=sizes)
    section = content["storage"]["s3"] = {"region": "us-east-1", **storage["s3"]}
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(content))
    run = ("run", job, "--set", f"storage.s3.endpoint_url={filled.proxy.endpoint}")
    section["endpoint_url"] = filled.proxy.endpoint
    reached = [f"--storage=s3.{key}={value}" for key, value in section.items()]

    first = invoke(*run)
    assert (first.exit_code, first.stderr.count("KV pool")) == (0, 1), first.stderr
    assert "10 of 10" in first.stdout
    assert {row["completion_tokens"] for row in filled.rows()} == {3}
    assert "already finished, nothing to do" in invoke(*run).stdout
    found = invoke("status", filled.out, *reached, "--json")
    assert json.loads(found.stdout)["state"] == "finished"
    same = invoke("diff", filled.out, filled.out, *reached, "--json")
    assert (same.exit_code, json.loads(same.stdout)["same"]) == (0, 10)
    none = invoke("retry", filled.out, "--where", "id = 10", *reached)
    assert (none.exit_code, none.stdout) == (0, "no row is chosen, nothing to do\n")
    assert invoke("verify", filled.out, *reached).exit_code == 0
    assert invoke("report", filled.out, *reached).exit_code == 0
    filled.delete("part-000001.parquet")
    wrong = invoke("verify", filled.out, *reached, "--json")
    assert wrong.exit_code == 6
    assert [problem["unit"] for problem in json.loads(wrong.stdout)["problems"]] == [1]

    monkeypatch.delenv("T_SECRET")
    for command in (run, ("status", filled.out, *reached)):
        unset = invoke(*command)
        assert unset.exit_code == 2
        assert "s3.secret: the environment variable T_SECRET is not set" in unset.stderr
