"""The sizes of steps: buckets fitted to the prompts of a job."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.engine.batch import BatchShapes, batch_shapes, fit
from pallas_kernels.xla import TILE_QUERIES


def shapes_of(max_num_seqs: int = 64, token_budget: int = 512, growth: float = 4.0) -> BatchShapes:
    return batch_shapes(
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=4096,
        capacity=PoolCapacity(num_blocks=1000, block_size=16, bytes_per_token=1),
        is_deterministic=True,
        growth=growth,
    )


def prompts_of(lens: list[int], begins_with: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Prompts of these lengths that differ from their first token on, behind a common beginning."""
    return [(*begins_with, *[number] * length) for number, length in enumerate(lens)]


@pytest.mark.parametrize(
    ("lens", "budget", "expected"),
    [
        ([20] * 9, 512, (128, 512)),
        ([20] * 5 + [100] * 4, 512, (128, 192, 512)),
        ([3000] * 9, 512, (512,)),
        ([20] * 9, 8192, (128, 512, 2048, 8192)),
        ([], 512, (128, 256, 512)),
    ],
)
def test_buckets_hold_the_lanes_and_a_usual_prompt(lens, budget, expected) -> None:
    fitted = fit(shapes_of(token_budget=budget), prompts_of(lens), is_shared=True)
    assert fitted.token_buckets == expected


def test_a_shared_beginning_counts_once() -> None:
    prompts = prompts_of([20] * 9, begins_with=tuple(range(1000, 1512)))
    assert fit(shapes_of(), prompts, is_shared=True).token_buckets == (128, 512)
    assert fit(shapes_of(), prompts, is_shared=False).token_buckets == (512,)


def test_a_prompt_that_is_known_whole_still_has_a_token_to_compute() -> None:
    fitted = fit(shapes_of(), [(7,) * 32] * 9, is_shared=True)
    assert fitted.token_buckets == (128, 512)


def test_buckets_of_a_cpu_are_a_tile_or_a_quarter_apart() -> None:
    fitted = fit(shapes_of(token_budget=1024, growth=1.25), prompts_of([20] * 9), is_shared=True)
    assert fitted.token_buckets == (128, 192, 256, 320, 384, 448, 512, 640, 768, 960, 1024)


@given(
    growth=st.floats(1.1, 5.0),
    lens=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    max_num_seqs=st.integers(1, 200),
    budget=st.integers(200, 9000),
    is_shared=st.booleans(),
)
def test_fitted_buckets_keep_the_largest_step_and_bound_the_padding(
    growth, lens, max_num_seqs, budget, is_shared
) -> None:
    shapes = shapes_of(max_num_seqs, budget, growth)
    fitted = fit(shapes, prompts_of(lens), is_shared=is_shared).token_buckets
    assert fitted[-1] == shapes.token_buckets[-1]
    assert fitted[0] >= min(fitted[-1], shapes.decode_buckets[-1])
    steps = itertools.pairwise(fitted)
    assert all(one < two <= max(growth * one, one + TILE_QUERIES) for one, two in steps)
    assert all(size % TILE_QUERIES == 0 for size in fitted[:-1])
