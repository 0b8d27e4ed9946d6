"""Tensors are compared with what the configuration asks for, by name."""

import dataclasses

import pytest
import tiny

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.tensors import check_tensors, expected_shapes


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
