"""A config.json is honoured or refused by name."""

import dataclasses
import logging

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_families import FAMILIES
from jaxpaged.model.config_options import RoutedExperts
from jaxpaged.model.config_rope import RopeScaling

MINIMAL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def read(**changes) -> ModelConfig:
    return ModelConfig.from_hf(MINIMAL | changes, "config.json")


def test_absent_keys_take_hugging_face_defaults():
    config = read()
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rope_theta == 10000.0
    assert config.rope_scaling is None
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias


def test_every_honoured_key_arrives():
    config = read(
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=500000,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (2, 32, 500000.0)
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias


def test_equal_configs_hash_alike():
    assert hash(read(rope_scaling={"type": "linear", "factor": 2.0})) == hash(
        read(rope_parameters={"rope_type": "linear", "factor": 2.0})
    )


@pytest.mark.parametrize("key", sorted(MINIMAL))
def test_missing_key_is_named_with_its_file(key):
    config = {name: value for name, value in MINIMAL.items() if name != key}
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key} is missing"):
        ModelConfig.from_hf(config, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", 2**30),
        ("vocab_size", 2**40),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", 1),
        ("rope_scaling", [1]),
        ("rope_theta", -1.0),
    ],
)
def test_malformed_value_is_named(key, value):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key} is .*expected"):
        read(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("sliding_window", 4096),
        ("quantization_config", {"quant_method": "awq"}),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("num_local_experts", 8),
        ("auto_map", {"AutoModelForCausalLM": "modeling.py"}),
        ("logits_scaling", 8.0),
    ],
)
def test_behaviour_that_a_llama_lacks_is_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key} is .* not supported"):
        read(**{key: value})


def test_keys_without_effect_pass_and_unknown_ones_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        read(hidden_act="silu", sliding_window=None, torch_dtype="bfloat16", use_cache=True)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        read(made_by="somebody")
    assert "made_by" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["MistralForCausalLM"]},
        {"model_type": ["llama"]},
        {"model_type": "ministral"},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "bert"},
    ],
)
def test_other_architecture_is_named_with_what_is_supported(changes):
    with pytest.raises(CheckpointError, match="not supported; supported is model_type 'llama'"):
        read(**changes)


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": None, "layer_types": None}, (None, None)),
        ({"sliding_window": 8, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 8, "layer_types": [FULL, SLIDING]}, (None, 8)),
        ({"sliding_window": 8, "layer_types": [SLIDING, SLIDING]}, (8, 8)),
        ({"sliding_window": 8, "layer_types": [FULL, FULL]}, (None, None)),
        ({"layer_types": [FULL, FULL]}, (None, None)),
        (MISTRAL | {"sliding_window": 8}, (8, 8)),
        (MISTRAL | {"sliding_window": 1, "use_sliding_window": True}, (1, 1)),
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL | {"sliding_window": 8, "use_sliding_window": False}, (None, None)),
        (MISTRAL | {"sliding_window": 8, "layer_types": [SLIDING, FULL]}, (8, None)),
    ],
)
def test_windows_are_those_that_the_model_declares(changes, windows):
    assert read(num_key_value_heads=4, **changes).windows == windows


def test_absent_keys_of_a_mistral_take_its_own_defaults():
    config = read(**MISTRAL, num_attention_heads=16)
    assert (config.num_kv_heads, config.windows) == (8, (4096, 4096))
    assert read(**MISTRAL, num_key_value_heads=None).num_kv_heads == 4


def test_mistral_may_give_the_width_of_a_head():
    config = read(**MISTRAL, num_key_value_heads=2, head_dim=32, sliding_window=None)
    assert (config.num_kv_heads, config.head_dim, config.attention_bias) == (2, 32, False)


def test_widest_window_is_none_while_a_layer_sees_everything():
    config = read()
    assert config.max_window is None
    assert dataclasses.replace(config, windows=(8, None)).max_window is None
    assert dataclasses.replace(config, windows=(8, 3)).max_window == 8


def test_windows_are_part_of_the_value():
    config = read()
    windowed = dataclasses.replace(config, windows=(8, None))
    assert config != windowed
    assert hash(windowed) == hash(dataclasses.replace(config, windows=(8, None)))
    with pytest.raises(ValueError, match="1 windows for 2 layers"):
        dataclasses.replace(config, windows=(8,))


def test_window_of_a_llama_without_layer_types_is_refused():
    with pytest.raises(CheckpointError, match=r"^config\.json: sliding_window is 8, .*layer_types"):
        read(sliding_window=8)
    with pytest.raises(CheckpointError, match="sliding_window is 8, which is not supported"):
        read(sliding_window=8, use_sliding_window=True)


@pytest.mark.parametrize("window", [0, -1, 2.5, "8", True, [8], 2**31])
@pytest.mark.parametrize("changes", [MISTRAL, {"layer_types": [FULL, SLIDING]}])
def test_malformed_window_is_named(window, changes):
    with pytest.raises(CheckpointError, match=r"^config\.json: sliding_window is .*above 0"):
        read(num_key_value_heads=4, sliding_window=window, **changes)


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        ([SLIDING], "is 1 entries; expected a list with one entry for each of 2 layers"),
        ([FULL] * 3, "is 3 entries; expected a list"),
        ([], "is 0 entries; expected a list"),
        (SLIDING, "is 'sliding_attention'; expected a list"),
        ({FULL: 0, SLIDING: 1}, "is .*; expected a list"),
        ([FULL, "chunked_attention"], "is 'chunked_attention' at layer 1, which is not supported"),
        ([None, FULL], "is None at layer 0, which is not supported"),
        ([[SLIDING], FULL], r"is \['sliding_attention'\] at layer 0"),
    ],
)
@pytest.mark.parametrize("more", [{}, MISTRAL])
def test_malformed_layer_types_are_named(layer_types, message, more):
    with pytest.raises(CheckpointError, match=rf"^config\.json: layer_types {message}"):
        read(num_key_value_heads=4, sliding_window=8, layer_types=layer_types, **more)


def test_sliding_layer_needs_a_window():
    with pytest.raises(CheckpointError, match="but sliding_window is missing"):
        read(layer_types=[SLIDING, FULL])
    with pytest.raises(CheckpointError, match=r"^config\.json: use_sliding_window is 1; expected"):
        read(sliding_window=8, use_sliding_window=1)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_rope_scaling_in_both_spellings(key, type_key):
    linear = read(**{key: {type_key: "linear", "factor": 4.0}})
    assert linear.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)
    llama3 = read(**{key: {type_key: "llama3", **LLAMA3_ROPE}})
    assert llama3.rope_scaling == RopeScaling(rope_type="llama3", **LLAMA3_ROPE)
    assert read(**{key: {type_key: "default"}}).rope_scaling is None


def test_rope_theta_inside_rope_parameters_wins():
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    assert read(rope_parameters=rope).rope_theta == 500000.0
    assert read(rope_parameters=rope, rope_theta=10000.0).rope_theta == 500000.0


@pytest.mark.parametrize("rope_type", ["su", "proportional", "ntk", 3, ["linear"]])
def test_unknown_rope_type_is_refused_by_name(rope_type):
    with pytest.raises(CheckpointError, match=r"rope_scaling: rope_type is .* not supported"):
        read(rope_scaling={"rope_type": rope_type, "factor": 2.0})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "rope_scaling: factor is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling: low_freq_factor is missing"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "mscale is not supported"),
        (
            {"rope_type": "default", "factor": 2.0},
            "factor is not supported with rope_type 'default",
        ),
        ({"rope_type": "dynamic"}, "rope_scaling: factor is missing"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha is not supported"),
        ({"rope_type": "yarn"}, "rope_scaling: factor is missing"),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0},
            "beta_fast is 1.0; expected more than beta_slow",
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
            "rope_theta is 1.0; expected more than 1",
        ),
        ({"rope_type": "longrope"}, "short_factor is None; expected a list of 8"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7}, "short_factor is a list of 7"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 7 + [0.0]},
            "short_factor has 0.0; expected a list of 8 finite numbers above 0",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_type": "llama3"} | LLAMA3_ROPE | {"high_freq_factor": 1.0},
            "high_freq_factor is 1.0; expected more than low_freq_factor",
        ),
    ],
)
def test_incomplete_or_unknown_rope_parameters_are_named(rope, message):
    with pytest.raises(CheckpointError, match=message):
        read(rope_scaling=rope)


def family(model_type: str, **changes) -> ModelConfig:
    architecture = FAMILIES[model_type].architecture
    return read(model_type=model_type, architectures=[architecture], **changes)


def test_qwen_has_a_bias_on_queries_keys_and_values_only():
    config = family("qwen2", num_key_value_heads=2)
    assert (config.qkv_bias, config.attention_bias, config.query_key_norm) == (True, False, "none")
    assert config.windows == (None, None)
    qwen3 = family("qwen3", num_key_value_heads=2)
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.query_key_norm) == (128, False, "head")


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("qwen2", {"sliding_window": 8}, (None, None)),
        ("qwen2", {"use_sliding_window": True}, (None, None)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (None, 8),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            (8, 8),
        ),
        ("phi3", {}, (None, None)),
        ("phi3", {"sliding_window": 8}, (8, 8)),
        ("smollm3", {"sliding_window": 8, "no_rope_layers": [1, 0]}, (None, None)),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0]},
            (None, 8),
        ),
        ("gemma2", {}, (4096, None)),
        ("gemma2", {"sliding_window": None}, (None, None)),
        ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7}, (8,) * 5 + (None, 8)),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 1}, (None, None)),
    ],
)
def test_windows_follow_the_familys_rule(model_type, changes, windows):
    assert family(model_type, num_key_value_heads=2, **changes).windows == windows


def test_gemmas_keys_arrive():
    config = family("gemma2", num_key_value_heads=2, query_pre_attn_scalar=64)
    assert (config.activation, config.norm_places, config.norm_scale) == (
        "gelu_tanh",
        "around",
        "one_plus",
    )
    assert (config.score_cap, config.logit_cap, config.score_scale) == (50.0, 30.0, 0.125)
    assert (config.embedding_multiplier, config.tie_word_embeddings) == (8.0, True)
    uncapped = family("gemma2", num_key_value_heads=2, attn_logit_softcapping=None)
    assert uncapped.score_cap is None


def test_two_bases_of_gemma_3_are_read_in_both_spellings():
    old = family(
        "gemma3_text",
        num_key_value_heads=2,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = family(
        "gemma3_text",
        num_key_value_heads=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    assert old == new
    assert (new.rope_theta, new.local_rope_theta) == (5e5, 2e4)
    plain = family("gemma3_text", num_key_value_heads=2)
    assert (plain.rope_theta, plain.local_rope_theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters: sliding_attention: rope_type is 'linear'; expected 'default'",
        ),
        (
            {"sliding_attention": {"rope_type": "default", "factor": 2.0}},
            "sliding_attention: factor is not supported",
        ),
        ({"full_attention": 3}, "rope_parameters: full_attention is 3; expected an object"),
        ({"full_attention": {}, "chunked_attention": {}}, "chunked_attention is not supported"),
    ],
)
def test_malformed_bases_of_gemma_3_are_named(rope, message):
    with pytest.raises(CheckpointError, match=message):
        family("gemma3_text", num_key_value_heads=2, rope_parameters=rope)


def test_granites_multipliers_arrive():
    config = family(
        "granite",
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    )
    assert (config.embedding_multiplier, config.residual_multiplier) == (12.0, 0.22)
    assert (config.score_scale, config.logits_divisor) == (0.015625, 8.0)
    assert family("granite").score_scale == 1.0


def test_layers_without_rope_are_those_that_the_model_names():
    assert family("smollm3", num_hidden_layers=5).rotary_layers == (True,) * 3 + (False, True)
    assert family("smollm3", no_rope_layers=[0, 1]).rotary_layers == (False, True)
    assert read().rotary_layers == ()
    assert read().rotates(1)
    assert not family("smollm3", no_rope_layers=[0, 1]).rotates(0)


def test_longrope_of_phi_is_read_with_its_own_names():
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2] * 8}
    config = family("phi3", rope_scaling=rope, original_max_position_embeddings=512)
    scaling = config.rope_scaling
    assert scaling.rope_type == "longrope"
    assert (scaling.factor, scaling.original_max_position_embeddings) == (4.0, 512)
    assert scaling.long_factors == (2.0,) * 8
    assert config.for_length(512) != config.for_length(513)
    assert read().for_length(512) == read()


def test_part_of_a_head_is_rotated():
    config = family("phi3", partial_rotary_factor=0.75)
    assert (config.rotary_share, config.rotary_width) == (0.75, 12)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.3; expected an even"):
        family("phi3", partial_rotary_factor=0.3, head_dim=10)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 1\.5; expected at most 1"):
        family("phi3", partial_rotary_factor=1.5)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("gemma2", "hidden_activation", "relu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("qwen3", "attn_logit_softcapping", 50.0),
        ("qwen2", "no_rope_layers", [1, 0]),
        ("olmo2", "clip_qkv", 8.0),
        ("granite", "num_local_experts", 8),
        ("olmo2", "auto_map", {"AutoModelForCausalLM": "modeling.py"}),
        ("olmo2", "sliding_window", 8),
        ("granite", "hidden_act", "gelu"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(model_type, key, value):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key} is .* not supported"):
        family(model_type, num_key_value_heads=2, **{key: value})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([1], "is a list of 1; expected a list with one entry for each of 2 layers"),
        ({}, "is {}; expected a list"),
        ([1, 2], "is 2 at layer 1"),
    ],
)
def test_malformed_layers_without_rope_are_named(layers, message):
    with pytest.raises(CheckpointError, match=rf"^config\.json: no_rope_layers {message}"):
        family("smollm3", no_rope_layers=layers)


def test_experts_arrive_under_either_name():
    mixtral = family("mixtral", num_key_value_heads=2, num_local_experts=4)
    assert mixtral.experts == RoutedExperts(count=4, per_token=2, is_normed=True)
    assert mixtral.intermediate_size == 128
    qwen = family("qwen3_moe", num_key_value_heads=2, num_experts=16, moe_intermediate_size=24)
    assert qwen.experts == RoutedExperts(count=16, per_token=8, is_normed=False)
    assert qwen.intermediate_size == 24
    assert read().experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "num_experts_per_tok is 8; expected at most 4"),
        ({"num_experts": 8, "mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], .* not supported"),
        (
            {"num_experts": 8, "decoder_sparse_step": 2},
            "decoder_sparse_step is 2, .* not supported",
        ),
        ({}, "num_experts is missing"),
    ],
)
def test_experts_that_are_not_served_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        family("qwen3_moe", num_key_value_heads=2, moe_intermediate_size=24, **changes)


def test_per_layer_values_are_one_for_each_layer():
    with pytest.raises(ValueError, match="1 rotary_layers for 2"):
        dataclasses.replace(read(), rotary_layers=(True,))


def test_two_spellings_that_disagree_are_refused():
    with pytest.raises(CheckpointError, match=r"rope_scaling is .* the same as rope_parameters"):
        read(
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0},
        )
