"""The KV arithmetic against published numbers."""

from typing import get_args

import pytest

from jaxpaged.cache.capacity import PoolCapacity, blocks_for, kv_bytes_per_token
from jaxpaged.config import KVDType


def test_seven_billion_model_in_fp16_costs_half_a_megabyte_a_token() -> None:
    per_token = kv_bytes_per_token(num_layers=32, num_kv_heads=32, head_dim=128, kv_dtype="float16")
    assert per_token == 524_288
    assert 8 * 4096 * per_token == 16 * 2**30


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
