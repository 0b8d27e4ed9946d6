"""The KV arithmetic against published numbers."""

from typing import get_args

import pytest

from jaxpaged.cache.capacity import PoolCapacity, blocks_for, kv_bytes_per_token
from jaxpaged.config import KVDType

GIB = 2**30


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "num_tokens", "num_requests", "num_bytes"),
    [
        # 7B in fp16: 32 layers, 32 heads of 128.
        (32, 32, 1, 1, 524_288),
        (32, 32, 1024, 8, 4 * GIB),
        (32, 32, 4096, 8, 16 * GIB),
        (32, 32, 2048, 32, 32 * GIB),
        (32, 16, 4096, 8, 8 * GIB),
        # 13B in fp16: 40 layers of width 5,120. Published rounded, as 3.2 GB and 102 GB.
        (40, 40, 1, 1, 819_200),
        (40, 40, 4096, 1, 3_355_443_200),
        (40, 40, 4096, 32, 32 * 3_355_443_200),
    ],
)
def test_published_sizes_come_out(
    num_layers: int, num_kv_heads: int, num_tokens: int, num_requests: int, num_bytes: int
) -> None:
    per_token = kv_bytes_per_token(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=128, kv_dtype="float16"
    )
    # Whole requests in blocks of one token, so that nothing is rounded.
    pool = PoolCapacity(
        num_blocks=num_tokens * num_requests, block_size=1, bytes_per_token=per_token
    )
    assert pool.num_bytes == num_bytes
    assert pool.concurrent(num_tokens) == num_requests


@pytest.mark.parametrize(
    ("kv_dtype", "vector"),
    [
        ("float32", 256),
        ("bfloat16", 128),
        ("float16", 128),
        ("fp8", 64 + 4),
        ("int8", 64 + 4),
        ("int4", 32 + 4),
    ],
)
def test_every_dtype_costs_its_numbers_and_their_scale(kv_dtype: KVDType, vector: int) -> None:
    per_token = kv_bytes_per_token(num_layers=3, num_kv_heads=5, head_dim=64, kv_dtype=kv_dtype)
    assert per_token == 2 * 3 * 5 * vector


def test_every_dtype_has_a_size() -> None:
    sizes = [
        kv_bytes_per_token(num_layers=1, num_kv_heads=1, head_dim=16, kv_dtype=kv_dtype)
        for kv_dtype in get_args(KVDType)
    ]
    assert sizes == [128, 64, 64, 40, 40, 24]


def test_blocks_round_up() -> None:
    assert [blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_pool_holds_whole_blocks_per_sequence() -> None:
    pool = PoolCapacity(num_blocks=10, block_size=16, bytes_per_token=100)
    assert pool.num_tokens == 160
    assert pool.num_bytes == 16_000
    assert pool.concurrent(33) == 3
