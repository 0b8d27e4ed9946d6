"""What to change where a job does not fit, or fits badly: in the order of what it costs, with the
pool after each change."""

import dataclasses
from collections.abc import Iterator

from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.config import DType, EngineConfig, KVDType
from jaxpaged.engine import attention, limits, memory
from jaxpaged.engine.device import Place
from jaxpaged.errors import CapacityError
from jaxpaged.model.config import ModelConfig
from jaxpaged.plan.cards import CARDS

_HIGH_SHARE = 0.9
_NARROW: KVDType = "int8"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change, alone, and what comes of it.

    Attributes:
        text: The key and its new value, or what else.
        num_blocks: Blocks of the pool then; 0 if it still does not fit.
        num_tokens: Token slots then.
        concurrent: Requests of the longest row's length then, at once, as far as there are lanes.
    """

    text: str
    num_blocks: int
    num_tokens: int
    concurrent: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What changes are made to.

    Attributes:
        config: The settings.
        model: The model's shape.
        dtype: Of the weights.
        kv_dtype: How keys and values are stored.
        max_model_len: Most tokens of a sequence.
        longest: Tokens of the longest row with its completion.
        place: The device, and the bytes free on it without the weights.
        weights_bytes: Of the weights.
        narrow_weights_bytes: The same with linear maps in int8; None where they are in few bits
            already, or cannot be.
    """

    config: EngineConfig
    model: ModelConfig
    dtype: DType
    kv_dtype: KVDType
    max_model_len: int
    longest: int
    place: Place
    weights_bytes: int
    narrow_weights_bytes: int | None = None


def changes(situation: Situation) -> tuple[Change, ...]:
    """The changes that apply, the cheapest first."""
    return tuple(_changes(situation))


def _changes(now: Situation) -> Iterator[Change]:
    if now.config.num_blocks is not None:
        # All that follows would change nothing as long as the number is fixed.
        config = dataclasses.replace(now.config, num_blocks=None)
        now = dataclasses.replace(now, config=config)
        yield _change(now, "engine.num_blocks: left out, as in the lines below")
    config, shape = now.config, now.model
    if now.dtype == "float32" and now.weights_bytes > now.place.available_bytes:
        halved = dataclasses.replace(
            now, dtype="bfloat16", kv_dtype="bfloat16", weights_bytes=now.weights_bytes // 2
        )
        # Of weights in few bits little is left to be halved.
        if config.weight_dtype is None:
            yield _change(halved, "engine.dtype: bfloat16")
    length = -(-max(2, now.longest) // config.block_size) * config.block_size
    if length < now.max_model_len:
        yield _change(
            now, f"engine.max_model_len: {length:,}, the longest row's", max_model_len=length
        )
    if config.num_blocks is None and config.memory_utilization < _HIGH_SHARE:
        share = dataclasses.replace(config, memory_utilization=_HIGH_SHARE)
        yield _change(now, f"engine.memory_utilization: {_HIGH_SHARE}", config=share)
    if config.max_num_seqs > 1:
        halved = dataclasses.replace(config, max_num_seqs=-(-config.max_num_seqs // 2))
        # Fewer lanes take less temporary memory, and need fewer blocks.
        yield _change(now, f"engine.max_num_seqs: {halved.max_num_seqs}", config=halved)
    if now.narrow_weights_bytes is not None:
        narrow = dataclasses.replace(now, weights_bytes=now.narrow_weights_bytes)
        yield _change(narrow, "engine.weight_dtype: int8")
    # Kernels that are asked for by name may not have the narrow format.
    is_free = now.config.attention in ("auto", "xla")
    if is_free and now.kv_dtype in ("float32", "bfloat16", "float16"):
        text = f"engine.kv_dtype: {_NARROW}{_without_kernels(now)}"
        yield _change(now, text, kv_dtype=_NARROW)
    if shape.num_kv_heads == shape.num_heads and shape.num_heads % 4 == 0:
        grouped = dataclasses.replace(shape, num_kv_heads=shape.num_heads // 4)
        text = f"a model with {grouped.num_kv_heads} KV heads instead of {shape.num_kv_heads}"
        yield _change(now, f"{text} (GQA)", model=grouped)
    for name, card in CARDS.items():
        if card.available_bytes > now.place.available_bytes:
            place = Place(card.device, card.available_bytes)
            change = _change(now, f"a bigger card: {name}", place=place)
            if change.num_blocks:
                yield change
                return


def _change(
    now: Situation,
    text: str,
    *,
    config: EngineConfig | None = None,
    model: ModelConfig | None = None,
    kv_dtype: KVDType | None = None,
    max_model_len: int | None = None,
    place: Place | None = None,
) -> Change:
    config, model = config or now.config, model or now.model
    place, kv_dtype = place or now.place, kv_dtype or now.kv_dtype
    length = max_model_len or now.max_model_len
    named = dataclasses.replace(config, dtype=now.dtype, kv_dtype=kv_dtype)
    choice = attention.choose(named, model, device=place.device)
    _, workspace = limits.reserve(config, model, choice.implementation, length)
    try:
        pool = memory.resolve_capacity(
            config,
            available=max(0, place.available_bytes - now.weights_bytes - workspace),
            bytes_per_token=limits.token_bytes(model, kv_dtype),
            max_model_len=length,
        )
    except CapacityError:
        pool = PoolCapacity(num_blocks=0, block_size=config.block_size, bytes_per_token=1)
    return Change(
        text=text,
        num_blocks=pool.num_blocks,
        num_tokens=pool.num_tokens,
        concurrent=min(config.max_num_seqs, pool.concurrent(min(now.longest, length))),
    )


def _without_kernels(now: Situation) -> str:
    """A word where the narrow format costs the kernels that compute attention now."""
    config = dataclasses.replace(now.config, dtype=now.dtype)
    before, after = (
        attention.choose(
            dataclasses.replace(config, kv_dtype=kv_dtype), now.model, device=now.place.device
        ).implementation
        for kv_dtype in (now.kv_dtype, _NARROW)
    )
    return "" if before == after else f" (attention by {after} then, not {before})"
