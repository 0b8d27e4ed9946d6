"""Linear maps by weights of few bits on CPUs: the bits of the dequantised weights' maps."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import WeightDType, weight_format
from pallas_kernels.llvm.vectors import PANEL
from pallas_kernels.weight_format import GROUP

FORMATS: tuple[WeightDType, ...] = ("int8", "int4")

linear = jax.jit(pallas_kernels.linear, static_argnames="width")
quantized_linear = jax.jit(pallas_kernels.quantized_linear, static_argnames="width")


@functools.cache
def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def both(kernel: np.ndarray, weight_dtype: WeightDType):
    """The panels, and those of the weights that they are read as."""
    quantized = weight_format.quantize(kernel, weight_dtype)
    panels = pallas_kernels.pack_quantized(quantized)
    read = pallas_kernels.pack(weight_format.dequantize(quantized))
    return jax.tree.map(jnp.asarray, panels), jnp.asarray(read)


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize("width", [1, PANEL - 1, PANEL, 3 * PANEL + 5])
@pytest.mark.parametrize("inner", [1, GROUP - 1, GROUP, GROUP + 1, 768, 800])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_map_has_the_bits_of_the_dequantised_one(
    weight_dtype: WeightDType, width: int, inner: int, is_added: bool
) -> None:
    rows = 130
    x = jnp.asarray(numbers(rows, inner))
    panels, read = both(numbers(2, inner, width), weight_dtype)
    added = jnp.asarray(numbers(rows, width)) if is_added else None
    # Few rows are computed in another way than many.
    for num_rows in (0, 1, 2, 3, 4, 7, 8, 9, 64, 65, 96, 97, rows):
        given = {"layer": jnp.int32(1), "num_rows": jnp.int32(num_rows), "width": width}
        got = quantized_linear(x, panels, added=added, **given)
        np.testing.assert_array_equal(got, linear(x, read, added=added, **given))
        assert not np.any(got[num_rows:])


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_a_map_equals_its_reference(weight_dtype: WeightDType) -> None:
    x, kernel = jnp.asarray(numbers(9, 100)), numbers(100, 70)
    quantized = weight_format.quantize(kernel, weight_dtype)
    panels = pallas_kernels.pack_quantized(weight_format.quantize(kernel[None], weight_dtype))
    got = quantized_linear(
        x,
        jax.tree.map(jnp.asarray, panels),
        layer=jnp.int32(0),
        num_rows=jnp.int32(9),
        width=70,
    )
    packed = jax.tree.map(jnp.asarray, weight_format.pack(quantized))
    np.testing.assert_allclose(got, pallas_kernels.packed_linear_ref(x, packed), atol=1e-4)


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_a_row_has_the_same_bits_alone_and_beside_others(weight_dtype: WeightDType) -> None:
    x = numbers(130, 800)
    panels, _ = both(numbers(1, 800, 200), weight_dtype)
    given = {"layer": jnp.int32(0), "width": 200}
    together = quantized_linear(x, panels, num_rows=jnp.int32(130), **given)
    for row in (0, 1, 77, 129):
        for others in (0, 1, 2, 3, 5, 7, 8, 40):
            some = jnp.concatenate([x[row : row + 1], x[:others]])
            alone = quantized_linear(some, panels, num_rows=jnp.int32(len(some)), **given)
            np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize("shape", [(3, 45, 7), (2, GROUP, PANEL), (1, 3 * GROUP + 1, PANEL + 1)])
def test_panels_of_zeros_have_the_shapes_of_others(weight_dtype: WeightDType, shape) -> None:
    panels, _ = both(numbers(*shape), weight_dtype)
    zeros = pallas_kernels.zero_panels(shape[:1], *shape[1:], weight_dtype)
    assert [(part.shape, part.dtype) for part in jax.tree.leaves(zeros)] == [
        (part.shape, part.dtype) for part in jax.tree.leaves(panels)
    ]


_ELSEWHERE = """
from llvmlite import binding
known = binding.get_host_cpu_features()
known = type(known)({{name: known[name] and not name.startswith({without!r}) for name in known}})
binding.get_host_cpu_features = lambda: known
import numpy as np, jax, pallas_kernels
from pallas_kernels import weight_format
rng = np.random.default_rng(0)
x = rng.standard_normal((50, 200)).astype(np.float32)
kernel = rng.standard_normal((1, 200, 100)).astype(np.float32)
found = {{}}
for weight_dtype in ("int8", "int4"):
    quantized = weight_format.quantize(kernel, weight_dtype)
    for num_rows in (1, 7, 50):
        found[f"{{weight_dtype}} {{num_rows}}"] = pallas_kernels.quantized_linear(
            x,
            jax.tree.map(jax.numpy.asarray, pallas_kernels.pack_quantized(quantized)),
            layer=np.int32(0),
            num_rows=np.int32(num_rows),
            width=100,
        )
np.savez({path!r}, **found)
"""


def test_other_registers_give_the_same_bits(tmp_path) -> None:
    """What machines without AVX-512 run, on this one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 200)).astype(np.float32)
    kernel = rng.standard_normal((1, 200, 100)).astype(np.float32)
    for without in ("avx512", ("avx", "fma")):
        path = tmp_path / "found.npz"
        code = _ELSEWHERE.format(without=without, path=str(path))
        subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
        found = np.load(path)
        for weight_dtype in FORMATS:
            panels, _ = both(kernel, weight_dtype)
            for num_rows in (1, 7, 50):
                here = quantized_linear(
                    x, panels, layer=jnp.int32(0), num_rows=jnp.int32(num_rows), width=100
                )
                np.testing.assert_array_equal(found[f"{weight_dtype} {num_rows}"], here)
