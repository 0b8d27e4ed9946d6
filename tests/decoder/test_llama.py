"""The decoder's logits against the dense oracle in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from forward import last_logits
from oracle import Oracle, llama3_frequency
from tiny import write_tiny_llama

from jaxpaged.errors import CheckpointError
from jaxpaged.model import rope, weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_rope import RopeScaling

VARIANTS = {
    "plain": {},
    "tied": {"tie": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "heads_9_3_width_64": {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 48},
    "one_kv_head": {"heads": 4, "kv_heads": 1},
    "window": {"model_type": "mistral", "sliding_window": 8},
    "window_in_one_layer": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "head_wider_than_share": {"heads": 2, "kv_heads": 2, "head_dim": 24},
    "linear_rope": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "llama3_rope": {
        "rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


# By the kernels for CPUs heads are whole vectors wide.
CASES = [("xla", name) for name in VARIANTS] + [
    ("llvm", name) for name in VARIANTS if name != "head_wider_than_share"
]


def load(folder, dtype="float32", layer_loop="scan", attention="xla"):
    checkpoint = open_checkpoint(folder)
    return weights.load(
        checkpoint, dtype=jnp.dtype(dtype), layer_loop=layer_loop, attention=attention
    )


@pytest.mark.parametrize(("attention", "variant"), CASES)
@pytest.mark.parametrize("token_budget", [512, 9])
def test_logits_equal_the_oracle(tmp_path, attention, variant: str, token_budget: int) -> None:
    # Heads are 16 wide where the variant says nothing else.
    folder = write_tiny_llama(tmp_path / "model", **{"hidden": 64} | VARIANTS[variant])
    prompt = np.random.default_rng(1).integers(0, 272, 70).tolist()
    expected = Oracle(open_checkpoint(folder)).logits(prompt)[-1]
    model = load(folder, attention=attention)
    got = last_logits(model, prompt, token_budget=token_budget, block_size=4)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_layers_of_the_kernels_for_cpus_are_not_unrolled(tmp_path) -> None:
    folder = write_tiny_llama(tmp_path / "model", hidden=64)
    with pytest.raises(ValueError, match="use scan"):
        load(folder, layer_loop="unrolled", attention="llvm")


def test_unrolled_layers_give_the_logits_of_the_scan(tmp_path) -> None:
    folder = write_tiny_llama(tmp_path / "model", layers=3)
    prompt = list(range(3, 40))
    scan = last_logits(load(folder), prompt)
    unrolled = last_logits(load(folder, layer_loop="unrolled"), prompt)
    np.testing.assert_allclose(unrolled, scan, atol=1e-5)


def test_bfloat16_logits_are_near_the_oracle(tmp_path) -> None:
    folder = write_tiny_llama(tmp_path / "model", dtype="bfloat16")
    prompt = list(range(3, 40))
    expected = Oracle(open_checkpoint(folder)).logits(prompt)[-1]
    got = last_logits(load(folder, dtype="bfloat16"), prompt)
    assert got.dtype == np.float32
    # 8 bits of precision through two layers: a few percent of the logits' spread (about 3).
    np.testing.assert_allclose(got, expected, atol=0.05 * np.ptp(expected))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_dtypes_and_shards_load_alike(tmp_path, shards: int, dtype: str) -> None:
    folder = write_tiny_llama(tmp_path / "model", dtype=dtype, num_shards=shards)
    checkpoint, model = open_checkpoint(folder), load(folder)
    kernel = np.asarray(model.layers.mlp.up_proj.kernel[...])
    for layer in range(2):
        stored = checkpoint.tensor(f"model.layers.{layer}.mlp.up_proj.weight")
        np.testing.assert_array_equal(kernel[layer], stored.astype(np.float32).T)


def test_tied_head_ignores_a_stored_one_and_untied_head_needs_it(tmp_path) -> None:
    prompt = list(range(3, 20))
    tied = write_tiny_llama(tmp_path / "tied", tie=True)
    beside = write_tiny_llama(
        tmp_path / "beside", tie=False, more_config={"tie_word_embeddings": True}
    )
    untied = write_tiny_llama(
        tmp_path / "untied", tie=True, more_config={"tie_word_embeddings": False}
    )
    np.testing.assert_array_equal(
        last_logits(load(tied), prompt), last_logits(load(beside), prompt)
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(untied)


def config_with(scaling: RopeScaling | None) -> ModelConfig:
    return ModelConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        rope_theta=500000.0,
        rope_scaling=scaling,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
    )


def test_linear_rope_divides_every_frequency() -> None:
    plain = rope.inverse_frequencies(config_with(None))
    linear = rope.inverse_frequencies(config_with(RopeScaling(rope_type="linear", factor=4.0)))
    np.testing.assert_allclose(plain, 500000.0 ** (-np.arange(32) / 32), rtol=1e-6)
    np.testing.assert_array_equal(linear, plain / 4)


def test_llama3_rope_keeps_short_waves_slows_long_ones_and_blends_between() -> None:
    scaling = RopeScaling(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = rope.inverse_frequencies(config_with(None)).astype(np.float64)
    got = rope.inverse_frequencies(config_with(scaling))
    expected = [llama3_frequency(frequency, scaling) for frequency in plain]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got[0] == np.float32(plain[0])
    np.testing.assert_allclose(got[-1], plain[-1] / 8, rtol=1e-6)
