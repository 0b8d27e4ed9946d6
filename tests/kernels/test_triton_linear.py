"""The linear map of Triton, in Pallas's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import WeightDType, triton_linear, weight_format
from pallas_kernels.weight_format import GROUP, PackedMatrix

FORMATS: tuple[WeightDType, ...] = ("int8", "int4")


def packed_kernel(in_width: int, width: int, weight_dtype: WeightDType) -> PackedMatrix:
    random = np.random.default_rng(in_width + width)
    kernel = random.standard_normal((in_width, width)).astype(np.float32)
    packed = weight_format.pack(weight_format.quantize(kernel, weight_dtype))
    return jax.tree.map(jnp.asarray, packed)


def rows_of(count: int, in_width: int, dtype) -> jax.Array:
    return jnp.asarray(np.random.default_rng(count).standard_normal((count, in_width)), dtype)


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize(
    ("in_width", "rows", "width"),
    [(1, 1, 33), (GROUP - 1, 3, 64), (2 * GROUP, 64, 31), (2 * GROUP + 1, 65, 65)],
)
def test_it_equals_its_reference(
    weight_dtype: WeightDType, in_width: int, rows: int, width: int
) -> None:
    packed = packed_kernel(in_width, width, weight_dtype)
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.01)):
        x = rows_of(rows, in_width, dtype)
        got = pallas_kernels.packed_linear(x, packed, implementation="triton_interpreted")
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float32),
            pallas_kernels.packed_linear_ref(x, packed),
            atol=tolerance * in_width**0.5,
            rtol=tolerance,
        )


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_nothing_outside_the_matrix_is_read(weight_dtype: WeightDType) -> None:
    """What a tile holds beyond the edges of rows and matrix counts for nothing."""
    in_width, width = GROUP + 1, 33
    packed = packed_kernel(in_width, width, weight_dtype)
    x = rows_of(5, in_width, jnp.float32)
    got = pallas_kernels.packed_linear(x, packed, implementation="triton_interpreted")
    beside = jnp.pad(x, ((0, 14), (0, 0)), constant_values=np.nan)
    with_others = pallas_kernels.packed_linear(beside, packed, implementation="mosaic_interpreted")
    np.testing.assert_allclose(with_others[:5], got, atol=1e-5)
    assert np.isnan(with_others[5:]).all()


def test_few_rows_have_narrow_tiles() -> None:
    assert triton_linear.tile(1, exact=False) == (16, 32, 64)
    assert triton_linear.tile(512, exact=False) == (64, 64, 64)
