"""Counters of one engine, for progress bars and reports."""

import dataclasses

from jaxpaged.histogram import Histogram

_STEP_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
)


def _step_times() -> Histogram:
    return Histogram(bounds=list(_STEP_BOUNDS))


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineStats:
    """What the engine did so far; times are wall-clock seconds.

    Attributes:
        device: The device's kind.
        dtype: Of weights and activations.
        weight_dtype: What the weights of linear maps are stored as.
        kv_dtype: Of the pool.
        is_deterministic: A row's bytes do not depend on what else is in its batches.
        implementation: Which attention implementation runs.
        implementation_reason: Why that one.
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.
        max_model_len: Most tokens of a sequence.
        model_max_len: What the model's own rotation is made for; less than the former only where
            `engine.rope` stretches it.
        max_num_seqs: Most sequences that run at once.
        token_budget: Most tokens of a step.
        steps: Steps run.
        prefill_tokens: Tokens computed in steps that had a prefill in them, decodes that rode
            along and recomputed tokens included.
        decode_tokens: Tokens computed in steps that only decoded.
        sampled_tokens: Tokens sampled.
        padding_tokens: Token positions computed only to fill a bucket.
        prefill_seconds: Time of steps that had a prefill in them, from the end of the step before
            to their own.
        decode_seconds: The same of steps that only decoded.
        prefill_times: The steps of `prefill_seconds` by their seconds.
        decode_times: The steps of `decode_seconds` by their seconds.
        host_seconds: Time the host worked while there was work for the device: scheduling, batch
            building, text, stop strings, and what the caller does before it steps again.
        starved_steps: Steps before which the device had run out of work.
        compile_seconds: Time spent compiling steps.
        executables: Compiled steps.
        recomputes: Preemptions that dropped a sequence's keys and values.
        swaps: Preemptions that saved them in host memory.
        prompt_tokens: Tokens of the prompts that were computed to their end.
        cached_tokens: Those of them that came from the prefix cache.
        evictions: Blocks that the prefix cache gave up for others.
        copied_blocks: Shared blocks that were copied because a sequence wrote to them.
        running: Sequences that hold blocks.
        waiting: Sequences that wait for admission, swapped ones included.
        swapped: Those of them whose keys and values are in host memory.
        used_blocks: Blocks in use.
        peak_used_blocks: Most blocks in use in any step.
        live_slot_steps: Computed tokens of running sequences, summed over steps; one whose slot
            several share counts for each.
        reserved_slot_steps: Slots of blocks in use, summed over steps.
    """

    device: str
    dtype: str
    weight_dtype: str
    kv_dtype: str
    is_deterministic: bool
    implementation: str
    implementation_reason: str
    num_blocks: int
    block_size: int
    max_model_len: int
    model_max_len: int
    max_num_seqs: int
    token_budget: int
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    padding_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_times: Histogram = dataclasses.field(default_factory=_step_times)
    decode_times: Histogram = dataclasses.field(default_factory=_step_times)
    host_seconds: float = 0.0
    compile_seconds: float = 0.0
    executables: int = 0
    starved_steps: int = 0
    recomputes: int = 0
    swaps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    copied_blocks: int = 0
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    used_blocks: int = 0
    peak_used_blocks: int = 0
    live_slot_steps: int = 0
    reserved_slot_steps: int = 0
