"""Weights of few bits: numbers near the weights, and the same numbers behind packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import WeightDType, weight_format
from pallas_kernels.weight_format import GROUP

FORMATS: tuple[WeightDType, ...] = ("int8", "int4")
WIDTHS = [1, 2, GROUP // 2, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP, 200]


def kernels(*shape: int) -> np.ndarray:
    """Weights whose columns differ in size and middle, as those of models do."""
    random = np.random.default_rng(sum(shape))
    spread = 10.0 ** random.uniform(-4, 1, shape[-1])
    return ((random.standard_normal(shape) + 0.3) * spread).astype(np.float32)


def scale_of_rows(quantized: weight_format.Quantized, in_width: int) -> np.ndarray:
    scales = np.asarray(quantized.scales, np.float32)
    if quantized.minimums is None:
        return scales
    return np.repeat(scales, GROUP, axis=-2)[..., :in_width, :]


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize("in_width", WIDTHS)
def test_no_weight_moves_by_more_than_half_a_scale(weight_dtype: WeightDType, in_width: int):
    kernel = kernels(3, in_width, 37)
    quantized = weight_format.quantize(kernel, weight_dtype)
    moved = np.abs(weight_format.dequantize(quantized) - kernel)
    bound = scale_of_rows(quantized, in_width) / 2
    # What is read is rounded once more, as are the bound's own numbers.
    assert np.all(moved <= bound * (1 + 1e-4) + np.abs(kernel) * 2e-7)


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_the_error_is_about_what_so_many_levels_leave(weight_dtype: WeightDType) -> None:
    kernel = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    read = weight_format.dequantize(weight_format.quantize(kernel, weight_dtype))
    relative = np.sqrt(np.mean((read - kernel) ** 2))
    # A step over the square root of 12: steps are 2 * 3.1 / 254 and 4.1 / 15.
    expected = {"int8": 0.0070, "int4": 0.079}[weight_dtype]
    assert expected * 0.85 < relative < expected * 1.15


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize("in_width", WIDTHS)
def test_packing_loses_nothing_and_is_as_large_as_it_says(
    weight_dtype: WeightDType, in_width: int
) -> None:
    quantized = weight_format.quantize(kernels(2, in_width, 9), weight_dtype)
    packed = weight_format.pack(quantized)
    again = weight_format.unpack(packed, in_width)
    for part, expected in zip(again, quantized, strict=True):
        np.testing.assert_array_equal(part, expected)
    num_bytes = sum(part.nbytes for part in packed if part is not None)
    assert num_bytes == 2 * weight_format.num_bytes(in_width, 9, weight_dtype)
    zeros = weight_format.zeros((2,), in_width, 9, weight_dtype)
    shapes = [(part.shape, part.dtype) for part in jax.tree.leaves(zeros)]
    assert shapes == [(part.shape, part.dtype) for part in jax.tree.leaves(packed)]


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_a_device_reads_what_the_host_reads(weight_dtype: WeightDType) -> None:
    packed = weight_format.pack(weight_format.quantize(kernels(70, 9), weight_dtype))
    on_host = weight_format.dequantize(weight_format.unpack(packed, 70))
    on_device = jax.jit(lambda packed: weight_format.dequantize(weight_format.unpack(packed, 70)))
    np.testing.assert_array_equal(on_device(jax.tree.map(jnp.asarray, packed)), on_host)


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_quantising_what_was_quantised_changes_little(weight_dtype: WeightDType) -> None:
    kernel = kernels(200, 9)
    once = weight_format.dequantize(weight_format.quantize(kernel, weight_dtype))
    quantized = weight_format.quantize(once, weight_dtype)
    moved = np.abs(weight_format.dequantize(quantized) - once)
    assert np.all(moved <= scale_of_rows(quantized, 200) * 0.07)


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(weight_dtype: WeightDType) -> None:
    kernel = kernels(2 * GROUP, 5)
    kernel[:, 0] = 0
    kernel[3, 1], kernel[4, 2] = np.inf, np.nan
    read = weight_format.dequantize(weight_format.quantize(kernel, weight_dtype))
    assert not np.any(read[:, 0])
    assert not np.any(np.isfinite(read[:GROUP, 1:3]))
    assert np.all(np.isfinite(read[:, 3:]))


def test_blocks_of_32_weights_of_16_levels_come_through_int4() -> None:
    """Those of GGUF's Q4_0 and Q4_1, where scale and minimum are float16."""
    random = np.random.default_rng(0)
    levels = random.integers(0, 16, (4, 32, 9))
    levels[:, 0], levels[:, 1] = 0, 15
    scales = (random.uniform(0.01, 0.1, (4, 1, 9))).astype(np.float16).astype(np.float32)
    kernel = (levels * scales - 7.5 * scales).reshape(128, 9).astype(np.float32)
    quantized = weight_format.quantize(kernel, "int4")
    np.testing.assert_array_equal(quantized.numbers, levels.reshape(128, 9))
    read = weight_format.dequantize(quantized)
    # bfloat16 has 8 bits: the minimum is off by 7.5 / 128 of a step at most, the top by as much.
    assert np.max(np.abs(read - kernel) / np.repeat(scales, 32, axis=1).reshape(128, 9)) < 0.12


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize("in_width", [1, 31, 64, 65, 200])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_linear_map_of_xla_equals_its_reference(
    weight_dtype: WeightDType, in_width: int, dtype
) -> None:
    kernel = np.random.default_rng(in_width).standard_normal((in_width, 37)).astype(np.float32)
    packed = weight_format.pack(weight_format.quantize(kernel, weight_dtype))
    packed = jax.tree.map(jnp.asarray, packed)
    for rows in (1, 3, 64, 65):
        x = np.random.default_rng(rows).standard_normal((rows, in_width))
        x = jnp.asarray(x, dtype)
        got = jax.jit(pallas_kernels.packed_linear)(x, packed)
        assert got.dtype == dtype
        expected = pallas_kernels.packed_linear_ref(x, packed)
        # Weights of int4 and results are rounded to 8 bits.
        tolerance = 1e-4 if dtype == jnp.float32 else 0.02 * in_width**0.5
        np.testing.assert_allclose(
            np.asarray(got, np.float32), expected, atol=tolerance, rtol=tolerance / 2
        )


def test_kernels_for_cpus_have_another_function() -> None:
    packed = weight_format.zeros((), 8, 8, "int8")
    with pytest.raises(ValueError, match="llvm has no linear map by packed weights"):
        pallas_kernels.packed_linear(jnp.ones((1, 8)), packed, implementation="llvm")
