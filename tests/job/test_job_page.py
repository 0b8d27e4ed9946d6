"""The report's page: of runs of all kinds, and with the worst texts that rows can hold."""

import dataclasses
import html.parser
import json
import pathlib
import subprocess
import sys

import pyarrow as pa
import pytest

from jaxpaged.errors import ConfigError, TooManyRowErrors
from jaxpaged.job import report as reports
from jaxpaged.job.feeder import Sample
from jaxpaged.job.html import job_page
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.report import IdentityFacts, JobReport, OutputFacts, RunFacts
from jaxpaged.job.runner import run_job
from jaxpaged.job.slow_rows import SlowRow
from jaxpaged.job.tally import ErrorCount, MetricScore, RowError, ScoreCount
from jaxpaged.job.timeline import Timeline

HOSTILE = "<script src=x onerror='alert(1)'>\"</pre></svg>\x00\x1b[31m\u202e" + "w" * 5000

_NAMED = ("device", "dtype", "weight_dtype", "kv_dtype", "implementation", "implementation_reason")
_WORKED = {
    "is_deterministic": True,
    "num_blocks": 100,
    "block_size": 16,
    "max_model_len": 100,
    "max_num_seqs": 40,
    "token_budget": 64,
    "steps": 50,
    "prefill_tokens": 2000,
    "decode_tokens": 500,
    "sampled_tokens": 600,
    "padding_tokens": 100,
    "prefill_seconds": 30.0,
    "decode_seconds": 10.0,
    "host_seconds": 2.0,
    "compile_seconds": 5.0,
    "executables": 3,
    "starved_steps": 1,
    "recomputes": 3,
    "swaps": 4,
    "evictions": 1,
    "copied_blocks": 2,
    "peak_used_blocks": 50,
    "live_slot_steps": 900,
    "reserved_slot_steps": 1000,
}


class Elements(html.parser.HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.text += " "
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def read(out: pathlib.Path) -> str:
    return (out / "_jaxpaged" / "report.html").read_text()


def a_report(word: str) -> JobReport:
    """A report of a run on an engine that tells all, in which every text is this word."""
    size = range(1, 51)
    return JobReport(
        state="failed",
        input_rows=100,
        output=OutputFacts(
            path=f"/{word}",
            parts=1,
            rows=60,
            finish_reasons={"stop": 50, "length": 5, "error": 4, "skipped": 1, word: 0},
            prompt_tokens=3000,
            completion_tokens=600,
            cached_tokens=100,
            partial_characters=0,
            prompt_lengths={10: 30, 52: 29, 4096: 1},
            completion_lengths={3: 55},
        ),
        errors=(
            ErrorCount(
                code=word,
                count=4,
                examples=(RowError(file=word, row_group=0, index=3, message=word),),
            ),
        ),
        scores=(
            MetricScore(
                metric=word,
                overall=ScoreCount(correct=3, scored=8),
                by={word: ScoreCount(correct=0, scored=0), "x": ScoreCount(correct=1, scored=2)},
            ),
        ),
        run=RunFacts(
            attempt=1,
            rows=60,
            load_seconds=1.0,
            seconds=50.0,
            pool=word,
            peak_memory_bytes=2**30,
            engine={
                **_WORKED,
                **dict.fromkeys(_NAMED, word),
            },
            slow_rows=(
                SlowRow(
                    file=word,
                    row_group=0,
                    index=1,
                    seconds=2.5,
                    prompt_tokens=10,
                    completion_tokens=20,
                ),
            ),
            timeline=Timeline(
                seconds=tuple(float(second) for second in size),
                steps=(1,) * 50,
                computed_tokens=(60,) * 50,
                sampled_tokens=(12,) * 50,
                padding_tokens=(2,) * 50,
                used_blocks=tuple(float(second) for second in size),
                live_tokens=tuple(14.0 * second for second in size),
                running=tuple(second / 2 for second in size),
                waiting=(7.0,) * 50,
            ),
        ),
        warnings=(word,),
        job={"model": word, "input": {word: [word], "none": None}, word: {}},
        versions={word: word},
        notes=(word,),
        message=word,
        identity=IdentityFacts(
            fingerprint=word,
            created=word,
            revisions=1,
            model={word: word},
            input_files=1,
            input_bytes=5000,
        ),
        written=word,
        samples=(Sample(row=word, preview=word, completion=word),),
    )


def test_no_element_comes_from_the_texts_of_a_job():
    plain = Elements(job_page.render(a_report("word")))
    hostile = Elements(job_page.render(a_report(HOSTILE)))

    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert not {"script", "img", "link"} & set(plain.tags)
    assert plain.tags.count("svg") == 7
    assert not {"\x00", "\x1b", "\u202e"} & set(hostile.text)
    assert "<script src=x onerror='alert(1)'>" in hostile.text


def test_everything_that_is_known_is_on_the_page():
    shown = " ".join(Elements(job_page.render(a_report("word"))).text.split())

    for expected in (
        "The run ended early: word",
        "stop: an end token or a stop string 83.3% 50",
        "error 6.7% 4",
        "word, row group 0, row 3: word",
        "all rows 37.5% 3 8",
        "word not scored 0 0",
        "Half have up to 10 tokens, 90 % up to 52, the longest about 4,096.",
        "Reserving max_model_len (100 tokens) for each running sequence would have taken 1.43k",
        "3.5 times as much. For 44% of the time that is more than the whole pool.",
        "such a reservation does not fit",
        "KV waste 10.0% of the slots of blocks in use held no token",
        "peak of the process 1.0 GiB",
        "host 5.0% of the steps' time",
        "compiled 3 programs in 5.0 s",
        "preemptions 3 by recompute, 4 by swap",
        "padding 100 token positions, 3.8% of what was computed",
        "A step has at most 40 sequences and 64 tokens.",
        "word, row group 0, row 1 2.50 10 20",
        "attention word (word)",
        'input.word ["word"]',
        "input files 1, 4.9 KiB",
    ):
        assert expected in shown


def test_equal_reports_give_equal_pages():
    assert job_page.render(a_report("word")) == job_page.render(a_report("word"))


def test_a_report_as_it_is_read_again_gives_the_same_page_but_for_the_samples():
    known = dataclasses.replace(a_report("word"), samples=())
    again = reports.from_json(json.loads(json.dumps(known.to_json())))
    assert again is not None
    assert job_page.render(again) == job_page.render(known)


def test_a_report_of_an_earlier_version_has_a_page_too():
    values = a_report("word").to_json() | {"report_version": 2}
    for name in ("notes", "message", "identity", "written"):
        del values[name]
    for name in ("slow_rows", "timeline", "peak_memory_bytes"):
        del values["run"][name]
    for name in ("prompt_lengths", "completion_lengths"):
        del values["output"][name]

    old = reports.from_json(values)

    assert old is not None
    assert "svg" not in Elements(job_page.render(old)).tags


def test_a_run_writes_its_page_beside_the_report(write_rows, make_spec, engine, out):
    write_rows(q=[f"question {number} <b>" for number in range(40)], id=list(range(40)))

    found = run_job(make_spec(input={"prompt_column": "q"}), engine=engine(pause=0.05))

    shown = Elements(read(out))
    assert found.has_page
    assert "[question 0 <b>]" in shown.text
    assert "b" not in shown.tags
    assert "used by neither prompts, parameters nor scores: id" in shown.text
    assert "Tokens per second" in shown.text
    assert len(found.run.timeline) >= 3
    assert {row.index for row in found.run.slow_rows} > set(range(32, 40))
    stored = json.loads((out / "_jaxpaged" / "report.json").read_text())
    assert "question" not in json.dumps({**stored, "job": None})
    assert sum(stored["output"]["prompt_lengths"].values()) == 40
    assert sum(stored["output"]["completion_lengths"].values()) == 40
    assert sum(stored["run"]["timeline"]["sampled_tokens"]) == 40


def test_samples_can_be_left_out(write_rows, make_spec, engine, out):
    write_rows(q=["topsecret"])
    spec = make_spec(input={"prompt_column": "q"}, output={"report_samples": False})

    found = run_job(spec, engine=engine())

    assert found.samples
    assert "topsecret" not in read(out)
    assert "finished" in read(out)


def test_an_input_without_rows(write_rows, make_spec, engine, out):
    write_rows(q=pa.array([], pa.string()))
    run_job(make_spec(input={"prompt": "{{ q }}"}), engine=engine())
    assert "the input has no rows" in Elements(read(out)).text


def test_all_rows_failed(write_rows, make_spec, engine, out):
    write_rows(q=[None, None])
    run_job(make_spec(input={"prompt": "{{ q }}"}), engine=engine())
    shown = " ".join(Elements(read(out)).text.split())
    assert "error 100.0% 2" in shown
    assert "null_prompt 2" in shown
    assert "100% of the rows failed" in shown


def test_runs_that_ended_before_their_first_step_or_behind_it(write_rows, make_spec, engine, out):
    write_rows(q=["a", "b", None])
    spec = make_spec(input={"prompt": "{{ q }}"})
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(), should_stop=lambda: True)
    assert "stopped after 1 of 3 rows" in Elements(read(out)).text

    with pytest.raises(TooManyRowErrors):
        run_job(spec.model_copy(update={"max_errors": 0}), engine=engine())
    assert "1 row errors, more than max_errors allows (0)" in Elements(read(out)).text

    def fail(text: str) -> str:
        raise RuntimeError("the <device> is gone")

    other = out.parent / "other"
    with pytest.raises(RuntimeError):
        run_job(
            make_spec(input={"prompt": "{{ q }}"}, output={"path": str(other)}),
            engine=engine(answer=fail),
        )
    assert "The run ended early: the <device> is gone" in Elements(read(other)).text


class Notes:
    """A progress display that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, *, total: int, done: int, journaled: int) -> None:
        pass

    def update(self, snapshot: object) -> None:
        pass

    def end(self) -> None:
        pass


def test_without_matplotlib_a_run_says_once_what_is_missing(
    write_rows, make_spec, engine, out, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_rows(q=["a"])
    told = Notes()

    found = run_job(make_spec(input={"prompt_column": "q"}), engine=engine(), progress=told)

    assert (found.state, found.has_page) == ("finished", False)
    assert (out / "_SUCCESS").exists()
    assert not (out / "_jaxpaged" / "report.html").exists()
    [note] = [note for note in told.notes if "report.html" in note]
    assert "pip install 'jaxpaged[report]'" in note
    with pytest.raises(ConfigError, match="pip install"):
        job_page.render(found)


def test_a_run_imports_matplotlib_for_charts_alone():
    code = """
import sys
from jaxpaged.job import run, runner, rebuilt_report
from jaxpaged.job.html import job_page
assert not {"matplotlib", "jax"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
