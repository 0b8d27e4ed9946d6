"""What a stored row is, and how far it may be from what was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import KV_DTYPES

from pallas_kernels import KVRows, kv_format

# Half a unit in the last place of the format's mantissa, relative to the number.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8": 2.0**-4}
LARGEST = {"int8": 127, "int4": 7}


def like(kv_dtype, *, head_dim: int = 64, as_bits: bool = True) -> KVRows:
    dtype, width, has_scales = kv_format.storage(kv_dtype, head_dim, as_bits=as_bits)
    scales = jnp.zeros((1, 1, 1, 1)) if has_scales else None
    return KVRows(jnp.zeros((1, 1, 1, 1, width), dtype), scales)


def round_trip(x, kv_dtype, *, as_bits: bool = True):
    form = like(kv_dtype, head_dim=x.shape[-1], as_bits=as_bits)
    values, scales = jax.jit(kv_format.encode)(x, form)
    assert values.dtype == form.values.dtype
    assert values.shape == (*x.shape[:2], form.values.shape[-1])
    assert (scales is None) == (form.scales is None)
    return np.asarray(jax.jit(kv_format.decode)(values, scales))


def rows(seed: int = 0):
    """Rows of very different sizes, some with one number that dwarfs the others."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((200, 3, 64)) * np.exp2(rng.uniform(-12, 6, (200, 3, 1)))
    x[:50, 0, 17] *= 100
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ROUNDING)
def test_floats_are_rounded_to_the_nearest(kv_dtype, dtype: str) -> None:
    x = jnp.asarray(rows(), dtype)
    exact = np.asarray(x, np.float64)
    error = np.abs(round_trip(x, kv_dtype) - exact)
    # Below the smallest normal number the steps are all alike: of float16, and of fp8 in units
    # of the row's scale.
    smallest = {"float16": 2.0**-25, "fp8": np.abs(exact).max(-1, keepdims=True) / 448 * 2.0**-10}
    bound = np.maximum(ROUNDING[kv_dtype] * np.abs(exact), smallest.get(kv_dtype, 0.0))
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_integers_are_half_a_step_off_at_most(kv_dtype, dtype: str) -> None:
    x = jnp.asarray(rows(), dtype)
    exact = np.asarray(x, np.float64)
    step = np.abs(exact).max(-1, keepdims=True) / LARGEST[kv_dtype]
    got = round_trip(x, kv_dtype)
    assert (np.abs(got - exact) <= step / 2 * (1 + 1e-5)).all()
    # The whole range is used on both sides, and symmetrically.
    numbers = np.round(got / step)
    assert set(np.unique(numbers)) == set(range(-LARGEST[kv_dtype], LARGEST[kv_dtype] + 1))
    np.testing.assert_array_equal(round_trip(-x, kv_dtype), -got)


def test_float16_has_no_number_above_its_largest() -> None:
    x = jnp.asarray([[[65_504.0, -65_504.0, 65_536.0, -1e5]]])
    np.testing.assert_array_equal(
        round_trip(x, "float16")[0, 0], [65_504.0, -65_504.0, np.inf, -np.inf]
    )


def test_every_number_of_int4_has_its_own_place() -> None:
    for place in range(24):
        x = np.full((1, 1, 24), -1, np.float32)
        x[0, 0, place] = 7
        np.testing.assert_array_equal(round_trip(jnp.asarray(x), "int4"), x)


@pytest.mark.parametrize("as_bits", [True, False])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_zeros_stay_zeros(kv_dtype, as_bits: bool) -> None:
    x = np.array(rows()[:4])
    x[2] = 0
    got = round_trip(jnp.asarray(x), kv_dtype, as_bits=as_bits)
    assert not np.any(got[2])
    assert np.all(np.any(got[[0, 1, 3]], axis=-1))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_smallest_rows_are_read_back_finite(kv_dtype) -> None:
    x = jnp.full((1, 1, 64), 1e-38, jnp.float32)
    assert np.abs(round_trip(x, kv_dtype)).max() <= 2e-38


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_is_not_finite_stays_so_and_in_its_row(kv_dtype, bad: float) -> None:
    x = np.array(rows()[:4])
    x[1, 2, 5] = bad
    got = round_trip(jnp.asarray(x), kv_dtype)
    assert not np.isfinite(got[1, 2, 5])
    assert np.isfinite(got[[0, 2, 3]]).all()
    assert np.isfinite(got[1, :2]).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_is_stored_the_same_beside_any_other(kv_dtype) -> None:
    x = jnp.asarray(rows())
    values, scales = jax.jit(kv_format.encode)(x, like(kv_dtype))
    alone = jax.jit(kv_format.encode)(x[7:8], like(kv_dtype))
    np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(values[7:8]))
    if scales is not None:
        np.testing.assert_array_equal(np.asarray(alone[1]), np.asarray(scales[7:8]))


def test_each_format_has_a_storage_dtype_of_its_own() -> None:
    for as_bits in (True, False):
        forms = [kv_format.storage(name, 64, as_bits=as_bits) for name in KV_DTYPES]
        assert len({dtype for dtype, _, _ in forms}) == len(KV_DTYPES)
        bits = [8 * dtype.itemsize * width // 64 for dtype, width, _ in forms]
        assert bits == [32, 16, 16, 8, 8, 4]
        assert [scaled for _, _, scaled in forms] == [False, False, False, True, True, True]


def test_int4_refuses_rows_that_fill_no_whole_words() -> None:
    with pytest.raises(ValueError, match="the head width 36 is no multiple of that"):
        kv_format.storage("int4", 36, as_bits=True)
