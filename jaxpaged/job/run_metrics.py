"""The metrics of one run, as Prometheus collects them.

Names follow its conventions: a prefix, base units, `_total` for what only grows. Every label has a
closed list of values, and each of them is there from the beginning. Reads counters that the run
goes on changing; the run itself spends no time on it.
"""

import platform
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxpaged._version import VERSION
from jaxpaged.histogram import Histogram
from jaxpaged.job import outcomes, versions
from jaxpaged.job.completion_engine import LiveStats
from jaxpaged.job.metrics_progress import Begun, MetricsProgress
from jaxpaged.job.outcomes import Outcome
from jaxpaged.job.progress import Snapshot

_PREFIX = "jaxpaged_"

_Number = int | float


class RunMetrics(Collector):
    """Collects the metrics of a run.

    Args:
        progress: Knows how far the run is.
    """

    def __init__(self, progress: MetricsProgress) -> None:
        self._progress = progress
        self._versions = {
            "version": VERSION,
            "python": platform.python_version(),
            "jax": versions.version_of("jax") or "",
            "jaxlib": versions.version_of("jaxlib") or "",
        }

    def collect(self) -> Iterable[Metric]:
        """The metrics right now: more of them once the job's rows are known, all with an engine."""
        yield _info("build", "Versions of jaxpaged and of what runs it.", self._versions)
        begun, latest = self._progress.begun, self._progress.latest
        if begun is not None:
            yield from _job(begun, latest)
        if latest is not None and latest.engine is not None:
            yield from _engine(latest.engine)


def _job(begun: Begun, latest: Snapshot | None) -> Iterable[Metric]:
    yield _gauge("job_rows", "Rows of the job; of a retry, those it redoes.", begun.total)
    yield _gauge(
        "job_rows_done",
        "Rows of the job that have a result, those of earlier runs included.",
        latest.rows if latest else begun.done,
    )
    counts = latest.outcomes if latest and latest.outcomes else outcomes.zeros()
    yield _rows(counts)
    yield _counter(
        "resumed_rows",
        "Rows of jaxpaged_rows_total whose result an earlier run left in the journal.",
        latest.resumed - begun.done if latest else 0,
    )


def _rows(counts: Mapping[Outcome, int]) -> Metric:
    family = CounterMetricFamily(
        f"{_PREFIX}rows",
        "Rows that got their result in this run, by how they ended.",
        labels=["finish_reason", "error_code"],
    )
    for (finish_reason, error_code), count in counts.items():
        family.add_metric([finish_reason, error_code or ""], count)
    return family


def _engine(stats: LiveStats) -> Iterable[Metric]:
    yield _info(
        "engine",
        "What computes: the device, dtypes of weights and KV pool, who computes attention.",
        {
            "device": stats.device,
            "dtype": stats.dtype,
            "weight_dtype": stats.weight_dtype,
            "kv_dtype": stats.kv_dtype,
            "implementation": stats.implementation,
        },
    )
    yield from _load(stats)
    yield from _tokens(stats)
    yield from _cache(stats)
    yield from _time(stats)


def _load(stats: LiveStats) -> Iterable[Metric]:
    swapped = stats.swapped
    yield _gauges(
        "sequences",
        "Unfinished sequences: running ones hold blocks, waiting ones do not, swapped ones wait "
        "with their keys and values in host memory.",
        "state",
        {
            "running": stats.running,
            "waiting": max(0, stats.waiting - swapped),
            "swapped": swapped,
        },
    )
    yield _gauge("pool_blocks", "Blocks of the KV pool.", stats.num_blocks)
    yield _gauge("pool_used_blocks", "Blocks of the KV pool in use.", stats.used_blocks)
    yield _counters(
        "preemptions",
        "Sequences that had to make room: their keys and values are computed again or swapped.",
        "kind",
        {"recompute": stats.recomputes, "swap": stats.swaps},
    )


def _tokens(stats: LiveStats) -> Iterable[Metric]:
    yield _counters(
        "computed_tokens",
        "Tokens computed, recomputed ones included, in steps with a prefill and in others.",
        "phase",
        {"prefill": stats.prefill_tokens, "decode": stats.decode_tokens},
    )
    yield _counter("sampled_tokens", "Tokens sampled.", stats.sampled_tokens)
    yield _counter(
        "padding_tokens",
        "Token positions computed only to fill a bucket.",
        stats.padding_tokens,
    )


def _cache(stats: LiveStats) -> Iterable[Metric]:
    yield _counter(
        "prefix_cache_queried_tokens",
        "Tokens of prompts that were computed to their end, each prompt once.",
        stats.prompt_tokens,
    )
    yield _counter(
        "prefix_cache_hit_tokens",
        "Those of the queried tokens that came from the prefix cache.",
        stats.cached_tokens,
    )
    yield _counter(
        "prefix_cache_evicted_blocks",
        "Blocks that the prefix cache gave up for others.",
        stats.evictions,
    )
    yield _counter(
        "copied_blocks",
        "Shared blocks that were copied because a sequence wrote to them.",
        stats.copied_blocks,
    )


def _time(stats: LiveStats) -> Iterable[Metric]:
    family = HistogramMetricFamily(
        f"{_PREFIX}step_duration_seconds",
        "Time from the end of a step to the end of the next, compiling left out, of steps with a "
        "prefill and of others.",
        labels=["phase"],
    )
    for phase, times, seconds in (
        ("prefill", stats.prefill_times, stats.prefill_seconds),
        ("decode", stats.decode_times, stats.decode_seconds),
    ):
        family.add_metric([phase], buckets=_buckets(times), sum_value=seconds)
    yield family
    yield _counter(
        "host_seconds",
        "Time of steps in which the host worked instead of waiting for the device.",
        stats.host_seconds,
    )
    yield _counter(
        "starved_steps",
        "Steps before which the device had run out of work.",
        stats.starved_steps,
    )
    yield _counter("compile_seconds", "Time spent compiling.", stats.compile_seconds)
    yield _gauge("executables", "Compiled programs.", stats.executables)


def _buckets(times: Histogram) -> list[tuple[str, float]]:
    return [(floatToGoString(bound), float(count)) for bound, count in times.cumulative()]


def _info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    return InfoMetricFamily(_PREFIX + name, text, value=dict(labels))


def _gauge(name: str, text: str, value: _Number) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: _Number) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, _Number]) -> Metric:
    return _labeled(GaugeMetricFamily(_PREFIX + name, text, labels=[label]), values)


def _counters(name: str, text: str, label: str, values: Mapping[str, _Number]) -> Metric:
    return _labeled(CounterMetricFamily(_PREFIX + name, text, labels=[label]), values)


def _labeled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, _Number]
) -> Metric:
    for value, number in values.items():
        family.add_metric([value], number)
    return family
