"""Continuous batching over one block manager: who runs in the next step, and who gives way.

Policy: running sequences first, in seniority order, then swapped and waiting ones, while lanes,
blocks and the token budget last. A running sequence that finds no block takes those of the most
junior one, which is computed again later (recompute) or comes back from host memory (swap). The
most senior one is never preempted for another, so every admitted request finishes.

Waiting sequences are served in waves: all that arrived since the last wave are sorted by their
prompts, so that those that begin alike meet while their shared blocks are warm; newcomers wait for
the next wave, so nobody starves.

A plan is a commitment: what it holds counts as computed, and what it samples as pending, as soon
as it is made. So the next plan can be made while the step runs.
"""

import bisect
import collections
import dataclasses

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.cache.capacity import blocks_for
from jaxpaged.scheduler.plan import BlockCopy, Chunk, Sampler, StepPlan, Swap, TableUpdate
from jaxpaged.scheduler.preemption import RecomputeAlways, SwapPolicy
from jaxpaged.sequence import Sequence, SequenceStatus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A moment of the scheduler.

    Attributes:
        running: Sequences that hold blocks.
        waiting: Sequences that wait for admission, swapped ones included.
        swapped: Those of them whose keys and values are in host memory.
        used_blocks: Blocks in use.
        computed_tokens: Tokens whose keys and values are in the pool.
        recomputes: Preemptions so far that dropped keys and values.
        swaps: Preemptions so far that saved them.
    """

    running: int
    waiting: int
    swapped: int
    used_blocks: int
    computed_tokens: int
    recomputes: int
    swaps: int


@dataclasses.dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    decode_budget: int
    swap_outs: list[Swap] = dataclasses.field(default_factory=list)
    swap_ins: list[Swap] = dataclasses.field(default_factory=list)
    copies: list[BlockCopy] = dataclasses.field(default_factory=list)
    # In order, without repetition.
    admitted: dict[Sequence, None] = dataclasses.field(default_factory=dict)
    updates: list[TableUpdate] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    preempted: list[Sequence] = dataclasses.field(default_factory=list)

    def freeze(self) -> StepPlan:
        return StepPlan(
            swap_outs=tuple(self.swap_outs),
            swap_ins=tuple(self.swap_ins),
            copies=tuple(self.copies),
            admitted=tuple(self.admitted),
            table_updates=tuple(self.updates),
            chunks=tuple(self.chunks),
            preempted=tuple(self.preempted),
        )


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank, sequence.sample


class Scheduler:
    """The waiting queue and the running set.

    Args:
        blocks: Owner of the pool's blocks.
        max_num_seqs: Most sequences running at once: the lanes.
        token_budget: Most tokens of one step; at least `max_num_seqs`, so that every running
            sequence can decode in every step.
        decode_budget: Most sampled tokens that one step computes, more than one of a sequence that
            is computed again; at least `max_num_seqs`, which it is by default.
        swaps: Decides which preempted sequences keep their keys and values in host memory.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        decode_budget: int | None = None,
        swaps: SwapPolicy | None = None,
    ) -> None:
        assert token_budget >= max_num_seqs, (
            f"a budget of {token_budget} tokens cannot carry {max_num_seqs} decodes"
        )
        self._blocks = blocks
        self._token_budget = token_budget
        self._decode_budget = decode_budget or max_num_seqs
        assert self._decode_budget >= max_num_seqs, (
            f"{self._decode_budget} decodes are not one for each of {max_num_seqs} sequences"
        )
        self._swaps = swaps or RecomputeAlways()
        self._arrived: list[Sequence] = []
        self._waiting: collections.deque[Sequence] = collections.deque()
        # By seniority.
        self._running: list[Sequence] = []
        self._free_lanes = list(range(max_num_seqs - 1, -1, -1))
        self._next_rank = 0
        # Their lanes are set with the next plan.
        self._touched: list[Sequence] = []
        self._num_swapped = 0
        self._num_recomputes = 0
        self._num_swaps = 0

    def usage(self) -> Usage:
        """What runs, waits and is held right now."""
        return Usage(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._arrived),
            swapped=self._num_swapped,
            used_blocks=self._blocks.allocator.num_used,
            computed_tokens=sum(s.num_computed for s in self._running),
            recomputes=self._num_recomputes,
            swaps=self._num_swaps,
        )

    def sequences(self) -> list[Sequence]:
        """All unfinished sequences, running ones first."""
        return [*self._running, *self._waiting, *self._arrived]

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence; samples in its `forks` join it once its prompt is computed."""
        self._arrived.append(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets `child` go on from `parent`'s blocks, between two steps.

        Its tokens are the parent's; where the parent holds no blocks, or there is no lane, the
        child waits and is computed from its tokens.
        """
        child.rank = parent.rank
        if parent.status is SequenceStatus.RUNNING and self._free_lanes:
            self._share(parent, child)
            self.touch(child)
        else:
            self._wait(child)

    def touch(self, sequence: Sequence) -> None:
        """The sequence's tokens were changed on the host: its lane is set with the next step."""
        self._touched.append(sequence)

    def schedule(self) -> StepPlan:
        """The next step's plan, which has to be run; blocks for its tokens are allocated."""
        draft = _Draft(budget=self._token_budget, decode_budget=self._decode_budget)
        running = (s for s in self._touched if s.status is SequenceStatus.RUNNING)
        draft.admitted.update(dict.fromkeys(running))
        self._touched.clear()
        self._yield_to_beams(draft)
        self._decode(draft)
        for sequence in self._running:
            if sequence.num_left > 1:
                self._take(sequence, draft)
        if not draft.preempted:
            self._admit(draft)
        return draft.freeze()

    def finish(self, sequence: Sequence) -> None:
        """Takes an unfinished sequence out and frees its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self._leave(sequence)
            self._blocks.free(sequence)
        elif sequence in self._arrived:
            self._arrived.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.status is SequenceStatus.SWAPPED:
            self._swaps.forget(sequence)
            self._num_swapped -= 1
        sequence.status = SequenceStatus.FINISHED

    def check_integrity(self) -> None:
        """Proves the accounting of blocks and lanes over all unfinished sequences."""
        self._blocks.check_integrity(self.sequences())
        swapped = sum(s.status is SequenceStatus.SWAPPED for s in self.sequences())
        assert swapped == self._num_swapped, (
            f"{swapped} sequences are swapped, {self._num_swapped} are counted"
        )
        lanes = [sequence.lane for sequence in self._running]
        assert len({*lanes, *self._free_lanes}) == len(lanes) + len(self._free_lanes), (
            f"lanes {lanes} are in use, {self._free_lanes} are free: one is both or twice"
        )

    def _yield_to_beams(self, draft: _Draft) -> None:
        """Preempts juniors of a waiting beam until it fits; it is admitted with the next plan.

        Its siblings rest until it has caught up, with their lanes and blocks: without this, rests
        of several beam searches could wait for each other for ever.
        """
        while self._waiting and self._waiting[0].is_held and self._running:
            beam, junior = self._waiting[0], self._running[-1]
            if junior.rank <= beam.rank or (self._free_lanes and self._fits(beam)):
                return
            self._preempt(junior, draft)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the blocks of a waiting sequence are there."""
        if sequence.status is SequenceStatus.SWAPPED:
            return self._blocks.can_restore(sequence)
        return self._blocks.can_admit(sequence)

    def _decode(self, draft: _Draft) -> None:
        """One token of every running sequence that has just one left, the most senior first."""
        for sequence in tuple(self._running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by a more senior one a moment ago
            self._blocks.release_outside(sequence)
            # What is sampled already up to the limit, in flight, needs no further step.
            if sequence.num_left != 1 or sequence.num_sampled >= sequence.max_tokens:
                continue
            if self._make_room(sequence, draft):
                self._take(sequence, draft)

    def _make_room(self, sequence: Sequence, draft: _Draft) -> bool:
        """Preempts the most junior until the next token fits; False if it gave way itself."""
        start = sequence.num_computed
        while not self._blocks.can_hold(sequence, start, start + 1):
            junior = self._running[-1]
            self._preempt(junior, draft)
            if junior is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        self._leave(sequence)
        draft.admitted.pop(sequence, None)
        # A swapped sequence comes back with just the blocks that are left then.
        self._blocks.release_outside(sequence)
        if self._swaps.takes(sequence):
            draft.swap_outs.append(self._swap(sequence))
            sequence.status = SequenceStatus.SWAPPED
            self._num_swaps += 1
            self._num_swapped += 1
        else:
            sequence.num_computed = 0
            sequence.status = SequenceStatus.WAITING
            self._num_recomputes += 1
        self._blocks.free(sequence)
        self._wait(sequence)
        draft.preempted.append(sequence)

    def _swap(self, sequence: Sequence) -> Swap:
        """The blocks with computed tokens; the same ones, in number and order, out and in."""
        computed = sequence.block_table[
            : blocks_for(sequence.num_computed, self._blocks.block_size)
        ]
        return Swap(sequence, tuple(block for block in computed if block is not None))

    def _wait(self, sequence: Sequence) -> None:
        """Puts a sequence that has a rank among the waiting ones, where its seniority says."""
        place = bisect.bisect_left(self._waiting, _seniority(sequence), key=_seniority)
        self._waiting.insert(place, sequence)

    def _admit(self, draft: _Draft) -> None:
        if not self._waiting:
            self._begin_wave()
        while self._waiting and draft.budget and self._free_lanes:
            sequence = self._waiting[0]
            is_swapped = sequence.status is SequenceStatus.SWAPPED
            if sequence.num_pending or not self._fits(sequence):
                return
            self._waiting.popleft()
            if is_swapped:
                self._blocks.restore(sequence)
                draft.swap_ins.append(self._swap(sequence))
                self._swaps.forget(sequence)
                self._num_swapped -= 1
            else:
                # All blocks of the known tokens at once: chunks of a prompt never preempt.
                sequence.num_computed = self._blocks.admit(sequence)
                sequence.num_cached = max(
                    sequence.num_cached, 0 if sequence.num_sampled else sequence.num_computed
                )
            self._enter(sequence)
            draft.admitted[sequence] = None
            if sequence.num_left:
                self._take(sequence, draft)
            if not self._waiting:
                self._begin_wave()

    def _begin_wave(self) -> None:
        # Stable: of equal prompts the first that came goes first.
        self._arrived.sort(key=lambda sequence: (sequence.adapter, sequence.request.prompt_ids))
        for sequence in self._arrived:
            sequence.rank = self._next_rank
            for fork in sequence.forks:
                fork.rank = self._next_rank
            self._next_rank += 1
        self._waiting.extend(self._arrived)
        self._arrived.clear()

    def _enter(self, sequence: Sequence) -> None:
        sequence.lane = self._free_lanes.pop()
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self._running, sequence, key=_seniority)

    def _leave(self, sequence: Sequence) -> None:
        place = bisect.bisect_left(self._running, _seniority(sequence), key=_seniority)
        assert self._running[place] is sequence, "seniority is unique and does not change"
        del self._running[place]
        assert sequence.lane is not None, "a running sequence has a lane"
        self._free_lanes.append(sequence.lane)
        sequence.lane = None

    def _share(self, parent: Sequence, child: Sequence) -> None:
        self._blocks.fork(parent, child)
        child.num_computed = parent.num_computed
        self._enter(child)

    def _take(self, sequence: Sequence, draft: _Draft) -> None:
        """Plans the next tokens of a running sequence, as many as the budgets allow."""
        assert sequence.lane is not None, "a running sequence has a lane"
        start = sequence.num_computed
        # Tokens of the prompt, then sampled ones.
        num_prefill = max(0, sequence.num_prompt - start)
        length = min(sequence.num_left, draft.budget, num_prefill + draft.decode_budget)
        if not length:
            return
        stop = start + length
        changes = self._blocks.prepare(sequence, start, stop)
        draft.copies += [BlockCopy(*copy) for copy in changes.copies]
        if sequence not in draft.admitted:
            draft.updates += [TableUpdate(sequence.lane, *update) for update in changes.updates]
        sequence.num_computed = stop
        self._blocks.register(sequence, stop)
        samplers: list[Sampler] = []
        if stop == sequence.num_tokens:
            samplers = self._samplers(sequence, draft)
        draft.chunks.append(
            Chunk(
                sequence=sequence,
                lane=sequence.lane,
                start=start,
                length=length,
                samplers=tuple(samplers),
            )
        )
        draft.budget -= length
        draft.decode_budget -= max(0, length - num_prefill)

    def _samplers(self, sequence: Sequence, draft: _Draft) -> list[Sampler]:
        """Who samples behind the sequence's last token: itself, and samples that fork from it."""
        found = [sequence]
        forks, sequence.forks = sequence.forks, []
        for fork in forks:
            if self._free_lanes:
                self._share(sequence, fork)
                draft.admitted[fork] = None
                found.append(fork)
            else:
                self._wait(fork)
        for sampler in found:
            if not sampler.is_held:
                sampler.num_pending += 1
        return [Sampler(sampler, sampler.lane) for sampler in found if sampler.lane is not None]
