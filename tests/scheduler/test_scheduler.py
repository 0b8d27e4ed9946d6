"""Scheduler properties over random workloads, without a model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.cache.capacity import blocks_for
from jaxpaged.request import Request
from jaxpaged.scheduler import Scheduler, StepPlan
from jaxpaged.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 4


def make_scheduler(
    num_blocks: int, *, max_num_seqs: int, token_budget: int, watermark: float = 0.0
) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK_SIZE, watermark=watermark)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, token_budget=token_budget)


def make_sequence(request_id: int, num_prompt: int, max_tokens: int) -> Sequence:
    request = Request(request_id=request_id, prompt_ids=tuple([7] * num_prompt))
    return Sequence(request=request, max_tokens=max_tokens)


def sample(scheduler: Scheduler, plan: StepPlan) -> list[Sequence]:
    """What the engine does behind a step; returns the sequences that finished."""
    scheduler.advance(plan)
    finished = []
    for chunk in plan.chunks:
        if chunk.samples:
            chunk.sequence.token_ids.append(1)
            if chunk.sequence.num_sampled == chunk.sequence.max_tokens:
                scheduler.finish(chunk.sequence)
                finished.append(chunk.sequence)
    return finished


workloads = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    workload=workloads,
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    extra_blocks=st.integers(0, 8),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_every_request_finishes_within_budget_and_blocks(
    workload, max_num_seqs, extra_budget, extra_blocks, watermark
) -> None:
    longest = max(prompt + new for prompt, new in workload)
    scheduler = make_scheduler(
        blocks_for(longest, BLOCK_SIZE) + extra_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=max_num_seqs + extra_budget,
        watermark=watermark,
    )
    pending = {i: make_sequence(i, *sizes) for i, sizes in enumerate(workload)}
    for sequence in pending.values():
        scheduler.add(sequence)
    # Each step computes a token at least; recomputing all of a sequence per token is the worst.
    bound = sum((prompt + new) * (new + 1) for prompt, new in workload) + 1
    for _ in range(bound):
        plan = scheduler.schedule()
        assert not plan.is_empty
        assert plan.num_tokens <= max_num_seqs + extra_budget
        assert len(plan.chunks) <= max_num_seqs
        lanes = [id(chunk.sequence) for chunk in plan.chunks]
        assert len(set(lanes)) == len(lanes)
        # Nobody who holds blocks is left out of a step.
        running = [s for s in scheduler.sequences() if s.status is SequenceStatus.RUNNING]
        assert {id(c.sequence) for c in plan.chunks} == {id(s) for s in running}
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.status is SequenceStatus.RUNNING
            assert chunk.start == sequence.num_computed
            assert len(sequence.block_table) * BLOCK_SIZE >= chunk.start + chunk.length
            assert chunk.samples == (chunk.start + chunk.length == sequence.num_tokens)
        for sequence in plan.preempted:
            assert sequence.block_table == []
            assert sequence.num_computed == 0
        for sequence in sample(scheduler, plan):
            del pending[sequence.request.request_id]
        scheduler.check_integrity()
        if not pending:
            break
    assert not pending
    assert scheduler.usage().used_blocks == 0


def test_prompt_is_cut_into_chunks_of_the_budget_and_samples_once() -> None:
    scheduler = make_scheduler(20, max_num_seqs=2, token_budget=8)
    sequence = make_sequence(0, 19, 2)
    scheduler.add(sequence)
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append([(c.start, c.length, c.samples) for c in plan.chunks])
        sample(scheduler, plan)
    assert seen == [[(0, 8, False)], [(8, 8, False)], [(16, 3, True)]]


def test_a_prefill_takes_what_decodes_leave_and_holds_back_the_waiting() -> None:
    scheduler = make_scheduler(40, max_num_seqs=3, token_budget=8)
    decoding, long, short = (make_sequence(i, n, 9) for i, n in enumerate((2, 20, 3)))
    scheduler.add(decoding)
    sample(scheduler, scheduler.schedule())
    scheduler.add(long)
    scheduler.add(short)
    lengths = []
    for _ in range(3):
        plan = scheduler.schedule()
        lengths.append([(c.sequence.request.request_id, c.length) for c in plan.chunks])
        sample(scheduler, plan)
    assert lengths == [[(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (2, 1), (1, 6)]]


def test_youngest_gives_way_and_runs_again_first() -> None:
    scheduler = make_scheduler(4, max_num_seqs=3, token_budget=16)
    old, young, later = (make_sequence(i, 7, 9) for i in range(3))
    for sequence in (old, young, later):
        scheduler.add(sequence)
    sample(scheduler, scheduler.schedule())
    assert later.status is SequenceStatus.WAITING
    sample(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert plan.preempted == (young,)
    assert [c.sequence for c in plan.chunks] == [old]
    assert scheduler.sequences() == [old, young, later]
    assert scheduler.usage().preemptions == 1


def test_a_waiting_sequence_can_be_taken_out() -> None:
    scheduler = make_scheduler(4, max_num_seqs=1, token_budget=8)
    first, second = make_sequence(0, 3, 2), make_sequence(1, 3, 2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.finish(second)
    assert scheduler.sequences() == [first]
    assert second.status is SequenceStatus.FINISHED
