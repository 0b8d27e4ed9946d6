"""Continuous batching over one block manager: who runs in the next step, and who gives way.

Policy: running sequences first, in the order of admission, then waiting ones in order, while lanes,
blocks and the token budget last. A running sequence that finds no block takes those of the
youngest one, which goes back to the front of the waiting queue and is computed again later
(recompute). The oldest running sequence is never preempted for another, so every admitted request
finishes.
"""

import collections
import dataclasses

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.scheduler.plan import Chunk, StepPlan
from jaxpaged.sequence import Sequence, SequenceStatus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A moment of the scheduler.

    Attributes:
        running: Sequences that hold blocks.
        waiting: Sequences in the waiting queue.
        used_blocks: Blocks in use.
        computed_tokens: Tokens whose keys and values are in the pool.
        preemptions: Preemptions so far.
    """

    running: int
    waiting: int
    used_blocks: int
    computed_tokens: int
    preemptions: int


class Scheduler:
    """The waiting queue and the running set.

    Args:
        blocks: Owner of the pool's blocks.
        max_num_seqs: Most sequences running at once.
        token_budget: Most tokens of one step; at least `max_num_seqs`, so that every running
            sequence can decode in every step.
    """

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, token_budget: int) -> None:
        assert token_budget >= max_num_seqs, (
            f"a budget of {token_budget} tokens cannot carry {max_num_seqs} decodes"
        )
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._waiting: collections.deque[Sequence] = collections.deque()
        # In the order of admission: a dict keeps it and forgets a finished one in constant time.
        self._running: dict[int, Sequence] = {}
        self._num_preemptions = 0

    def usage(self) -> Usage:
        """What runs, waits and is held right now."""
        return Usage(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=self._blocks.allocator.num_used,
            computed_tokens=sum(s.num_computed for s in self._running.values()),
            preemptions=self._num_preemptions,
        )

    def sequences(self) -> list[Sequence]:
        """All unfinished sequences, running ones first."""
        return [*self._running.values(), *self._waiting]

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the waiting queue."""
        self._waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """The next step's plan; blocks for its tokens are allocated when it returns."""
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        budget = self._token_budget
        # Only the youngest can still be prefilling: while one is, it takes what the decodes leave
        # of the budget, and nobody is admitted.
        for sequence in tuple(self._running.values()):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by an older one a moment ago
            length = min(sequence.num_tokens - sequence.num_computed, budget)
            if length and self._make_room(sequence, length, preempted):
                chunks.append(self._take(sequence, length))
                budget -= length
        if not preempted:
            self._admit(chunks, budget)
        return StepPlan(
            decodes=tuple(c for c in chunks if c.length == 1),
            prefills=tuple(c for c in chunks if c.length > 1),
            preempted=tuple(preempted),
        )

    def advance(self, plan: StepPlan) -> None:
        """Counts the plan's tokens as computed; call it after the step ran."""
        for chunk in plan.chunks:
            chunk.sequence.num_computed = chunk.start + chunk.length

    def finish(self, sequence: Sequence) -> None:
        """Takes a running or waiting sequence out and frees its blocks."""
        if self._running.pop(id(sequence), None) is None:
            self._waiting.remove(sequence)
        self._blocks.free(sequence)
        sequence.status = SequenceStatus.FINISHED

    def check_integrity(self) -> None:
        """Proves the block accounting over all unfinished sequences."""
        self._blocks.check_integrity(self.sequences())

    def _make_room(self, sequence: Sequence, length: int, preempted: list[Sequence]) -> bool:
        """Preempts from the tail until the sequence's next tokens fit; False if it gave way."""
        num_tokens = sequence.num_computed + length
        while not self._blocks.can_hold(sequence, num_tokens):
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[id(sequence)]
        self._blocks.free(sequence)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)
        self._num_preemptions += 1

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while self._waiting and budget and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            if not self._blocks.can_admit(sequence):
                return
            self._waiting.popleft()
            self._running[id(sequence)] = sequence
            sequence.status = SequenceStatus.RUNNING
            # All of the prompt's blocks at once: chunks of an admitted prompt never preempt.
            self._blocks.allocate(sequence, sequence.num_tokens)
            length = min(sequence.num_tokens, budget)
            chunks.append(self._take(sequence, length))
            budget -= length

    def _take(self, sequence: Sequence, length: int) -> Chunk:
        start = sequence.num_computed
        self._blocks.allocate(sequence, start + length)
        is_last = start + length == sequence.num_tokens
        return Chunk(sequence=sequence, start=start, length=length, samples=is_last)
