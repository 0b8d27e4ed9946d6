"""The engine's settings: one frozen value, complete at construction.

Knows nothing of the model or of the device; what depends on them is resolved by the engine.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

from jaxpaged.errors import ConfigError
from jaxpaged.interval import Interval

DType = Literal["float32", "bfloat16"]

KVDType = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
"""How keys and values are stored; fp8 (e4m3), int8 and int4 have a scale per token and head."""

WeightDType = Literal["int8", "int4"]
"""How the weights of linear maps may be quantised: int8 has a scale for each output, int4 a scale
and a minimum for every 32 inputs of each."""

Attention = Literal["auto", "xla", "llvm", "triton", "mosaic"]
"""Who computes attention: plain XLA; the project's own kernels for CPUs, which compute linear maps,
too; or those for NVIDIA GPUs, by Mosaic GPU decode attention on Hopper only, beside the Triton
kernel for prefill."""

Preemption = Literal["auto", "recompute", "swap"]
"""What becomes of a preempted sequence's keys and values."""

Reservation = Literal["paged", "static"]
"""When a sequence gets its blocks: as it grows, or all that `max_model_len` tokens need at once."""

DEFAULT_MAX_MODEL_LEN = 4096
"""Of sequences, where neither the job nor the model asks for less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of one engine.

    Attributes:
        dtype: Of weights and activations; None takes float32 on CPU and bfloat16 elsewhere.
        weight_dtype: The weights of all linear maps in layers are quantised to it when they are
            loaded, and stay so in memory; embedding, head, norms and biases are left as they are.
            None quantises nothing.
        kv_dtype: Of the pool; None takes that of the weights.
        max_model_len: Most tokens of a sequence, prompt and completion together; None takes the
            model's own limit, or 4096 if that is less.
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
        rope: Another rotation than the model's own, for longer sequences: the keys of
            `rope_parameters` in a config.json; None leaves it alone.
        compilation_cache: Keep compiled programs in the user's cache folder, unless JAX was given
            a folder for them.
        seed: The job's seed.

    Raises:
        ConfigError: A value is out of its range; the message names the key.
    """

    dtype: DType | None = None
    weight_dtype: WeightDType | None = None
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
    rope: Mapping[str, object] | None = None
    compilation_cache: bool = True
    seed: int = 0

    RANGES: ClassVar[Mapping[str, Interval]] = {
        "max_model_len": Interval(least=2, has_none=True),
        "max_num_seqs": Interval(least=1),
        "max_num_batched_tokens": Interval(least=1, has_none=True),
        "block_size": Interval(least=1),
        "num_blocks": Interval(least=1, has_none=True),
        "memory_utilization": Interval(above=0, most=1),
        "watermark": Interval(least=0, below=1),
        "swap_space": Interval(least=0, most=1_000_000, words="from 0 to 1,000,000 GiB"),
        "seed": Interval(least=0, most=2**63 - 1, words="from 0 to 2**63 - 1"),
    }
    """What a number may be, by name."""

    def __post_init__(self) -> None:
        for name, interval in self.RANGES.items():
            if (value := getattr(self, name)) not in interval:
                raise ConfigError(f"engine.{name} must be {interval}, got {value!r}")
        choices = (
            ("dtype", (None, *get_args(DType))),
            ("weight_dtype", (None, *get_args(WeightDType))),
            ("kv_dtype", (None, *get_args(KVDType))),
            ("reservation", get_args(Reservation)),
            ("preemption", get_args(Preemption)),
            ("attention", get_args(Attention)),
        )
        for name, known in choices:
            if (value := getattr(self, name)) not in known:
                names = ", ".join(filter(None, known))
                raise ConfigError(f"engine.{name} must be one of {names}, got {value!r}")
