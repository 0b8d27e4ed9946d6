"""The arithmetic of the KV cache: bytes, blocks and tokens. Pure Python.

A token has one key and one value per layer and key/value head, each of them `head_dim` numbers and,
in the formats of 8 and 4 bits, one float32 scale.
"""

import dataclasses

from jaxpaged.config import KVDType

_NUMBER_BITS: dict[KVDType, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
}
_SCALED: tuple[KVDType, ...] = ("fp8", "int8", "int4")
_SCALE_BYTES = 4
# Numbers of 4 bits are stored eight to a word.
_INT4_WORD_BYTES = 4


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, kv_dtype: KVDType
) -> int:
    """Bytes of the keys and values of one token over all layers, their scales included."""
    vector = -(-head_dim * _NUMBER_BITS[kv_dtype] // 8)
    if kv_dtype == "int4":
        vector = -(-vector // _INT4_WORD_BYTES) * _INT4_WORD_BYTES
    if kv_dtype in _SCALED:
        vector += _SCALE_BYTES
    return 2 * num_layers * num_kv_heads * vector


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolCapacity:
    """What a pool holds.

    Attributes:
        num_blocks: Blocks of the pool.
        block_size: Tokens per block.
        bytes_per_token: Bytes of one token's keys and values over all layers.
    """

    num_blocks: int
    block_size: int
    bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        """Token slots of the pool."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_tokens * self.bytes_per_token

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of the blocks of one sequence of `num_tokens` tokens."""
        return blocks_for(num_tokens, self.block_size) * self.block_size * self.bytes_per_token

    def concurrent(self, num_tokens: int) -> int:
        """How many sequences of `num_tokens` tokens fit at the same time."""
        return self.num_blocks // blocks_for(num_tokens, self.block_size)


def longer_sequences(before: int, after: int, *, pool: PoolCapacity, is_sized: bool = True) -> str:
    """What it costs that sequences grow longer than a model was made for.

    Args:
        before: Tokens of the longest sequence that the model was made for.
        after: Tokens of the longest sequence now.
        pool: What holds their keys and values.
        is_sized: How many blocks the pool has is known.
    """
    blocks = [blocks_for(tokens, pool.block_size) for tokens in (before, after)]
    sizes = [f"{pool.sequence_bytes(tokens) / 2**20:,.1f} MiB" for tokens in (before, after)]
    text = (
        f"engine.rope: sequences of {after:,} tokens in a model made for {before:,}: one takes up "
        f"to {blocks[1]:,} blocks ({sizes[1]}) instead of {blocks[0]:,} ({sizes[0]})"
    )
    if is_sized:
        fit = [pool.concurrent(tokens) for tokens in (before, after)]
        text += f"; {fit[1]:,} of them fit the pool at once instead of {fit[0]:,}"
    return f"{text}. What the model says there was not trained: look at it"
