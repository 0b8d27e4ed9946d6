"""The engine's settings: one frozen value, complete at construction.

Knows nothing of the model or of the device; what depends on them is resolved by the engine.
"""

import dataclasses
from typing import Literal, get_args

from jaxpaged.errors import ConfigError

DType = Literal["float32", "bfloat16"]

KVDType = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
"""How keys and values are stored; fp8 (e4m3), int8 and int4 have a scale per token and head."""

Attention = Literal["auto", "xla", "llvm", "triton", "mosaic"]
"""Who computes attention: plain XLA; the project's own kernels for CPUs, which compute linear maps,
too; or those for NVIDIA GPUs, by Mosaic GPU decode attention on Hopper only, beside the Triton
kernel for prefill."""

Preemption = Literal["auto", "recompute", "swap"]
"""What becomes of a preempted sequence's keys and values."""

Reservation = Literal["paged", "static"]
"""When a sequence gets its blocks: as it grows, or all that `max_model_len` tokens need at once."""

_KV_DTYPES = ", ".join(get_args(KVDType))

DEFAULT_MAX_MODEL_LEN = 4096
"""Of sequences, where neither the job nor the model asks for less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine.

    Attributes:
        dtype: Of weights and activations; None takes float32 on CPU and bfloat16 elsewhere.
        kv_dtype: Of the pool; None takes that of the weights.
        max_model_len: Most tokens of a sequence, prompt and completion together; None takes the
            smaller of the model's own limit and `DEFAULT_MAX_MODEL_LEN`.
        max_num_seqs: Most sequences running at once: the lanes of a decode batch.
        max_num_batched_tokens: Token budget of a step; None takes 512 (at least `max_num_seqs`).
        block_size: Tokens per block of the KV pool.
        num_blocks: Blocks of the pool; None derives them from `memory_utilization`.
        memory_utilization: Share of the memory free after loading the weights that the pool may
            take (device memory, or on CPU the memory available to this process).
        watermark: Share of the pool kept free at admission, so that running sequences do not
            preempt each other at once.
        prefix_cache: Keep the blocks of computed prompts, and start prompts that begin alike from
            them.
        reservation: "static" gives a sequence the blocks of `max_model_len` tokens when it is
            admitted, and shares none, as engines without paging do: to compare with.
        preemption: "recompute" drops a preempted sequence's keys and values, "swap" keeps them in
            host memory, "auto" does what is likely to be faster.
        swap_space: Most host memory for swapped sequences, in GiB.
        attention: "llvm" takes the kernels for CPUs (float32 only; linear maps too), "triton" those
            for NVIDIA GPUs (on a CPU their interpreter, which is for tests), "mosaic" the one for
            Hopper where there is one, "xla" does without, "auto" takes those for the device if they
            serve the model, on a GPU those of Triton.
        deterministic: The same row gives the same bytes whatever else is in its batches; None is
            true on CPU and false elsewhere.
        compilation_cache: Keep compiled programs in the user's cache folder, unless JAX was given
            a folder for them.
        seed: The job's seed.

    Raises:
        ConfigError: A value is out of its range; the message names the key.
    """

    dtype: DType | None = None
    kv_dtype: KVDType | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float = 0.5
    watermark: float = 0.01
    prefix_cache: bool = True
    reservation: Reservation = "paged"
    preemption: Preemption = "auto"
    swap_space: float = 2.0
    attention: Attention = "auto"
    deterministic: bool | None = None
    compilation_cache: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        limits = (
            ("dtype", self.dtype in (None, "float32", "bfloat16"), "float32 or bfloat16"),
            ("kv_dtype", self.kv_dtype in (None, *get_args(KVDType)), f"one of {_KV_DTYPES}"),
            ("max_model_len", _at_least(self.max_model_len, 2), "at least 2"),
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            ("max_num_batched_tokens", _at_least(self.max_num_batched_tokens, 1), "at least 1"),
            ("block_size", self.block_size >= 1, "at least 1"),
            ("num_blocks", _at_least(self.num_blocks, 1), "at least 1"),
            ("memory_utilization", 0.0 < self.memory_utilization <= 1.0, "above 0, at most 1"),
            ("watermark", 0.0 <= self.watermark < 1.0, "from 0 and below 1"),
            ("reservation", self.reservation in get_args(Reservation), "paged or static"),
            ("preemption", self.preemption in get_args(Preemption), "auto, recompute or swap"),
            ("swap_space", 0.0 <= self.swap_space <= 1e6, "from 0 to 1,000,000 GiB"),
            (
                "attention",
                self.attention in get_args(Attention),
                "auto, xla, llvm, triton or mosaic",
            ),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        )
        for name, is_good, rule in limits:
            if not is_good:
                raise ConfigError(f"engine.{name} must be {rule}, got {getattr(self, name)!r}")


def _at_least(value: int | None, least: int) -> bool:
    return value is None or value >= least
