"""What the settings come to for one model on one device: lengths, budget, formats, pool."""

import dataclasses

import jax.numpy as jnp

from jaxpaged.cache.capacity import PoolCapacity, blocks_for, kv_bytes_per_token
from jaxpaged.config import DEFAULT_MAX_MODEL_LEN, DType, EngineConfig, KVDType, WeightDType
from jaxpaged.engine import memory
from jaxpaged.engine.batch import ROW_TILE, BatchShapes, batch_shapes, max_decodes
from jaxpaged.engine.device import Device
from jaxpaged.engine.shortage import shortage, size
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.model import config_stretch
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.llama import Llama
from jaxpaged.scheduler.preemption import SwapSpace
from pallas_kernels import Implementation, kv_format, triton
from pallas_kernels.kv_format import NIBBLES
from pallas_kernels.partials import PARTITION_TOKENS

DEFAULT_TOKEN_BUDGET = 512

_WIDE = ("float32", "bfloat16", "float16")

# Implementations on whose pools and contexts the GPU kernels' limits do not bear.
_WITHOUT_PARTIALS = ("xla", "llvm")

LOGITS_ARRAYS = 10
"""Of float32 logits that the sampler holds at once: 9.3 by the compiler's figures on the CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the settings of an engine come to.

    Attributes:
        max_model_len: Most tokens of a sequence.
        token_budget: Most tokens of a step.
        kv_dtype: How keys and values are stored.
        is_deterministic: A row's bytes must not depend on what else is in its batches.
        capacity: What the pool holds.
        shapes: The sizes of the batches.
    """

    max_model_len: int
    token_budget: int
    kv_dtype: KVDType
    is_deterministic: bool
    capacity: PoolCapacity
    shapes: BatchShapes


def resolve(config: EngineConfig, model: Llama, *, device: Device, available: int) -> Limits:
    """What the settings come to for a model, which may be without weights.

    Args:
        config: The settings.
        model: Its shape, its dtype and who computes attention count.
        device: It runs on.
        available: Bytes free there beside the weights.

    Raises:
        ConfigError: A setting does not suit the model.
        CapacityError: The pool cannot fit.
    """
    length = max_model_len(config, model.config)
    budget = token_budget(config)
    stored = kv_dtype(config, model)
    pool = capacity(config, model, length, kv_dtype=stored, available=available)
    deterministic = is_deterministic(config, device)
    shapes = batch_shapes(
        max_num_seqs=config.max_num_seqs,
        token_budget=budget,
        max_model_len=length,
        capacity=pool,
        is_deterministic=deterministic,
        growth=bucket_growth(device),
    )
    return Limits(
        max_model_len=length,
        token_budget=budget,
        kv_dtype=stored,
        is_deterministic=deterministic,
        capacity=pool,
        shapes=shapes,
    )


def token_budget(config: EngineConfig) -> int:
    """Most tokens of a step.

    Raises:
        ConfigError: A step could not decode every running sequence.
    """
    if config.max_num_batched_tokens is None:
        return max(DEFAULT_TOKEN_BUDGET, config.max_num_seqs)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"engine.max_num_batched_tokens is {config.max_num_batched_tokens}: a step could not "
            f"decode {config.max_num_seqs} sequences; raise it or lower engine.max_num_seqs"
        )
    return config.max_num_batched_tokens


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a sequence.

    Raises:
        ConfigError: More than the model was made for, or less than one block.
    """
    length = config.max_model_len or min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    config_stretch.check_length(length, model)
    if config.block_size > length:
        raise ConfigError(
            f"engine.block_size is {config.block_size}, a sequence has at most {length} tokens; "
            "use a smaller block, 16 is usual"
        )
    return length


def is_deterministic(config: EngineConfig, device: Device) -> bool:
    """Whether a row's bytes must not depend on what else is in its batches."""
    if config.deterministic is None:
        return device.is_cpu
    return config.deterministic


def bucket_growth(device: Device) -> float:
    """How far apart the token buckets of steps are.

    On the CPU a step takes as long as it has tokens, padding included, and a program is compiled in
    a second. A GPU reads the same weights for few tokens as for many, and compiles for long.
    """
    return 1.25 if device.is_cpu else 4.0


def dtype(config: EngineConfig, device: Device) -> DType:
    """Of weights and activations."""
    return config.dtype or ("float32" if device.is_cpu else "bfloat16")


def weight_dtype(config: EngineConfig, model: ModelConfig) -> WeightDType | None:
    """What the weights of linear maps are quantised to.

    Raises:
        ConfigError: The model has maps that cannot be.
    """
    if config.weight_dtype is not None and model.experts is not None:
        raise ConfigError(
            f"engine.weight_dtype is {config.weight_dtype}, and this model has routed experts, "
            "whose maps are not quantised; leave it out"
        )
    return config.weight_dtype


def kv_dtype(config: EngineConfig, model: Llama) -> KVDType:
    """How keys and values are stored: as asked for, or as the weights are.

    Raises:
        ConfigError: int4 packs eight numbers into a word, and the model's heads do not divide so.
    """
    if config.kv_dtype == "int4" and model.config.head_dim % NIBBLES:
        raise ConfigError(
            f"engine.kv_dtype is int4, heads are {model.config.head_dim} wide here; expected "
            f"a multiple of {NIBBLES}; use int8"
        )
    if config.kv_dtype is not None:
        return config.kv_dtype
    return "float32" if model.dtype == jnp.float32 else "bfloat16"


def swap_space(config: EngineConfig, pool: PoolCapacity) -> SwapSpace:
    """The host memory for preempted sequences; without room where nothing is to be swapped."""
    block_bytes = pool.bytes_per_token * pool.block_size
    is_used = config.preemption != "recompute"
    return SwapSpace(
        max_blocks=int(config.swap_space * 2**30) // block_bytes if is_used else 0,
        block_bytes=block_bytes,
        preemption=config.preemption,
    )


def workspace_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Temporary memory of the sampler, with a row of logits for each lane.

    The scores of prompt tokens take less: they are computed for a few rows at a time.
    """
    num_rows = -(-max_num_seqs // ROW_TILE) * ROW_TILE
    return LOGITS_ARRAYS * num_rows * vocab_size * jnp.dtype(jnp.float32).itemsize


def partials_bytes(max_num_seqs: int, max_model_len: int, model: ModelConfig) -> int:
    """Temporary memory of decode attention by kernels: partial results for the longest contexts."""
    partitions = max_decodes(max_num_seqs) * model.num_heads * -(-max_model_len // PARTITION_TOKENS)
    # Beside the weighted sum of values the largest score and the sum of weights.
    return partitions * (model.head_dim + 2) * jnp.dtype(jnp.float32).itemsize


def reserve(
    config: EngineConfig, model: ModelConfig, attention: Implementation, max_model_len: int
) -> tuple[str, int]:
    """What takes the most temporary memory, and how much: the pool leaves room for it.

    Sampling and decode attention are different programs, one behind the other.
    """
    lanes = f"{config.max_num_seqs:,} sequences"
    sampling = workspace_bytes(config.max_num_seqs, model.vocab_size)
    found = {f"sampling for {lanes} from {model.vocab_size:,} tokens": sampling}
    if attention not in _WITHOUT_PARTIALS:
        partials = partials_bytes(config.max_num_seqs, max_model_len, model)
        found[f"decode attention for {lanes} of {max_model_len:,} tokens"] = partials
    return max(found.items(), key=lambda item: item[1])


def capacity(
    config: EngineConfig,
    model: Llama,
    max_model_len: int,
    *,
    kv_dtype: KVDType,
    available: int,
) -> PoolCapacity:
    """The pool for a model.

    Args:
        config: The engine's settings.
        model: Its shape and who computes attention count.
        max_model_len: Most tokens of a sequence.
        kv_dtype: How keys and values are stored.
        available: Bytes free on the device beside the weights.

    Raises:
        CapacityError: It cannot fit into what memory is left by the weights and the sampler.
    """
    shape = model.config
    what, workspace = reserve(config, shape, model.attention, max_model_len)
    if workspace > available:
        raise _no_room(what, workspace, available, config=config, max_model_len=max_model_len)
    resolved = memory.resolve_capacity(
        config,
        available=available - workspace,
        bytes_per_token=token_bytes(shape, kv_dtype),
        max_model_len=max_model_len,
        narrower={"int8": token_bytes(shape, "int8")} if kv_dtype in _WIDE else {},
    )
    if config.reservation == "static":
        _check_static(resolved, max_model_len)
    if model.attention in _WITHOUT_PARTIALS:
        return resolved
    return _addressable(resolved, shape, kv_dtype, is_asked_for=config.num_blocks is not None)


def token_bytes(model: ModelConfig, kv_dtype: KVDType) -> int:
    """Bytes of a token's keys and values over all layers."""
    return kv_bytes_per_token(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_dtype=kv_dtype,
    )


def _no_room(
    what: str, needed: int, available: int, *, config: EngineConfig, max_model_len: int
) -> CapacityError:
    """The error of temporary arrays that cannot fit."""
    changes = [f"free {size(needed - available)} of memory"]
    fitting = config.max_num_seqs * available // needed // ROW_TILE * ROW_TILE
    if fitting:
        changes.insert(0, f"engine.max_num_seqs: at most {fitting}")
    if "attention" in what:
        shorter = max_model_len * available // needed // PARTITION_TOKENS * PARTITION_TOKENS
        if shorter:
            changes.insert(1, f"engine.max_model_len: at most {shorter:,}")
    return shortage(
        what,
        needed=needed,
        available=available,
        where="the weights",
        changes=[*changes, "a device with more memory"],
    )


def _check_static(capacity: PoolCapacity, max_model_len: int) -> None:
    """Refuses a pool that cannot hold what is reserved for one sequence."""
    if not capacity.concurrent(max_model_len):
        needed = blocks_for(max_model_len, capacity.block_size)
        raise shortage(
            f"static reservation for one sequence of {max_model_len:,} tokens",
            needed=needed * capacity.block_size * capacity.bytes_per_token,
            available=capacity.num_bytes,
            where="weights and temporary arrays",
            changes=[
                "engine.reservation: paged",
                f"engine.max_model_len: at most {capacity.num_tokens:,}",
                f"engine.num_blocks: at least {needed:,}",
            ],
        )


def _addressable(
    capacity: PoolCapacity, model: ModelConfig, kv_dtype: KVDType, *, is_asked_for: bool
) -> PoolCapacity:
    """The pool, or a smaller one that the kernels can find every place of.

    Raises:
        CapacityError: The number of blocks was asked for.
    """
    stored, width, _ = kv_format.storage(kv_dtype, model.head_dim, as_bits=False)
    of_block = model.num_layers * capacity.block_size * model.num_kv_heads * width
    if triton.is_addressable(capacity.num_blocks * of_block, stored.itemsize):
        return capacity
    most = triton.MOST_NEAR_NUMBERS // of_block
    least_far = triton.LEAST_FAR_BYTES // (of_block * stored.itemsize) + 1
    if is_asked_for:
        raise shortage(
            f"engine.num_blocks: {capacity.num_blocks:,} blocks of {kv_dtype} keys, which the "
            "kernels address up to 2 GiB and from 4 GiB on",
            needed=capacity.num_blocks * of_block * stored.itemsize,
            available=most * of_block * stored.itemsize,
            changes=[
                f"engine.num_blocks: at most {most:,}",
                f"engine.num_blocks: at least {least_far:,}",
                "engine.attention: xla",
            ],
        )
    return dataclasses.replace(capacity, num_blocks=most)
