"""Runs beside each other, by the reports they left."""

import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import rich.console
from tiny import write_tiny_llama

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.look import compare_table
from jaxpaged.job.look.compare import Comparison, compare
from jaxpaged.job.planned_job import RunOptions
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.storage.local_store import LocalStore


def beside(a: pathlib.Path, b: pathlib.Path) -> Comparison:
    return compare(*(LocalStore(out, private="_jaxpaged") for out in (a, b)))


def shown(found: Comparison) -> str:
    text = io.StringIO()
    compare_table.show(found, rich.console.Console(file=text, width=300))
    return text.getvalue()


def line(text: str, name: str) -> list[str]:
    """The cells of a table's row."""
    (found,) = (row for row in text.splitlines() if row.strip().split("  ")[0] == name)
    return [cell.strip() for cell in found.split("  ") if cell.strip()]


def report(out: pathlib.Path) -> pathlib.Path:
    return out / "_jaxpaged" / "report.json"


def change(out: pathlib.Path, *path: str, **values: object) -> None:
    """Changes a group of keys in the report."""
    known = json.loads(report(out).read_text())
    group: dict[str, Any] = known
    for key in path:
        group = group[key]
    group |= values
    report(out).write_text(json.dumps(known))


def figures(found: Comparison) -> dict[str, tuple[object, object]]:
    return {figure.name: (figure.a, figure.b) for figure in found.figures}


def settings(found: Comparison) -> dict[tuple[str, str], tuple[object, object]]:
    return {(one.subject, one.name): (one.a, one.b) for one in found.settings}


@pytest.fixture
def run(make_spec, engine, tmp_path, write_rows) -> Callable[..., pathlib.Path]:
    """Runs a job with scores over ten rows, one without a prompt; says where its output is."""
    rows = [f"q{i}" for i in range(9)]
    write_rows(q=[*rows, None], answer=[*rows, "x"], kind=["even", "odd"] * 5)

    def run_into(name: str, answer: Callable[[str], str] = str, **sections: object) -> pathlib.Path:
        own = {"path": str(tmp_path / name), "rows_per_part": 4}
        scoring = {"reference": "answer", "metrics": ["contains"], "by": "kind"}
        sections = {"input": {"prompt_column": "q"}, "output": own, "eval": scoring} | sections
        run_job(make_spec(**sections), engine=engine(answer=answer))
        return tmp_path / name

    return run_into


def test_a_run_beside_itself_differs_in_nothing(run):
    one = run("one")

    found = beside(one, one)

    assert (found.settings, found.input, found.notes) == ((), (), ())
    assert all(figure.change == 0 and figure.ratio == 1 for figure in found.figures)
    assert figures(found)["rows"] == (10, 10)
    assert figures(found)["error_code null_prompt"] == (1, 1)
    assert [(score.group, score.change) for score in found.scores] == [
        (None, 0.0),
        ("even", 0.0),
        ("odd", 0.0),
    ]
    assert line(shown(found), "rows") == ["rows", "10", "10", "same"]


def test_keys_rows_and_scores_of_two_runs_are_told(run):
    one = run("one")
    two = run(
        "two",
        lambda text: text if text < "q4" else "no idea",
        sampling={"max_tokens": 7},
        engine={"max_num_seqs": 3},
    )

    found = beside(one, two)

    assert settings(found) == {
        ("job", "engine.max_num_seqs"): (64, 3),
        ("job", "sampling.max_tokens"): (None, 7),
    }
    assert figures(found)["completion tokens"] == (18, 8 + 5 * 7)
    overall, even, odd = found.scores
    assert (overall.a.correct, overall.b.correct, overall.b.scored) == (9, 4, 10)
    assert overall.change == pytest.approx(-0.5)
    assert [(score.group, round(score.change, 3)) for score in (even, odd)] == [
        ("even", -0.6),
        ("odd", -0.4),
    ]
    text = shown(found)
    assert line(text, "sampling.max_tokens") == ["sampling.max_tokens", "none", "7"]
    assert line(text, "completion tokens")[1:] == ["18", "43", "+25 (+138.9%)"]
    assert line(text, "contains")[1:] == ["90.0% (9 of 10)", "40.0% (4 of 10)", "-50.0 points"]
    assert "\n   even " in text


def test_shares_and_rates_are_made_of_the_engine_s_counters(run):
    one, two = run("one"), run("two")
    counters = {
        "prefill_tokens": 60,
        "prefill_seconds": 2.0,
        "decode_tokens": 20,
        "decode_seconds": 0.5,
        "padding_tokens": 20,
        "prompt_tokens": 50,
        "cached_tokens": 10,
        "live_slot_steps": 90,
        "reserved_slot_steps": 100,
        "recomputes": 3,
        "compile_seconds": 4.0,
    }
    change(one, "run", "engine", **counters, swaps=None, device="cpu", implementation="xla")
    more = {"prefill_seconds": 1.0, "live_slot_steps": 150, "recomputes": 0, "swaps": 1}
    change(two, "run", "engine", **counters | more, device="H100", implementation="triton")
    change(two, "versions", jax="9.9")

    found = beside(one, two)

    known = figures(found)
    assert known["prefill tokens per second"] == (30.0, 60.0)
    assert known["decode tokens per second"] == (40.0, 40.0)
    assert known["padding"] == (0.2, 0.2)
    assert known["prefix hits"] == (0.2, 0.2)
    assert known["KV waste"] == (pytest.approx(0.1), pytest.approx(-0.5))
    assert known["preemptions by recompute"] == (3, 0)
    assert known["preemptions by swap"] == (None, 1)
    assert known["time to compile"] == (4.0, 4.0)
    assert settings(found)["engine", "device"] == ("cpu", "H100")
    assert settings(found)["engine", "implementation"] == ("xla", "triton")
    assert settings(found)["version", "jax"][1] == "9.9"
    text = shown(found)
    assert line(text, "prefill tokens per second")[1:] == ["30.0", "60.0", "+30.0 (+100.0%)"]
    assert line(text, "preemptions by swap")[1:] == ["-", "1"]
    assert line(text, "KV waste")[1:] == ["10.0%", "-50.0%", "-60.0 points"]
    assert "note: KV waste below 0: sequences share blocks" in text


def test_an_unfinished_run_says_what_its_figures_are_of(run, make_spec, engine, out):
    one = run("one")
    spec = make_spec(input={"prompt_column": "q"}, output={"rows_per_part": 4})
    first_part = (out / "part-000000.parquet").exists
    slow = engine(answer=str, num_steps=lambda request: 1 + request.request_id)
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=slow, should_stop=first_part)

    found = beside(one, out)

    assert (found.state_a, found.state_b) == ("finished", "stopped")
    rows = figures(found)["rows"][1]
    assert 0 < rows < 10
    assert f"b is not finished: {rows} of 10 rows" in found.notes
    assert [(score.b, score.change) for score in found.scores] == [(None, None)] * 3

    run_job(spec, engine=engine(answer=str))
    (note,) = beside(one, out).notes
    assert "b: times, speeds and memory are of its last run, which completed" in note


def test_a_later_run_without_a_report_is_told_of(run):
    one = run("one")
    begun = one / "_jaxpaged/attempts/000002.json"
    begun.write_text((one / "_jaxpaged/attempts/000001.json").read_text())

    (note, _) = beside(one, one).notes

    assert note.startswith("a: attempt 2 began after the one of this report (1)")


def test_a_retry_is_told_of(run, engine):
    one, two = run("one"), run("two")
    retry_job(str(two), where="q = 'q1'", settings=("sampling.max_tokens=1",), engine=engine())

    found = beside(one, two)

    asked = "retry where q = 'q1', sampling.max_tokens=1"
    assert settings(found)["revision", "1"] == (None, asked)
    assert settings(found)["job", "sampling.max_tokens"] == (None, 1)
    assert found.notes[-1].endswith("of its last run, which completed 1 of 10 rows")


def test_another_model_and_other_input_behind_the_same_names_are_told_of(run, write_rows, tmp_path):
    model = str(write_tiny_llama(tmp_path / "model"))
    one = run("one", model=model)
    (tmp_path / "model").rename(tmp_path / "old")
    write_tiny_llama(tmp_path / "model", max_position_embeddings=512)
    write_rows(q=["other"] * 10, answer=["x"] * 10, kind=["odd"] * 10)

    found = beside(one, run("two", model=model))

    assert {subject for subject, _ in settings(found)} == {"model"}
    assert found.input == ("input file rows.parquet: other bytes",)
    assert "input file rows.parquet: other bytes" in shown(found)


def test_a_report_of_another_version_is_read_as_far_as_it_goes(run):
    one, two = run("one"), run("two")
    older = json.loads(report(two).read_text())
    older["report_version"] = 1
    del older["output"]["cached_tokens"], older["versions"], older["run"]["engine"]
    older["output"]["finish_reasons"] |= {"paused": 2, "stop": "many"}
    older["errors"] = [{"code": "cosmic_ray", "count": 5}, {"code": "bad_type"}, 7]
    older["scores"] = [{"metric": "rouge", "overall": {"correct": 1, "scored": 2}, "by": 5}]
    older["output"]["rows"] = True
    older["timeline"] = [{"anything": 1}]
    report(two).write_text(json.dumps(older))

    found = beside(one, two)

    known = figures(found)
    assert known["rows"] == (10, None)
    assert known["finish_reason paused"] == (None, 2)
    assert known["error_code cosmic_ray"] == (None, 5)
    assert known["steps"][1] is None
    assert [(score.metric, score.group, score.b) for score in found.scores][:1] == [
        ("contains", None, None)
    ]
    assert found.scores[-1].metric == "rouge"
    assert found.scores[-1].b.mean == 0.5
    assert not {subject for subject, _ in settings(found)} & {"version", "engine"}
    json.dumps(found.to_json(), allow_nan=False)
    assert "rouge" in shown(found)


def test_numbers_that_json_does_not_have_are_none(run):
    one = run("one")
    text = report(one).read_text().replace('"load_seconds"', '"x": NaN, "load_seconds"')
    report(one).write_text(text.replace('"report_version": 3', f'"report_version": {10**400}'))
    change(one, "run", seconds=10**400, load_seconds=float("inf"))

    found = beside(one, one)

    assert "time" not in figures(found)
    assert "time to load" not in figures(found)


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{", '{"output": {}}', "[" * 100_000, '"report"', "\xff"]
)
def test_what_is_no_report_is_refused(run, content):
    one, two = run("one"), run("two")
    report(two).write_bytes(content.encode("latin-1"))

    with pytest.raises(OutputConflictError, match=r"two/_jaxpaged/report\.json is no report of"):
        beside(one, two)


def test_a_job_without_a_report_is_told_from_a_folder_without_a_job(run, tmp_path):
    one, two = run("one"), run("two")
    report(two).unlink()
    with pytest.raises(OutputConflictError, match=r"two/_jaxpaged/report\.json is missing"):
        beside(one, two)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputConflictError, match="empty holds no output of jaxpaged's"):
        beside(one, tmp_path / "empty")


def test_a_lost_report_is_written_anew_as_the_message_says(run, make_spec, engine, tmp_path):
    one = run("one")
    before = json.loads(report(one).read_text())
    report(one).unlink()
    with pytest.raises(OutputConflictError, match="`jaxpaged run JOB --repair` writes it anew"):
        beside(one, one)

    spec = make_spec(
        input={"prompt_column": "q"},
        output={"path": str(one), "rows_per_part": 4},
        eval={"reference": "answer", "metrics": ["contains"], "by": "kind"},
    )
    run_job(spec, engine=engine(), options=RunOptions(repairs=True))

    after = json.loads(report(one).read_text())
    assert (after["output"], after["scores"]) == (before["output"], before["scores"])
    assert figures(beside(one, one))["rows"] == (10, 10)


def test_of_many_groups_those_that_changed_most_are_shown(run):
    one, two = run("one"), run("two")
    groups = {f"g{i:02}": {"correct": 50, "scored": 100} for i in range(30)}
    for out, correct in ((one, 50), (two, 99)):
        scores = json.loads(report(out).read_text())["scores"]
        scores[0]["by"] = groups | {"g29": {"correct": correct, "scored": 100}}
        change(out, scores=scores)

    text = shown(beside(one, two))

    assert line(text, "g29")[-1] == "+49.0 points"
    assert line(text, "g00")[-1] == "same"
    assert "g25" not in text
    assert "... 10 more, changed less, in the JSON" in text


def test_text_of_a_report_cannot_write_to_the_terminal(run):
    one = run("one")
    two = run("two")
    change(two, state="fin\x1b[2Jished", errors=[{"code": "\x07[red]bell", "count": 1}])
    change(two, "job", model="[bold]m\x1b]0;title\x07")

    text = shown(beside(one, two))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]m" in text
    assert "[red]bell" in text
