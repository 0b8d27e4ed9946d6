"""The beam search of one request: which beams go on, which have ended, and when it is over.

Equal to Hugging Face's `generate` with `num_beams`. In every step all running beams are continued
by all tokens, and the continuations are ranked by cumulative log-probability:

* One of the `width` likeliest that is complete, by a stop token or by whatever else the caller
  says, becomes a hypothesis. A complete one further down is dropped.
* The `width` likeliest that are not complete run on.
* At `max_tokens` the `width` likeliest become hypotheses, complete or not.

The best `width` hypotheses are kept. A hypothesis' score is its cumulative log-probability divided
by the number of its generated tokens to the power of `length_penalty`. The prompt does not count,
the token that ended it does. Above 0 long hypotheses gain, below 0 short ones; 0 leaves the sum.

Once there are `width` hypotheses, `early_stopping` says when the running beams are given up:

* True: at once.
* False: when the likeliest of them, ended as it is, would not score above the worst hypothesis.
  With a positive length penalty it might still have got there later.
* "never": when none of them can get there, whatever follows. With a positive length penalty the
  likeliest is scored as if it had `max_tokens` tokens, which is the best it can come to.

In two respects this goes on where Hugging Face's search degenerates: where continuations complete
stop strings, less likely ones take their place; and tokens that are banned (whose log-probability
is -inf) are no continuations. There are fewer running beams than `width`, and in the end fewer
hypotheses, if there are not as many continuations.

Knows nothing of text, blocks or devices: the caller computes the log-probabilities, and forks the
sequences of the beams as a step says.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from jaxpaged.request import EarlyStopping

# Keeps powers within floating point's range; exp(600) is about 1e260.
_LARGEST_LOG = 600.0


class Branch(NamedTuple):
    """A running beam after a step, the continuation of one before it."""

    parent: int
    """Which of the running beams before the step."""
    token_id: int
    """What it is continued by."""
    cumulative_logprob: float
    """Of all its generated tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step made of the running beams.

    Attributes:
        branches: The running beams from now on, the likeliest first; none once the search is over.
    """

    branches: tuple[Branch, ...]

    @property
    def is_finished(self) -> bool:
        """Whether the search is over."""
        return not self.branches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A beam that has ended.

    Attributes:
        token_ids: The generated tokens, the one that ended it included.
        logprobs: Their log-probabilities, as they were given.
        beams: For each token the running beam, as numbered in its step, that it continued.
        cumulative_logprob: Sum of `logprobs`.
        score: What hypotheses are ranked by.
        finish_reason: "stop", or "length" at `max_tokens`.
        stop_reason: What ended it; None at `max_tokens`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    beams: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Beam:
    """A continuation; beams share what is before it."""

    before: "_Beam | None"
    parent: int
    token_id: int
    logprob: float
    cumulative_logprob: float

    def path(self) -> "list[_Beam]":
        """All continuations that led here, the first one first."""
        found, beam = [], self
        while beam is not None:
            found.append(beam)
            beam = beam.before
        return found[::-1]


class _Ended(NamedTuple):
    score: float
    beam: _Beam
    stop_reason: str | None


class BeamSearch:
    """The running beams and the hypotheses of one request.

    ```python
    search = BeamSearch(width=2, max_tokens=8, stop_ids={2: "</s>"})
    step = search.advance([[(7, -0.1), (5, -2.5), (2, -4.0)]])  # the prompt's continuations
    while not step.is_finished:
        step = search.advance([continuations(branch) for branch in step.branches])
    search.best(1)
    ```

    Args:
        width: Beams to keep running, and hypotheses to keep.
        max_tokens: Most tokens of a hypothesis.
        stop_ids: Tokens that complete a beam, and the `stop_reason` of each.
        length_penalty: Power of the length that scores are divided by.
        early_stopping: When running beams are given up.
    """

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        stop_ids: Mapping[int, str],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        assert width >= 1, f"width {width} is below 1"
        assert max_tokens >= 1, f"max_tokens {max_tokens} is below 1"
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_generated = 0
        # The prompt is the only beam at first; None, since nothing is generated.
        self._running: list[_Beam | None] = [None]
        self._ended: list[_Ended] = []

    @property
    def num_generated(self) -> int:
        """Tokens generated in each of the running beams."""
        return self._num_generated

    @property
    def num_running(self) -> int:
        """Running beams: 1 at first, which is the prompt; 0 once the search is over."""
        return len(self._running)

    @property
    def is_finished(self) -> bool:
        """Whether the search is over."""
        return not self._running

    def advance(
        self,
        candidates: Sequence[Sequence[tuple[int, float]]],
        stopped_by: Callable[[int, int], str | None] | None = None,
    ) -> Step:
        """Continues the running beams by a token each.

        Args:
            candidates: For each running beam its likeliest next tokens with their
                log-probabilities. As many as `width` and the number of stop tokens together are
                enough for an exact search, with `stopped_by` as many more as it stops.
            stopped_by: What else completes a running beam, given its number and its next token:
                the `stop_reason`, or None. Asked for tokens that are no stop tokens, the
                likeliest continuation first and no further than needed.
        """
        assert not self.is_finished, "the search is over"
        assert len(candidates) == self.num_running, (
            f"{len(candidates)} lists of candidates for {self.num_running} running beams"
        )
        self._num_generated += 1
        is_last = self._num_generated >= self._max_tokens
        going: list[_Beam] = []
        for rank, beam in enumerate(self._ranked(candidates)):
            if len(going) == self._width or (is_last and rank == self._width):
                break
            reason = self._stop_ids.get(beam.token_id)
            if reason is None and stopped_by is not None:
                reason = stopped_by(beam.parent, beam.token_id)
            if reason is None and not is_last:
                going.append(beam)
            elif rank < self._width:
                score = self._score(beam.cumulative_logprob, self._num_generated)
                self._ended.append(_Ended(score, beam, reason))
        # The sort is stable: of equal scores the one found first.
        self._ended = sorted(self._ended, key=lambda ended: -ended.score)[: self._width]
        self._running = [] if self._is_hopeless(going) else [*going]
        return Step(
            branches=tuple(
                Branch(beam.parent, beam.token_id, beam.cumulative_logprob)
                for beam in self._running
                if beam is not None
            )
        )

    def best(self, n: int) -> list[Hypothesis]:
        """The `n` best hypotheses, the best first; fewer if there are no more."""
        return [_hypothesis(ended) for ended in self._ended[:n]]

    def _ranked(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> Iterator[_Beam]:
        """All continuations, the likeliest first; of equals that of the earlier beam."""
        totals = [0.0 if beam is None else beam.cumulative_logprob for beam in self._running]
        ranked = sorted(
            (
                (totals[parent] + logprob, parent, token_id, logprob)
                for parent, continuations in enumerate(candidates)
                for token_id, logprob in continuations
                if logprob > -math.inf
            ),
            key=lambda continuation: -continuation[0],
        )
        for total, parent, token_id, logprob in ranked:
            yield _Beam(
                before=self._running[parent],
                parent=parent,
                token_id=token_id,
                logprob=logprob,
                cumulative_logprob=total,
            )

    def _is_hopeless(self, going: list[_Beam]) -> bool:
        """Whether the running beams are given up, if there are any."""
        if not going:
            return True
        if len(self._ended) < self._width:
            return False
        if self._early_stopping is True:
            return True
        is_patient = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if is_patient else self._num_generated
        return self._score(going[0].cumulative_logprob, length) <= self._ended[-1].score

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        limit = _LARGEST_LOG / math.log(max(num_tokens, 2))
        return cumulative_logprob / num_tokens ** max(-limit, min(limit, self._length_penalty))


def _hypothesis(ended: _Ended) -> Hypothesis:
    path = ended.beam.path()
    return Hypothesis(
        token_ids=tuple(beam.token_id for beam in path),
        logprobs=tuple(beam.logprob for beam in path),
        beams=tuple(beam.parent for beam in path),
        cumulative_logprob=ended.beam.cumulative_logprob,
        score=ended.score,
        finish_reason="length" if ended.stop_reason is None else "stop",
        stop_reason=ended.stop_reason,
    )
