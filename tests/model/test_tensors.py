"""Tensors are compared with what the configuration asks for, by name."""

import dataclasses

import pytest
import tiny

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.tensors import check_tensors, expected_shapes, tensor_source
from jaxpaged.model.config import ModelConfig


@pytest.fixture(scope="module")
def config(shared_folder):
    return open_checkpoint(shared_folder).config


def test_shapes_of_an_uneven_model(tmp_path):
    folder = tiny.write_tiny_llama(
        tmp_path / "m", heads=9, kv_heads=3, head_dim=64, hidden=48, intermediate=80, layers=1
    )
    shapes = expected_shapes(open_checkpoint(folder).config)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (576, 48)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (192, 48)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (48, 576)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (48, 80)
    assert shapes["lm_head.weight"] == (272, 48)
    assert len(shapes) == 3 + 9


def test_biases_are_asked_for_where_the_configuration_has_them(config):
    biased = dataclasses.replace(config, attention_bias=True, mlp_bias=True)
    extra = expected_shapes(biased).keys() - expected_shapes(config).keys()
    assert len(extra) == 7 * config.num_layers
    assert expected_shapes(biased)["model.layers.1.self_attn.k_proj.bias"] == (16,)


def test_exact_tensors_pass(config):
    check_tensors(config, expected_shapes(config), "m")


def test_missing_tensor_is_named(config):
    shapes = expected_shapes(config)
    del shapes["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"^m: tensor model\.layers\.1\.mlp\.up_proj\.weight missing"
    ):
        check_tensors(config, shapes, "m")


def test_many_missing_tensors_are_counted(config):
    with pytest.raises(CheckpointError, match=r"and 15 more missing"):
        check_tensors(config, {}, "m")


def test_misshaped_tensor_is_named_with_both_shapes(config):
    shapes = expected_shapes(config) | {"model.norm.weight": (33,)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[33\].*\[32\]"):
        check_tensors(config, shapes, "m")


def test_bias_that_would_be_dropped_is_an_error(config):
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(CheckpointError, match=f"tensor {name} would not be used"):
        check_tensors(config, expected_shapes(config) | {name: (32,)}, "m")


def test_tied_model_with_and_without_its_own_head(config):
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    shapes = expected_shapes(tied)
    assert "lm_head.weight" not in shapes
    check_tensors(tied, shapes, "m")
    check_tensors(tied, shapes | {"lm_head.weight": (272, 32)}, "m")


def test_untied_model_without_head_is_an_error(config):
    shapes = expected_shapes(config)
    del shapes["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight missing"):
        check_tensors(config, shapes, "m")


def test_rotary_tables_of_old_exporters_are_ignored(config):
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    check_tensors(config, expected_shapes(config) | table, "m")


def of_family(model_type: str, **changes) -> ModelConfig:
    content = {
        "model_type": model_type,
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
    return ModelConfig.from_hf(content | changes, "config.json")


def test_fused_tensors_hold_the_decoders_in_their_order():
    config = of_family("phi3")
    shapes = expected_shapes(config)
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (32, 16)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (48, 16)
    assert not any("q_proj" in name or "up_proj.bias" in name for name in shapes)
    rows = [
        tensor_source(config, f"model.layers.0.self_attn.{name}_proj.weight").rows for name in "qkv"
    ]
    assert rows == [slice(0, 16), slice(16, 24), slice(24, 32)]
    source = tensor_source(config, "model.layers.0.mlp.up_proj.weight")
    assert source == ("model.layers.0.mlp.gate_up_proj.weight", slice(24, 48))
    whole = tensor_source(config, "model.layers.0.mlp.down_proj.weight")
    assert whole == ("model.layers.0.mlp.down_proj.weight", slice(None))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen2", "self_attn.o_proj.bias"),
        ("llama", "self_attn.q_norm.weight"),
        ("olmo2", "input_layernorm.weight"),
        ("llama", "pre_feedforward_layernorm.weight"),
        ("qwen3", "self_attn.q_proj.bias"),
    ],
)
def test_tensor_of_another_family_is_named(model_type, name):
    config = of_family(model_type)
    shapes = expected_shapes(config) | {f"model.layers.0.{name}": (16,)}
    with pytest.raises(CheckpointError, match=rf"{name} would not be used"):
        check_tensors(config, shapes, "m")


def test_a_mixtral_names_its_experts_otherwise():
    config = of_family("mixtral", num_local_experts=3)
    shapes = expected_shapes(config)
    assert shapes["model.layers.0.block_sparse_moe.gate.weight"] == (3, 16)
    assert shapes["model.layers.0.block_sparse_moe.experts.2.w2.weight"] == (16, 24)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert tensor_source(config, name).name == "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    assert not any(".mlp." in name for name in shapes)


def test_norms_are_as_wide_as_what_they_norm():
    olmo2, qwen3 = expected_shapes(of_family("olmo2")), expected_shapes(of_family("qwen3"))
    for shapes, widths in ((olmo2, (16, 8)), (qwen3, (4, 4))):
        norms = (f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk")
        assert tuple(shapes[name][0] for name in norms) == widths


@pytest.mark.parametrize(
    ("rename", "found"),
    [
        (lambda name: name.removeprefix("model."), "embed_tokens.weight"),
        (lambda name: f"language_model.{name}", "language_model.model.embed_tokens.weight"),
        (lambda name: f"_orig_mod.{name}", "_orig_mod.model.embed_tokens.weight"),
    ],
)
def test_model_inside_another_or_without_its_head_is_recognised(config, rename, found):
    shapes = {rename(name): shape for name, shape in expected_shapes(config).items()}
    shapes["lm_head.weight"] = (272, 32)
    with pytest.raises(CheckpointError, match=rf"There is {found}: .* save_pretrained"):
        check_tensors(config, shapes, "m")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_padded_vocabulary_names_the_key_to_set(config, name):
    shapes = expected_shapes(config) | {name: (320, 32)}
    with pytest.raises(CheckpointError, match=r"has shape \[320, 32\]; .* set vocab_size to 320"):
        check_tensors(config, shapes, "m")


def test_other_differences_are_no_padded_vocabulary(config):
    shapes = expected_shapes(config) | {"lm_head.weight": (320, 64)}
    with pytest.raises(CheckpointError, match=r"asks for \[272, 32\]$"):
        check_tensors(config, shapes, "m")
