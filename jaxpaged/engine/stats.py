"""Counters of one engine, for progress bars and reports."""

import dataclasses


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineStats:
    """What the engine did so far; times are wall-clock seconds.

    Attributes:
        device: The device's kind.
        dtype: Of weights, activations and pool.
        implementation: Which attention implementation runs.
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.
        steps: Steps run.
        prefill_tokens: Tokens computed in steps that had a prefill in them, decodes that rode
            along and recomputed tokens included.
        decode_tokens: Tokens computed in steps that only decoded.
        sampled_tokens: Tokens sampled.
        padding_tokens: Token positions computed only to fill a bucket.
        prefill_seconds: Device time of steps that had a prefill in them.
        decode_seconds: Device time of steps that only decoded.
        host_seconds: Time between steps while there is work: scheduling, batch building, text,
            stop strings, and what the caller does before it steps again.
        compile_seconds: Time spent compiling steps.
        executables: Compiled steps.
        preemptions: Times a sequence lost its blocks.
        running: Sequences that hold blocks.
        waiting: Sequences that wait for admission.
        used_blocks: Blocks in use.
        peak_used_blocks: Most blocks in use in any step.
        live_slot_steps: Slots that held a computed token, summed over steps.
        reserved_slot_steps: Slots of blocks in use, summed over steps.
    """

    device: str
    dtype: str
    implementation: str
    num_blocks: int
    block_size: int
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    padding_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    compile_seconds: float = 0.0
    executables: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    peak_used_blocks: int = 0
    live_slot_steps: int = 0
    reserved_slot_steps: int = 0
