"""Metrics of running jobs, over real HTTP."""

import contextlib
import itertools
import math
import pathlib
import re
import socket
import subprocess
import sys
import typing
import urllib.error
from collections.abc import Iterator

import pytest
from failing_engine import FailingEngine
from scrape import Scrape, fetch
from stop_after import NEVER, StopAfter

from jaxpaged.errors import ConfigError
from jaxpaged.job import metrics_server
from jaxpaged.job.interrupt import JobInterrupted
from jaxpaged.job.metrics_progress import MetricsProgress
from jaxpaged.job.progress import SilentProgress
from jaxpaged.job.retry import retry_job
from jaxpaged.job.runner import run_job
from jaxpaged.request import ErrorCode

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs/live_metrics.md").read_text()
GROWING = ("counter", "histogram")


class Watched:
    """A progress whose metrics are served, and everything they ever said."""

    def __init__(self, progress: MetricsProgress, url: str) -> None:
        self.progress = progress
        self.url = url
        self.scrapes: list[Scrape] = []

    def look(self) -> Scrape:
        """Fetches the metrics of this moment."""
        self.scrapes.append(fetch(self.url))
        return self.scrapes[-1]

    def stop_after(self, num_steps: float = NEVER) -> StopAfter:
        """Has a job looked at before each of its steps."""
        return StopAfter(num_steps, self.look)


@contextlib.contextmanager
def serving() -> Iterator[Watched]:
    progress = MetricsProgress(SilentProgress())
    with metrics_server.serve(progress, host="127.0.0.1", port=0) as url:
        yield Watched(progress, url)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with serving() as watched:
        yield watched


def check_growth(scrapes: list[Scrape]) -> None:
    """What is a counter never falls, and what was there once stays."""
    for before, after in itertools.pairwise(scrapes):
        for name, family in before.families.items():
            if family.type not in GROWING or not name.startswith("jaxpaged_"):
                continue
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert after.values[key] >= sample.value, key


def test_a_job_can_be_watched_from_its_first_step_to_its_last(
    watched, write_rows, make_spec, engine
) -> None:
    write_rows(q=["a", None, "bb", "cccc", "x" * 60, "d", "e", "f"])
    spec = make_spec(
        input={"prompt_column": "q"}, sampling={"max_tokens": 4}, engine={"max_num_seqs": 2}
    )
    double = engine(max_num_seqs=2, max_model_len=50)

    report = run_job(
        spec, engine=double, progress=watched.progress, should_stop=watched.stop_after()
    )
    last = watched.look()

    assert last.value("jaxpaged_job_rows") == last.value("jaxpaged_job_rows_done") == 8
    by_reason = {key: count for key, count in report.output.finish_reasons.items() if count}
    assert last.by("jaxpaged_rows_total", "finish_reason") == by_reason
    assert by_reason == {"stop": 5, "length": 1, "error": 2}
    codes = {"null_prompt": 1.0, "prompt_too_long": 1.0, "": 6.0}
    assert last.by("jaxpaged_rows_total", "error_code") == codes
    assert codes.items() >= {error.code: error.count for error in report.errors}.items()
    assert last.value("jaxpaged_sampled_tokens_total") == report.run.engine["sampled_tokens"]
    done = [scrape.value("jaxpaged_job_rows_done") for scrape in watched.scrapes]
    assert done[0] == 0
    assert len(set(done)) > 3
    first = watched.scrapes[1]
    assert first.value("jaxpaged_sequences", state="running") == 2
    assert first.value("jaxpaged_sequences", state="waiting") > 0
    check_growth(watched.scrapes)


def test_what_is_not_known_yet_is_not_there_and_counters_begin_at_zero(watched) -> None:
    assert watched.look().names() == {"jaxpaged_build_info"}
    watched.progress.begin(total=10, done=3, journaled=2)
    begun = watched.look()

    assert begun.value("jaxpaged_job_rows") == 10
    assert begun.value("jaxpaged_job_rows_done") == 3
    codes = [
        dict(labels)["error_code"]
        for _, labels in begun.values
        if ("finish_reason") in dict(labels)
    ]
    assert sorted(codes) == sorted(["", "", "", *typing.get_args(ErrorCode)])
    assert begun.by("jaxpaged_rows_total", "finish_reason") == {}
    assert begun.value("jaxpaged_resumed_rows_total") == 0
    assert "jaxpaged_pool_blocks" not in begun.names()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_real_engine_s_metrics_are_its_report_s(
    watched, write_rows, make_spec, preemption
) -> None:
    write_rows(q=["the same beginning of " + "x" * (i % 5) for i in range(24)])
    spec = make_spec(
        input={"prompt_column": "q"},
        sampling={"max_tokens": 24, "ignore_eos": True},
        engine={
            "max_num_seqs": 8,
            "block_size": 4,
            "num_blocks": 40,
            "max_model_len": 64,
            "preemption": preemption,
            "swap_space": 0.1,
        },
    )

    report = run_job(spec, progress=watched.progress, should_stop=watched.stop_after())
    last, facts = watched.look(), report.run.engine

    assert last.by("jaxpaged_computed_tokens_total", "phase") == {
        "prefill": facts["prefill_tokens"],
        "decode": facts["decode_tokens"],
    }
    assert last.value("jaxpaged_sampled_tokens_total") == 24 * 24
    assert last.value("jaxpaged_padding_tokens_total") == facts["padding_tokens"]
    preemptions = {"recompute": facts["recomputes"], "swap": facts["swaps"]}
    assert preemptions[preemption] > 0
    assert last.by("jaxpaged_preemptions_total", "kind") == {
        kind: count for kind, count in preemptions.items() if count
    }
    queried = last.value("jaxpaged_prefix_cache_queried_tokens_total")
    assert queried == facts["prompt_tokens"] == report.output.prompt_tokens
    hits = last.value("jaxpaged_prefix_cache_hit_tokens_total")
    assert 0 < hits == report.output.cached_tokens
    steps = 0.0
    for phase in ("prefill", "decode"):
        count = last.value("jaxpaged_step_duration_seconds_count", phase=phase)
        assert count == sum(facts[f"{phase}_times"]["counts"]) > 0
        seconds = last.value("jaxpaged_step_duration_seconds_sum", phase=phase)
        assert seconds == facts[f"{phase}_seconds"] > 0
        steps += count
    assert steps == facts["steps"]
    assert last.value("jaxpaged_compile_seconds_total") == facts["compile_seconds"]
    assert last.value("jaxpaged_executables") == facts["executables"] > 0
    assert last.value("jaxpaged_pool_blocks") == 40
    assert last.value("jaxpaged_pool_used_blocks") == 0
    assert last.by("jaxpaged_sequences", "state") == {}
    seen = watched.scrapes[1:-1]
    assert max(scrape.value("jaxpaged_pool_used_blocks") for scrape in seen) > 30
    swapped = [scrape.value("jaxpaged_sequences", state="swapped") for scrape in seen]
    assert (max(swapped) > 0) == (preemption == "swap")
    check_growth(watched.scrapes)
    named = {
        dict(labels)["implementation"]
        for name, labels in last.values
        if name == "jaxpaged_engine_info"
    }
    assert named == {facts["implementation"]}


def test_names_types_and_buckets_are_as_prometheus_wants_them(
    watched, write_rows, make_spec, engine
) -> None:
    write_rows(q=["a"])
    run_job(make_spec(input={"prompt_column": "q"}), engine=engine(), progress=watched.progress)
    scrape = watched.look()

    for name, family in scrape.families.items():
        assert re.fullmatch(r"(jaxpaged|process|python)_[a-z_]+", name)
        assert family.documentation
        # The parser takes the ending off.
        is_total = all(sample.name == f"{name}_total" for sample in family.samples)
        assert is_total == (family.type == "counter"), name
    buckets = [
        (float(dict(labels)["le"]), value)
        for (name, labels), value in scrape.values.items()
        if name == "jaxpaged_step_duration_seconds_bucket" and ("phase", "decode") in labels
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1][0] == math.inf
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} <= (
        scrape.names("process_")
    )
    assert {"python_info", "python_gc_collections_total"} <= scrape.names("python_")


def test_every_metric_is_documented(watched, write_rows, make_spec, engine) -> None:
    write_rows(q=["a"])
    run_job(make_spec(input={"prompt_column": "q"}), engine=engine(), progress=watched.progress)
    families = watched.look().families

    names = {
        f"{name}_total" if family.type == "counter" else name
        for name, family in families.items()
        if name.startswith("jaxpaged_")
    }
    assert set(re.findall(r"`(jaxpaged_\w+)`", DOCUMENT)) == names


def test_resumed_rows_are_told_apart(watched, write_rows, make_spec, engine) -> None:
    write_rows(q=[str(i) for i in range(10)])
    spec = make_spec(
        input={"prompt_column": "q"}, output={"rows_per_part": 4}, engine={"max_num_seqs": 2}
    )
    with pytest.raises(JobInterrupted):
        run_job(spec, engine=engine(max_num_seqs=2), should_stop=StopAfter(3))

    run_job(spec, engine=engine(), progress=watched.progress, should_stop=watched.stop_after())
    last = watched.look()

    # Four rows are in the first part, two in the journal.
    assert last.value("jaxpaged_job_rows_done") == last.value("jaxpaged_job_rows") == 10
    assert last.by("jaxpaged_rows_total", "finish_reason") == {"stop": 6}
    assert last.value("jaxpaged_resumed_rows_total") == 2
    check_growth(watched.scrapes)


def test_a_retry_counts_the_rows_it_redoes(watched, write_rows, make_spec, engine, out) -> None:
    write_rows(q=["a", "bbbbbb", "c", "dddddd"])
    spec = make_spec(input={"prompt_column": "q"}, sampling={"max_tokens": 4})
    run_job(spec, engine=engine())

    retry_job(
        str(out),
        where="finish_reason = 'length'",
        settings=["sampling.max_tokens=20"],
        engine=engine(),
        progress=watched.progress,
    )

    scrape = watched.look()
    assert scrape.value("jaxpaged_job_rows") == 2
    assert scrape.by("jaxpaged_rows_total", "finish_reason") == {"stop": 2}


def test_runs_of_one_process_have_metrics_and_ports_of_their_own(
    tmp_path, write_rows, make_spec, engine
) -> None:
    write_rows(q=["a", "b", "c"])
    with serving() as first, serving() as second:
        for count, watched in enumerate((first, second), start=1):
            spec = make_spec(
                input={"prompt_column": "q"}, output={"path": str(tmp_path / f"out{count}")}
            )
            run_job(spec, engine=engine(), progress=watched.progress)
            watched.progress.begin(total=count, done=0, journaled=0)
        assert first.url != second.url
        assert first.look().value("jaxpaged_job_rows") == 1
        assert second.look().value("jaxpaged_job_rows") == 2


def test_the_endpoint_goes_away_with_its_run_even_if_that_breaks(
    write_rows, make_spec, tokenizer
) -> None:
    write_rows(q=["a", "b"])
    spec = make_spec(input={"prompt_column": "q"})
    with pytest.raises(RuntimeError, match="the device is gone"), serving() as watched:
        run_job(spec, engine=FailingEngine(tokenizer, fails_at=1), progress=watched.progress)

    with pytest.raises(urllib.error.URLError, match="refused"):
        watched.look()


def test_a_place_where_nothing_can_listen_is_named() -> None:
    progress = MetricsProgress(SilentProgress())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"--metrics-port {port}: .*Address already in use"),
            metrics_server.serve(progress, host="127.0.0.1", port=port),
        ):
            pass
    for host in ("203.0.113.7", "no host", f"{'a' * 70}.example"):
        with (
            pytest.raises(ConfigError, match=rf"--metrics-host {host} .*cannot listen"),
            metrics_server.serve(progress, host=host, port=0),
        ):
            pass


def test_the_address_of_a_newer_protocol_is_written_as_urls_have_it() -> None:
    assert metrics_server.address("::1", 9400) == "http://[::1]:9400/metrics"
    assert metrics_server.address("127.0.0.1", 9400) == "http://127.0.0.1:9400/metrics"


def test_a_newer_protocol_is_served_or_refused_in_words_where_a_machine_lacks_it() -> None:
    progress = MetricsProgress(SilentProgress())
    if has_ipv6():
        with metrics_server.serve(progress, host="::1", port=0) as url:
            assert url.startswith("http://[::1]:")
            assert fetch(url).names() == {"jaxpaged_build_info"}
        return
    with (
        pytest.raises(ConfigError, match=r"--metrics-host ::1 .*cannot listen"),
        metrics_server.serve(progress, host="::1", port=0),
    ):
        pass


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_without_its_package_the_option_says_what_to_install() -> None:
    script = (
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "from jaxpaged.cli import main\n"
        "main(['run', 'job.yaml', '--metrics-port', '0'])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert result.returncode == 2
    assert "pip install 'jaxpaged[metrics]'" in result.stderr
    assert "Traceback" not in result.stderr
