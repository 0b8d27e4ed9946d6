"""One load: so many requests in flight at a time until all are done, with what they saw."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.engine import memory
from jaxpaged.engine.engine import Engine
from jaxpaged.job.timeline import Timeline, TimelineRecorder
from jaxpaged.plan.survey import place
from jaxpaged.request import Completion, Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """How long something took, in milliseconds.

    Attributes:
        median: What half of them did not exceed.
        p95: What 95 in 100 did not exceed.
        most: The longest.
    """

    median: float
    p95: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a load came to.

    Attributes:
        concurrency: Requests in flight at a time.
        reservation: "paged", or "static".
        num_blocks: Blocks of the pool.
        requests: Requests that were completed.
        failed: Requests that could not be, by error code.
        seconds: From the first request to the last completion, without compiling.
        compile_seconds: Compiling, before it.
        prompt_tokens: Of all prompts.
        cached_tokens: Thereof from the prefix cache.
        new_tokens: Tokens sampled.
        first_token: From handing a request to the engine to its first token.
        between_tokens: From one token of a request to the next.
        steps: Steps.
        preemptions: Sequences that had to make room.
        mean_running: Sequences that held blocks, on average over the steps.
        peak_running: Most of them.
        peak_used_blocks: Most blocks in use.
        mean_used_share: Blocks in use of all, on average over the steps.
        kv_waste_share: Slots of blocks in use that held no token, of all of them.
        padding_share: Of all computed token positions.
        peak_bytes: Most memory in use behind a step: of the device, on a CPU of the process.
        timeline: What went on over time.
    """

    concurrency: int
    reservation: str
    num_blocks: int
    requests: int
    failed: dict[str, int]
    seconds: float
    compile_seconds: float
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    first_token: Latency
    between_tokens: Latency
    steps: int
    preemptions: int
    mean_running: float
    peak_running: int
    peak_used_blocks: int
    mean_used_share: float
    kv_waste_share: float
    padding_share: float
    peak_bytes: int
    timeline: Timeline

    @property
    def tokens_per_second(self) -> float:
        """Tokens in and out."""
        return (self.prompt_tokens + self.new_tokens) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The figures in JSON's types."""
        return dataclasses.asdict(self) | {"tokens_per_second": round(self.tokens_per_second, 1)}


def run(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Load, list[Completion]]:
    """Runs the requests; the engine is new and as wide as the concurrency.

    Returns:
        What it came to, and the completions in the order of the requests.
    """
    waiting = collections.deque(requests)
    watch = _Watch(clock)

    def fill() -> None:
        while waiting and engine.num_unfinished() < concurrency:
            request = waiting.popleft()
            engine.add_request(request)
            watch.given(request.request_id)

    fill()
    engine.warm_up()
    watch.begin()
    recorder = TimelineRecorder(engine.stats, clock)
    done: dict[int, Completion] = {}
    peak_bytes = total_running = peak_running = total_used = 0
    stats = engine.stats
    while engine.has_work():
        completions = engine.step()
        watch.saw(engine.num_tokens(), completions)
        done.update((completion.request_id, completion) for completion in completions)
        fill()
        recorder.look()
        total_running += stats.running
        total_used += stats.used_blocks
        peak_running = max(peak_running, stats.running)
        peak_bytes = max(peak_bytes, memory.used_bytes())
    seconds = watch.elapsed()
    engine.check_integrity()
    steps = max(1, stats.steps)
    computed = stats.prefill_tokens + stats.decode_tokens
    positions = computed + stats.padding_tokens
    completions = [done[request.request_id] for request in requests]
    failed = collections.Counter(c.error_code for c in completions if c.error_code)
    return Load(
        concurrency=concurrency,
        reservation=engine.config.reservation,
        num_blocks=stats.num_blocks,
        requests=len(completions) - failed.total(),
        failed=dict(failed),
        seconds=seconds,
        compile_seconds=stats.compile_seconds,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        new_tokens=sum(completion.completion_tokens for completion in completions),
        first_token=latency(watch.first),
        between_tokens=latency(watch.between),
        steps=stats.steps,
        preemptions=stats.recomputes + stats.swaps,
        mean_running=total_running / steps,
        peak_running=peak_running,
        peak_used_blocks=stats.peak_used_blocks,
        mean_used_share=total_used / steps / stats.num_blocks,
        kv_waste_share=1 - stats.live_slot_steps / max(1, stats.reserved_slot_steps),
        padding_share=stats.padding_tokens / positions if positions else 0.0,
        peak_bytes=peak_bytes,
        timeline=recorder.timeline(),
    ), completions


def latency(seconds: Sequence[float]) -> Latency:
    """The summary of times; zeros for none."""
    if not seconds:
        return Latency(median=0.0, p95=0.0, most=0.0)
    ordered = sorted(seconds)
    median, p95, most = (
        round(1000 * ordered[place(len(ordered), share)], 1) for share in (50, 95, 100)
    )
    return Latency(median=median, p95=p95, most=most)


class _Watch:
    """When each request was given to the engine, and when its tokens came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self._given: dict[int, float] = {}
        self._seen: dict[int, tuple[float, int]] = {}
        self.first: list[float] = []
        self.between: list[float] = []

    def given(self, request_id: int) -> None:
        self._given[request_id] = self._clock()

    def begin(self) -> None:
        """What was given before waits from now on: compiling is not its time."""
        self._start = self._clock()
        self._given = dict.fromkeys(self._given, self._start)

    def elapsed(self) -> float:
        return self._clock() - self._start

    def saw(self, num_tokens: dict[int, int], completions: Sequence[Completion]) -> None:
        """Tokens of unfinished requests, and requests that ended, after a step."""
        now = self._clock()
        for request_id, count in num_tokens.items():
            self._count(request_id, count, now)
        for completion in completions:
            self._count(completion.request_id, completion.completion_tokens, now)
            self._seen.pop(completion.request_id, None)

    def _count(self, request_id: int, count: int, now: float) -> None:
        then, before = self._seen.get(request_id, (self._given[request_id], 0))
        if count == before:
            return
        times = self.between if before else self.first
        times.extend([(now - then) / (count - before)] * (count - before if before else 1))
        self._seen[request_id] = (now, count)
