"""The Hopper kernel in Pallas's GPU interpreter, which knows barriers and notices races.

It does not notice a tensor core that reads a tile too early: only what registers read, and what
is copied over a tile that is not yet done with.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_shapes import HOPPER_SHAPES, hopper_shape, pools, queries

from pallas_kernels import NO_WINDOW, KVRows, paged_attention_ref

LAYER = 1
SCALE = 0.3

# Half a unit in the last of the result's 8 bits, and the rounding of the weights.
RTOL, ATOL = 2**-8, 4e-3


def int32(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def dense_attention(q, k: KVRows, v: KVRows, tables, lens, soft_cap: float):
    """Each lane's query over its lane, in float64 NumPy; scores are capped."""
    results = []
    for lane, length in enumerate(lens):
        keys, values = (
            np.float64(rows.values[LAYER][tables[lane]].astype(jnp.float32)) for rows in (k, v)
        )
        keys, values = (x.reshape(-1, *x.shape[2:])[:length] for x in (keys, values))
        grouped = np.float64(q[lane].astype(jnp.float32)).reshape(keys.shape[1], -1, q.shape[2])
        scores = soft_cap * np.tanh(np.einsum("kgd,ckd->kgc", grouped, keys) * SCALE / soft_cap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        results.append(np.einsum("kgc,ckd->kgd", weights, values).reshape(q.shape[1:]))
    return np.stack(results)


if jax.__version_info__ < (0, 12):

    def test_an_older_jax_is_told_what_is_missing() -> None:
        with pytest.raises(ImportError, match=r"need JAX 0\.12 or newer and this is 0\.1[01]"):
            __import__("pallas_kernels.mosaic")

else:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import mosaic

    RACES = plgpu.InterpretGPUParams(detect_races=True)

    def decode(q, k: KVRows, v: KVRows, tables, lanes, lens, **options) -> np.ndarray:
        """Decode attention of all `lens`; the rest of `q` is padding."""
        unused = q.shape[0] - len(lens)
        options = {"window": NO_WINDOW, "interpret": RACES} | options
        result = mosaic.decode_attention(
            q,
            k,
            v,
            layer=jnp.int32(LAYER),
            block_tables=tables,
            token_lanes=int32([*lanes, *[0] * unused]),
            context_lens=int32([*lens, *[1] * unused]),
            num_queries=jnp.int32(len(lens)),
            scale=SCALE,
            **options | {"window": jnp.int32(options["window"])},
        )
        return np.float32(result)

    @pytest.mark.parametrize("name", HOPPER_SHAPES)
    def test_decode_equals_reference(name: str) -> None:
        """Everything that no query sees is NaN, and nothing is read before it has arrived."""
        shape, window = HOPPER_SHAPES[name]
        lens = shape.context_lens
        used = len(lens)
        first_live = tuple(max(0, n - window) for n in lens)
        k, v, tables = pools(shape, "bfloat16", first_live=first_live, as_bits=False)
        q = queries(shape, used + 1)
        got = decode(q, k, v, tables, range(used), lens, window=window)
        expected = paged_attention_ref(
            q[:used].astype(jnp.float32),
            k,
            v,
            layer=LAYER,
            block_tables=tables,
            token_lanes=jnp.arange(used),
            context_lens=int32(lens),
            window=window,
            scale=SCALE,
        )
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(got[:used], expected, rtol=RTOL, atol=ATOL)
        assert not got[used:].any()

    def test_soft_cap_bounds_scores() -> None:
        shape = hopper_shape((4, 2), 64, 16, 90)
        k, v, tables = pools(shape, "bfloat16", as_bits=False)
        q = queries(shape, 1)
        got = decode(q, k, v, tables, [0], shape.context_lens, soft_cap=1.5)
        expected = dense_attention(q, k, v, tables, shape.context_lens, 1.5)
        np.testing.assert_allclose(got, expected, rtol=RTOL, atol=ATOL)

    def test_bits_depend_neither_on_the_batch_nor_on_the_block_size() -> None:
        shape = hopper_shape((2, 1), 64, 16, 320)
        rng = np.random.default_rng(2)
        k, v = (
            KVRows(jnp.asarray(rng.standard_normal((2, 20, 16, 1, 64)), jnp.bfloat16), None)
            for _ in range(2)
        )
        q = queries(shape, 3)
        together = decode(q, k, v, int32([range(20)]), [0, 0, 0], [17, 300, 320])
        for block_size in (16, 32, 64):
            larger = [
                rows._replace(values=rows.values.reshape(2, -1, block_size, 1, 64))
                for rows in (k, v)
            ]
            blocks = larger[0].values.shape[1]
            alone = decode(q[1:2], *larger, int32([range(blocks)]), [0], [300])
            np.testing.assert_array_equal(alone[0], together[1])

    @pytest.mark.parametrize("dropped", [1, 2], ids=["keys", "values"])
    def test_a_missing_wait_is_noticed(dropped: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keys and values of four tiles go through a ring of two."""
        shape = hopper_shape((2, 1), 128, 64, 250)
        k, v, tables = pools(shape, "bfloat16", as_bits=False)
        wait, waits = plgpu.barrier_wait, []

        # The kernel's text waits for the queries, then in its loop for keys and for values.
        def wait_unless_dropped(barrier) -> None:
            waits.append(barrier)
            if len(waits) - 1 != dropped:
                wait(barrier)

        monkeypatch.setattr(plgpu, "barrier_wait", wait_unless_dropped)
        try:
            with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
                decode(queries(shape, 1), k, v, tables, [0], shape.context_lens)
        finally:
            # The interpreter is not to be used again after an error without it.
            interpret_pallas_call.reset_gpu_interpret_mode_state()
        assert len(waits) == 3

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dtype": "float32"}, r"bfloat16 only, not \('float32', 'bfloat16', 'bfloat16'\)"),
            ({"head_dim": 96}, r"head widths \(64, 128\), not 96"),
            ({"block_size": 8}, r"block sizes \(16, 32, 64\), not 8"),
            ({"num_heads": 33}, r"up to 32 query heads .* 33 to 1"),
        ],
    )
    def test_what_is_not_served_is_refused(changes, message: str) -> None:
        shape = dataclasses.replace(hopper_shape((2, 1), 64, 16, 5), **changes)
        k, v, tables = pools(shape, "bfloat16", as_bits=False)
        with pytest.raises(ValueError, match=message):
            decode(queries(shape, 1), k, v, tables, [0], shape.context_lens)

    def test_floats_stored_as_bits_are_refused() -> None:
        shape = hopper_shape((2, 1), 64, 16, 5)
        k, v, tables = pools(shape, "bfloat16", as_bits=True)
        with pytest.raises(ValueError, match=r"bfloat16 only, not .*uint16"):
            decode(queries(shape, 1), k, v, tables, [0], shape.context_lens)
