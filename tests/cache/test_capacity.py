"""The KV arithmetic against published numbers."""

from jaxpaged.cache.capacity import PoolCapacity, blocks_for, kv_bytes_per_token


def test_seven_billion_model_in_fp16_costs_half_a_megabyte_a_token() -> None:
    per_token = kv_bytes_per_token(num_layers=32, num_kv_heads=32, head_dim=128, element_bytes=2)
    assert per_token == 524_288
    assert 8 * 4096 * per_token == 16 * 2**30


def test_blocks_round_up() -> None:
    assert [blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_pool_holds_whole_blocks_per_sequence() -> None:
    pool = PoolCapacity(num_blocks=10, block_size=16, bytes_per_token=100)
    assert pool.num_tokens == 160
    assert pool.num_bytes == 16_000
    assert pool.concurrent(33) == 3
