"""A rotation that the job brings is the one that a config.json with the same words has."""

import json

import numpy as np
import pytest
import tiny

from jaxpaged.errors import ConfigError
from jaxpaged.model import config_stretch, rope
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_stretch import stretched

FACTORS = [1.0, 1.5, 2.0, 4.0]
ROTATIONS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "attention_factor": 1.2},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "truncate": False},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": FACTORS,
    },
]


def config_of(tmp_path, name: str = "m", **model) -> ModelConfig:
    return open_checkpoint(tiny.write_tiny_llama(tmp_path / name, **model)).config


@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda rotation: str(rotation["rope_type"]))
@pytest.mark.parametrize("length", [64, 200, 256])
def test_frequencies_are_those_of_a_config_with_the_same_rotation(tmp_path, rotation, length):
    own = config_of(tmp_path, max_position_embeddings=64)
    file = config_of(tmp_path, "f", max_position_embeddings=64, rope=rotation)

    found = stretched(own, rotation)

    assert found.rope_scaling == file.rope_scaling
    assert found.rope_theta == file.rope_theta
    ropes, layers = rope.kinds(found.for_length(length))
    expected, expected_layers = rope.kinds(file.for_length(length))
    assert layers == expected_layers
    for one, other in zip(ropes, expected, strict=True):
        np.testing.assert_array_equal(one.frequencies, other.frequencies)
        assert one.scale == other.scale
    if length == 256:
        plain = rope.kinds(own)[0][0].frequencies
        assert not np.array_equal(ropes[0].frequencies, plain)


@pytest.mark.parametrize(
    ("rotation", "max_len"),
    [
        (ROTATIONS[0], 256),
        (ROTATIONS[1], 256),
        (ROTATIONS[2], 256),
        (ROTATIONS[3], 256),
        (ROTATIONS[5], 512),
        (ROTATIONS[6], 256),
        ({"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 40}, 100),
        ({"rope_type": "default", "rope_theta": 500000.0}, 64),
    ],
)
def test_sequences_reach_as_far_as_the_factor_says(tmp_path, rotation, max_len):
    found = stretched(config_of(tmp_path, max_position_embeddings=64), rotation)
    assert (found.max_len, found.own_longest) == (max_len, 64)
    config_stretch.check_length(max_len, found)
    with pytest.raises(ConfigError, match=f"max_model_len is {max_len + 1}, the model was made"):
        config_stretch.check_length(max_len + 1, found)


@pytest.mark.parametrize(
    ("rotation", "max_len"),
    [
        (None, 64),
        # The stretched length is what the configuration declares.
        (ROTATIONS[0], 64),
        (ROTATIONS[5], 64),
        (ROTATIONS[6], 64),
        # It is the length of the training, and the factor comes on top of it.
        (ROTATIONS[1], 256),
        (ROTATIONS[2], 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_the_model_s_own_limit(tmp_path, rotation, max_len):
    found = config_of(tmp_path, max_position_embeddings=64, rope=rotation)
    assert found.max_len == max_len
    assert stretched(found, None) is found


@pytest.mark.parametrize(
    ("own", "example"),
    [
        (None, {"rope_type": "yarn", "factor": 2.4, "original_max_position_embeddings": 64}),
        # Its own factor of 4 took it to 64 tokens.
        (ROTATIONS[0], {"rope_type": "linear", "factor": 9.4}),
        (
            ROTATIONS[5],
            {
                "rope_type": "llama3",
                "factor": 18.8,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_the_refusal_names_the_key_with_an_example_that_works(tmp_path, own, example):
    config = config_of(tmp_path, max_position_embeddings=64, rope=own)
    words = ", ".join(f"{key}: {value}" for key, value in example.items())

    with pytest.raises(ConfigError) as caught:
        config_stretch.check_length(150, config)

    assert str(caught.value) == (
        "engine.max_model_len is 150, the model was made for at most 64 tokens; use a smaller "
        "value, or stretch its rotation, which changes what it computes for every row: "
        f"engine.rope: {{{words}}}"
    )
    config_stretch.check_length(150, stretched(config, example))


@pytest.mark.parametrize("own", [ROTATIONS[0], ROTATIONS[5]], ids=["linear", "llama3"])
def test_a_models_own_stretch_counts_where_another_takes_its_place(tmp_path, own):
    config = config_of(tmp_path, max_position_embeddings=64, rope=own)
    assert stretched(config, own).max_len == 64
    assert stretched(config, own | {"factor": 2 * own["factor"]}).max_len == 128
    # Twice as slow as a model without a stretch, but faster than it was trained.
    assert stretched(config, own | {"factor": 2.0}).max_len == int(64 * 2 / own["factor"])


def test_factors_for_each_frequency_are_not_made_up(tmp_path):
    config = config_of(tmp_path, max_position_embeddings=64, rope=ROTATIONS[6])
    with pytest.raises(ConfigError, match=r"use a smaller value$"):
        config_stretch.check_length(65, config)


@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        ({"rope_type": "ntk"}, r"^engine\.rope: rope_type is 'ntk', which is not supported"),
        ({"rope_type": "yarn"}, r"^engine\.rope: factor is missing"),
        ({"rope_type": "linear", "factor": -1.0}, r"factor is -1\.0; expected a finite number"),
        ({"rope_type": "dynamic", "factor": 1e308}, r"factor is 1e\+308; expected at most 1048576"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}, "beta_fast is not supported"),
        (ROTATIONS[6] | {"long_factor": [1.0]}, "expected a list of 4"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor is missing"),
    ],
)
def test_a_wrong_rotation_is_named_as_in_a_config(tmp_path, rotation, message):
    with pytest.raises(ConfigError, match=message):
        stretched(config_of(tmp_path), rotation)


def test_layers_with_a_rotation_of_their_own_keep_it(golden):
    families = json.loads((golden / "families.json").read_text())
    gemma = next(case for case in _configs(families) if case.get("model_type") == "gemma3_text")
    config = ModelConfig.from_hf(gemma, "config.json")

    found = stretched(config, {"rope_type": "linear", "factor": 16.0})

    assert found.local_rope_theta == config.local_rope_theta is not None
    assert found.rope_scaling.factor == 16.0
    assert found.windows == config.windows


def _configs(value: object):
    if isinstance(value, dict):
        if "model_type" in value:
            yield value
        for item in value.values():
            yield from _configs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _configs(item)
