"""The arithmetic of the KV cache: bytes, blocks and tokens. Pure Python.

A token costs `2 * layers * key/value heads * head width * bytes per element`: one key and one
value per layer and head.
"""

import dataclasses


def kv_bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> int:
    """Bytes of the keys and values of one token over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * element_bytes


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

    def concurrent(self, num_tokens: int) -> int:
        """How many sequences of `num_tokens` tokens fit at the same time."""
        return self.num_blocks // blocks_for(num_tokens, self.block_size)
