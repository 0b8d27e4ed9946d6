"""What the engine did over time, in a few hundred intervals whatever the length of the run.

When there are too many, each two neighbours become one and later intervals are twice as long: a
step costs the same however long the run is. Knows counters, nothing of rows.
"""

import dataclasses
import time
from collections.abc import Callable

from jaxpaged.job.completion_engine import LiveStats

_MAX_INTERVALS = 400
_FIRST_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Columns with an entry for each interval.

    Attributes:
        seconds: When the interval ended, from the beginning of the run; it began where the one
            before ended, the first one at 0.
        steps: Steps that ended in it.
        computed_tokens: Tokens computed in them: the prompts', the sampled ones that others
            follow, and those computed again.
        sampled_tokens: Tokens sampled in them.
        padding_tokens: Token positions computed only to fill a bucket.
        used_blocks: Blocks in use, on average.
        live_tokens: Computed tokens of running sequences, on average; where several share a
            block, each counts.
        running: Sequences that held blocks, on average.
        waiting: Sequences that waited for admission, on average.
    """

    seconds: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    computed_tokens: tuple[int, ...] = ()
    sampled_tokens: tuple[int, ...] = ()
    padding_tokens: tuple[int, ...] = ()
    used_blocks: tuple[float, ...] = ()
    live_tokens: tuple[float, ...] = ()
    running: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def edges(self) -> tuple[float, ...]:
        """Where the intervals begin and end, one more than there are."""
        return (0.0, *self.seconds)


@dataclasses.dataclass(slots=True)
class _Interval:
    """Sums over the looks at the engine in an interval; what is counted by the engine itself is
    its counter at the end."""

    end: float = 0.0
    num_looks: int = 0
    used_blocks: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    padding_tokens: int = 0
    live_slot_steps: int = 0


class TimelineRecorder:
    """Looks at an engine's counters after every step.

    Args:
        stats: The counters.
        clock: Seconds.
        max_intervals: Most intervals that are kept; even.
    """

    def __init__(
        self,
        stats: LiveStats,
        clock: Callable[[], float] = time.perf_counter,
        max_intervals: int = _MAX_INTERVALS,
    ) -> None:
        self._stats = stats
        self._clock = clock
        self._max_intervals = max_intervals
        self._length = _FIRST_SECONDS
        self._start = clock()
        # An engine may have worked before.
        self._before = self._counters(_Interval())
        self._intervals: list[_Interval] = []
        self._open = _Interval()

    def look(self) -> None:
        """Takes in what the counters say now."""
        stats, interval = self._stats, self._open
        interval.num_looks += 1
        interval.used_blocks += stats.used_blocks
        interval.running += stats.running
        interval.waiting += stats.waiting
        now = self._clock() - self._start
        last = self._intervals[-1].end if self._intervals else 0.0
        if now - last >= self._length:
            self._close(now)

    def timeline(self) -> Timeline:
        """All that was seen so far."""
        if self._open.num_looks:
            self._close(self._clock() - self._start)
        found, before = self._intervals, [self._before, *self._intervals]
        pairs = list(zip(before, found, strict=False))
        return Timeline(
            seconds=tuple(round(now.end, 3) for now in found),
            steps=tuple(now.steps - then.steps for then, now in pairs),
            computed_tokens=tuple(
                now.computed_tokens - then.computed_tokens for then, now in pairs
            ),
            sampled_tokens=tuple(now.sampled_tokens - then.sampled_tokens for then, now in pairs),
            padding_tokens=tuple(now.padding_tokens - then.padding_tokens for then, now in pairs),
            used_blocks=tuple(_mean(now.used_blocks, now) for now in found),
            live_tokens=tuple(
                _mean(now.live_slot_steps - then.live_slot_steps, now) for then, now in pairs
            ),
            running=tuple(_mean(now.running, now) for now in found),
            waiting=tuple(_mean(now.waiting, now) for now in found),
        )

    def _close(self, now: float) -> None:
        self._open.end = now
        self._intervals.append(self._counters(self._open))
        self._open = _Interval()
        if len(self._intervals) >= self._max_intervals:
            self._merge()

    def _counters(self, interval: _Interval) -> _Interval:
        """The interval with the engine's counters as they are now."""
        stats = self._stats
        interval.steps = stats.steps
        interval.computed_tokens = stats.prefill_tokens + stats.decode_tokens
        interval.sampled_tokens = stats.sampled_tokens
        interval.padding_tokens = stats.padding_tokens
        interval.live_slot_steps = stats.live_slot_steps
        return interval

    def _merge(self) -> None:
        for first, second in zip(self._intervals[::2], self._intervals[1::2], strict=True):
            second.num_looks += first.num_looks
            second.used_blocks += first.used_blocks
            second.running += first.running
            second.waiting += first.waiting
        self._intervals = self._intervals[1::2]
        self._length *= 2


def _mean(total: int, interval: _Interval) -> float:
    return round(total / interval.num_looks, 2)
