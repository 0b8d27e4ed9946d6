"""Linear maps by the kernels for CPUs: right, and a row's bits its own."""

import concurrent.futures
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.llvm.vectors import LANES, PANEL

# Of sums of 800 products of unit variance; float32 rounds each by 6e-8 of what is there.
TOLERANCE = 2e-4

linear = jax.jit(pallas_kernels.linear, static_argnames="width")
head = jax.jit(pallas_kernels.head)


@functools.cache
def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def int32(value: int):
    return jnp.int32(value)


@pytest.mark.parametrize("width", [1, PANEL - 1, PANEL, 3 * PANEL + 5])
@pytest.mark.parametrize("inner", [1, 48, 800])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_linear_map_equals_its_reference(width: int, inner: int, is_added: bool) -> None:
    rows = 100
    x, kernel = numbers(rows, inner), numbers(2, inner, width)
    added = numbers(rows, width) if is_added else None
    panels = pallas_kernels.pack(kernel)
    for num_rows in (0, 1, 5, 95, 96, 97, rows):
        given = {"num_rows": int32(num_rows), "added": added}
        got = linear(x, panels, layer=int32(1), width=width, **given)
        expected = pallas_kernels.linear_ref(x, kernel, layer=1, num_rows=num_rows, added=added)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)
        assert not np.any(got[num_rows:])


@pytest.mark.parametrize("vocabulary", [1, 96, 250])
def test_the_head_equals_its_reference(vocabulary: int) -> None:
    rows = PANEL + 20
    x, table = numbers(rows, 48), numbers(vocabulary, 48)
    for num_rows in (0, 1, LANES, LANES + 1, PANEL - 1, PANEL, PANEL + 1, rows):
        got = head(x, table, num_rows=int32(num_rows))
        expected = pallas_kernels.head_ref(x, table, num_rows=num_rows)
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)
        assert not np.any(got[num_rows:])


def test_a_row_has_the_same_bits_alone_and_beside_others() -> None:
    x, kernel, table = numbers(130, 800), numbers(1, 800, 200), numbers(300, 800)
    panels = pallas_kernels.pack(kernel)
    together = linear(x, panels, layer=int32(0), num_rows=int32(130), width=200)
    logits = head(x, table, num_rows=int32(130))
    for row in (0, 1, 77, 129):
        for others in (0, 1, 2, 3, 5, 40):
            some = jnp.concatenate([x[row : row + 1], numbers(130, 800)[:others]])
            count = int32(len(some))
            alone = linear(some, panels, layer=int32(0), num_rows=count, width=200)
            np.testing.assert_array_equal(alone[0], together[row])
            np.testing.assert_array_equal(head(some, table, num_rows=count)[0], logits[row])


def test_swapped_layers_are_noticed() -> None:
    x, panels = numbers(3, 48), pallas_kernels.pack(numbers(2, 48, 16))
    first, second = (
        np.asarray(linear(x, panels, layer=int32(layer), num_rows=int32(3), width=16))
        for layer in (0, 1)
    )
    assert np.abs(first - second).max() > 1


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = numbers(20, 48).at[7, 3].set(np.nan)
    got = linear(
        x, pallas_kernels.pack(numbers(1, 48, 70)), layer=int32(0), num_rows=int32(20), width=70
    )
    assert np.isnan(got[7]).all()
    assert np.isfinite(np.delete(np.asarray(got), 7, axis=0)).all()


def test_many_calls_at_once_share_the_threads() -> None:
    """More programs than threads, each waiting for its own items, none for another's."""
    x, kernel = numbers(100, 48), numbers(1, 48, 200)
    panels = pallas_kernels.pack(kernel)

    @jax.jit
    def repeated(x):
        def again(_, y):
            z = linear(y, panels, layer=int32(0), num_rows=int32(100), width=200)
            return y + 0 * z[:, :48]

        return jax.lax.fori_loop(0, 200, again, x)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for got in pool.map(lambda _: np.asarray(repeated(x)), range(64)):
            np.testing.assert_array_equal(got, x)


_ELSEWHERE = """
from llvmlite import binding
known = binding.get_host_cpu_features()
known = type(known)({{name: known[name] and not name.startswith({without!r}) for name in known}})
binding.get_host_cpu_features = lambda: known
import numpy as np, pallas_kernels
from pallas_kernels.llvm.vectors import SHAPE
assert SHAPE == {shape}
rng = np.random.default_rng(0)
x = rng.standard_normal((50, 800)).astype(np.float32)
kernel = rng.standard_normal((1, 800, 100)).astype(np.float32)
y = pallas_kernels.linear(
    x, pallas_kernels.pack(kernel), layer=np.int32(0), num_rows=np.int32(50), width=100
)
np.save({path!r}, np.asarray(y))
"""


def test_other_registers_give_the_same_bits(tmp_path) -> None:
    """What machines without AVX-512 run, on this one."""
    results = []
    for without, shape in (("avx512", (6, 2, 8)), (("avx", "fma"), (6, 4, 4))):
        path = str(tmp_path / f"{len(results)}.npy")
        code = _ELSEWHERE.format(without=without, shape=shape, path=path)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
        results.append(np.load(path))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 800)).astype(np.float32)
    kernel = rng.standard_normal((1, 800, 100)).astype(np.float32)
    here = linear(x, pallas_kernels.pack(kernel), layer=int32(0), num_rows=int32(50), width=100)
    for result in results:
        np.testing.assert_array_equal(result, here)
