"""A decoder from a quantised checkpoint computes what one from the same weights in float32 does."""

import json

import jax.numpy as jnp
import numpy as np
import packers
import pytest
import raw_safetensors
import safetensors.numpy
import tiny
from forward import last_logits

from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint

PACKERS = {
    "awq": packers.awq(),
    "gptq_ordered": packers.gptq(is_ordered=True),
    "gptq_8_bits": packers.gptq(bits=8),
    "fp8_blocks": packers.fp8(block=(48, 40), scale_name="weight_scale_inv"),
}


def logits(folder, dtype="float32"):
    model = weights.load(open_checkpoint(folder), dtype=jnp.dtype(dtype), layer_loop="scan")
    return last_logits(model, list(range(3, 40)))


@pytest.mark.parametrize("name", PACKERS)
def test_logits_are_those_of_the_dequantised_model(tmp_path, name):
    packed, plain = packers.write_pair(tmp_path, PACKERS[name])
    np.testing.assert_array_equal(logits(packed), logits(plain))
    original = tiny.write_tiny_llama(tmp_path / "original", hidden=64, intermediate=64)
    assert np.abs(logits(packed) - logits(original)).max() > 0.01


def test_packed_experts_are_read(tmp_path):
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
    }
    attention = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    prefix = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (272, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (272, 64),
        f"{prefix}.input_layernorm.weight": (64,),
        f"{prefix}.post_attention_layernorm.weight": (64,),
        f"{prefix}.block_sparse_moe.gate.weight": (2, 64),
        **{f"{prefix}.self_attn.{name}.weight": (rows, 64) for name, rows in attention.items()},
        **{
            f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight": (64, 64)
            for expert in range(2)
            for name in ("w1", "w2", "w3")
        },
    }
    folder = tiny.write_tiny_model(tmp_path / "m", config, shapes, seed=0)
    plain = safetensors.numpy.load_file(folder / "model.safetensors")
    packer = packers.gptq()
    stored = {}
    for name, value in list(plain.items()):
        if ".experts." in name or ".self_attn." in name:
            parts, plain[name] = packer.pack(value)
            stored |= {f"{name.removesuffix('.weight')}.{k}": v for k, v in parts.items()}
        else:
            stored[name] = value
    tiny.write_weights(folder, plain)
    expected = logits(folder)
    raw_safetensors.write(folder / "model.safetensors", stored)
    content = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", content | {"quantization_config": packer.config})
    np.testing.assert_array_equal(logits(folder), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_8_bit_floats_without_scales_run(tmp_path, dtype):
    # The same numbers, stored in 8 bits and in 32.
    folder = tiny.write_tiny_llama(tmp_path / "m")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    small = {name: value.astype("float8_e4m3fn") for name, value in tensors.items()}
    tiny.write_weights(folder, {name: v.astype(np.float32) for name, v in small.items()})
    expected = logits(folder, dtype)
    raw_safetensors.write(folder / "model.safetensors", small)
    np.testing.assert_array_equal(logits(folder, dtype), expected)
