"""Scheduler properties over random workloads, without a model."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.cache.capacity import blocks_for
from jaxpaged.request import Request, SamplingParams
from jaxpaged.scheduler import Scheduler, StepPlan
from jaxpaged.scheduler.plan import Chunk
from jaxpaged.scheduler.preemption import SwapSpace
from jaxpaged.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 4


def make_scheduler(
    num_blocks: int,
    *,
    max_num_seqs: int,
    token_budget: int,
    watermark: float = 0.0,
    prefix_cache: bool = False,
    window: int | None = None,
    swap_blocks: int = 0,
) -> Scheduler:
    blocks = BlockManager(
        num_blocks, BLOCK_SIZE, watermark=watermark, prefix_cache=prefix_cache, window=window
    )
    swaps = SwapSpace(max_blocks=swap_blocks, block_bytes=1, preemption="swap")
    return Scheduler(blocks, max_num_seqs=max_num_seqs, token_budget=token_budget, swaps=swaps)


def make_sequence(
    request_id: int, prompt: int | tuple[int, ...], max_tokens: int, *, num_samples: int = 1
) -> Sequence:
    # Prompts that are told by their lengths have no block in common.
    ids = prompt if isinstance(prompt, tuple) else (1000 + request_id,) * prompt
    request = Request(request_id=request_id, prompt_ids=ids, params=SamplingParams(n=num_samples))
    samples = [
        Sequence(request=request, sample=i, max_tokens=max_tokens) for i in range(num_samples)
    ]
    samples[0].forks.extend(samples[1:])
    return samples[0]


def receive(scheduler: Scheduler, plan: StepPlan) -> list[Sequence]:
    """What the engine does with a step's result; returns the sequences that finished."""
    finished = []
    for sequence, _ in (sampler for chunk in plan.chunks for sampler in chunk.samplers):
        if sequence.status is SequenceStatus.FINISHED:
            continue
        sequence.num_pending -= 1
        sequence.token_ids.append(1)
        if len(sequence.output_ids) == sequence.max_tokens:
            scheduler.finish(sequence)
            finished.append(sequence)
    return finished


def step(scheduler: Scheduler) -> StepPlan:
    """One step, with its result at once."""
    plan = scheduler.schedule()
    receive(scheduler, plan)
    return plan


def lengths(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.sequence.request.request_id, chunk.length) for chunk in plan.chunks]


def num_sampled(chunk: Chunk) -> int:
    prompt_left = max(0, chunk.sequence.num_prompt - chunk.start)
    return max(0, chunk.length - prompt_left)


def check_plan(plan: StepPlan, *, budget: int, max_num_seqs: int, has_window: bool) -> None:
    assert plan.num_tokens <= budget
    # Sampled tokens, also of sequences that are computed again: one for each lane by default.
    assert sum(num_sampled(chunk) for chunk in plan.chunks) <= max_num_seqs
    lanes = [chunk.lane for chunk in plan.chunks]
    samplers = [sampler.lane for chunk in plan.chunks for sampler in chunk.samplers]
    assert len(set(lanes)) == len(lanes) <= max_num_seqs
    assert len(set(samplers)) == len(samplers) <= max_num_seqs
    for chunk in plan.chunks:
        sequence = chunk.sequence
        assert sequence.status is SequenceStatus.RUNNING
        stop = chunk.start + chunk.length
        assert sequence.num_computed == stop
        assert len(sequence.block_table) * BLOCK_SIZE >= stop
        needed = range(chunk.start // BLOCK_SIZE, blocks_for(stop, BLOCK_SIZE))
        assert all(sequence.block_table[index] is not None for index in needed)
        assert has_window or None not in sequence.block_table
    for sequence in plan.preempted:
        assert sequence.block_table == []
        assert sequence.lane is None


workloads = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=12
)


@settings(max_examples=200, deadline=None)
@given(
    workload=workloads,
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 20),
    extra_blocks=st.integers(0, 8),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    shares_prompts=st.booleans(),
    window=st.sampled_from([None, 3, 9]),
    swap_blocks=st.sampled_from([0, 6, 100]),
    is_overlapped=st.booleans(),
)
def test_every_request_finishes_within_budget_and_blocks(
    workload,
    max_num_seqs,
    extra_budget,
    extra_blocks,
    watermark,
    shares_prompts,
    window,
    swap_blocks,
    is_overlapped,
) -> None:
    longest = max(prompt + new for prompt, new, _ in workload)
    budget = max_num_seqs + extra_budget
    scheduler = make_scheduler(
        blocks_for(longest, BLOCK_SIZE) + extra_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=budget,
        watermark=watermark,
        prefix_cache=shares_prompts,
        window=window,
        swap_blocks=swap_blocks,
    )
    left = 0
    for index, (prompt, new, samples) in enumerate(workload):
        ids = tuple(range(1, prompt + 1)) if shares_prompts else prompt
        scheduler.add(make_sequence(index, ids, new, num_samples=samples))
        left += samples
    # Each step computes a token at least; recomputing all of a sequence per token is the worst.
    bound = sum((prompt + new) * (new + 1) * n for prompt, new, n in workload) * 2 + 4
    before = StepPlan()
    for _ in range(bound):
        plan = scheduler.schedule()
        assert before.chunks or not plan.is_empty
        check_plan(plan, budget=budget, max_num_seqs=max_num_seqs, has_window=window is not None)
        left -= len(receive(scheduler, before if is_overlapped else plan))
        before = plan if is_overlapped else StepPlan()
        scheduler.check_integrity()
        if not left:
            break
    assert not left
    scheduler.check_integrity()
    assert scheduler.usage().used_blocks == 0


def test_prompt_is_cut_into_chunks_of_the_budget_and_samples_once() -> None:
    scheduler = make_scheduler(20, max_num_seqs=2, token_budget=8)
    scheduler.add(make_sequence(0, 19, 2))
    seen = []
    for _ in range(3):
        seen.append([(c.start, c.length, c.samples) for c in step(scheduler).chunks])
    assert seen == [[(0, 8, False)], [(8, 8, False)], [(16, 3, True)]]


def test_a_prefill_takes_what_decodes_leave_and_holds_back_the_waiting() -> None:
    scheduler = make_scheduler(40, max_num_seqs=3, token_budget=8)
    decoding, long, short = (make_sequence(i, n, 9) for i, n in enumerate((2, 20, 3)))
    scheduler.add(decoding)
    step(scheduler)
    scheduler.add(long)
    scheduler.add(short)
    seen = [lengths(step(scheduler)) for _ in range(3)]
    assert seen == [[(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (1, 6), (2, 1)]]


def test_youngest_gives_way_and_runs_again_first() -> None:
    scheduler = make_scheduler(4, max_num_seqs=3, token_budget=16)
    old, young, later = (make_sequence(i, 7, 9) for i in range(3))
    for sequence in (old, young, later):
        scheduler.add(sequence)
    step(scheduler)
    assert later.status is SequenceStatus.WAITING
    step(scheduler)
    plan = step(scheduler)
    assert plan.preempted == (young,)
    assert [c.sequence for c in plan.chunks] == [old]
    assert scheduler.sequences() == [old, young, later]
    assert scheduler.usage().recomputes == 1


def test_a_swapped_sequence_keeps_what_is_computed_and_comes_back() -> None:
    scheduler = make_scheduler(4, max_num_seqs=2, token_budget=16, swap_blocks=10)
    old, young = (make_sequence(i, 7, 3) for i in range(2))
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    step(scheduler)
    plan = step(scheduler)
    assert [swap.sequence for swap in plan.swap_outs] == [young]
    assert len(plan.swap_outs[0].block_ids) == 2
    assert young.status is SequenceStatus.SWAPPED
    assert young.num_computed == 8
    assert (scheduler.usage().waiting, scheduler.usage().swapped) == (1, 1)
    plan = step(scheduler)
    assert [swap.sequence for swap in plan.swap_ins] == [young]
    assert lengths(plan) == [(1, 1)]
    assert (scheduler.usage().swaps, scheduler.usage().swapped) == (1, 0)


def test_a_waiting_sequence_can_be_taken_out() -> None:
    scheduler = make_scheduler(4, max_num_seqs=1, token_budget=8)
    first, second = make_sequence(0, 3, 2), make_sequence(1, 3, 2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.finish(second)
    assert scheduler.sequences() == [first]
    assert second.status is SequenceStatus.FINISHED


def test_prompts_that_begin_alike_are_computed_once_even_in_one_step() -> None:
    scheduler = make_scheduler(100, max_num_seqs=8, token_budget=64, prefix_cache=True)
    shared = tuple(range(1, 17))
    for index in range(4):
        scheduler.add(make_sequence(index, (*shared, 100 + index), 4))
    plan = step(scheduler)
    assert lengths(plan) == [(0, 17), (1, 1), (2, 1), (3, 1)]
    assert [chunk.sequence.num_cached for chunk in plan.chunks] == [0, 16, 16, 16]


def test_a_wave_is_ordered_by_prompt_and_newcomers_wait_for_the_next() -> None:
    scheduler = make_scheduler(100, max_num_seqs=1, token_budget=64)
    for index, first in enumerate((5, 3, 5, 3)):
        scheduler.add(make_sequence(index, (first, 7, 7, 7), 1))
    order = []
    for round_number in itertools.count():
        plan = step(scheduler)
        if plan.is_empty:
            break
        order.append(plan.chunks[0].sequence.request.request_id)
        if round_number == 0:
            scheduler.add(make_sequence(4, (1, 1, 1, 1), 1))
    assert order == [1, 3, 0, 2, 4]


def test_samples_fork_from_one_prompt_and_part_when_they_write() -> None:
    scheduler = make_scheduler(100, max_num_seqs=4, token_budget=64)
    scheduler.add(make_sequence(0, 6, 4, num_samples=3))
    plan = step(scheduler)
    assert lengths(plan) == [(0, 6)]
    assert [sampler.sequence.sample for sampler in plan.chunks[0].samplers] == [0, 1, 2]
    assert scheduler.usage().used_blocks == 2
    plan = step(scheduler)
    # The block that prompt and completion share is copied for all but the last who holds it.
    assert len(plan.copies) == 2
    assert scheduler.usage().used_blocks == 4


def test_samples_without_a_lane_are_computed_from_their_prompt() -> None:
    scheduler = make_scheduler(100, max_num_seqs=2, token_budget=64)
    first = make_sequence(0, 6, 2, num_samples=3)
    last = first.forks[1]
    scheduler.add(first)
    plan = step(scheduler)
    assert len(plan.chunks[0].samplers) == 2
    assert last.status is SequenceStatus.WAITING
    step(scheduler)
    plan = step(scheduler)
    assert [(c.sequence, c.length) for c in plan.chunks] == [(last, 6)]
