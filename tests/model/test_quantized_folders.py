"""Checkpoints quantised by AWQ, GPTQ or in 8-bit floats: read exactly, or refused by name."""

import json
import pathlib

import ml_dtypes
import numpy as np
import packers
import pytest
import raw_safetensors
import safetensors.numpy
import tiny

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.safetensors_file import open_safetensors
from jaxpaged.model.checkpoint.tensors import check_tensors, expected_shapes

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {"dynamic": True, "num_bits": 8, "type": "float"},
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}


def compressed(**weights) -> dict:
    content = json.loads(json.dumps(COMPRESSED))
    content["config_groups"]["group_0"]["weights"] |= weights
    return content


PACKERS = {
    "awq": packers.awq(),
    "awq_in_one_group": packers.awq(group_size=-1),
    "awq_upper_case": packers.awq(more={"version": "GEMM", "modules_to_not_convert": None}),
    "awq_that_says_format": packers.awq(more={"version": None, "format": "gemm"}),
    "gptq": packers.gptq(),
    "gptq_8_bits": packers.gptq(bits=8),
    "gptq_in_one_group": packers.gptq(group_size=-1),
    "gptq_ordered": packers.gptq(is_ordered=True),
    "gptq_ordered_8_bits": packers.gptq(bits=8, is_ordered=True, group_size=16),
    "gptq_without_g_idx": packers.gptq(has_g_idx=False),
    "gptq_v1": packers.gptq(checkpoint_format="gptq"),
    "gptq_v2": packers.gptq(checkpoint_format="gptq_v2", more={"pack_dtype": "int32"}),
    "fp8_tensor": packers.fp8(),
    "fp8_tensor_1": packers.fp8(scale_shape=lambda outputs: (1,)),
    "fp8_outputs": packers.fp8(scale_shape=lambda outputs: (outputs, 1)),
    "fp8_blocks": packers.fp8(block=(48, 40), scale_name="weight_scale_inv"),
    "compressed_outputs": packers.fp8(
        scale_shape=lambda outputs: (outputs, 1), config=compressed()
    ),
    "compressed_tensor": packers.fp8(
        scale_shape=lambda outputs: (1,), config=compressed(strategy="tensor")
    ),
    "compressed_blocks": packers.fp8(
        block=(32, 16), config=compressed(strategy="block", block_structure=[32, 16])
    ),
}


@pytest.mark.parametrize("name", PACKERS)
def test_weights_are_those_that_were_packed(tmp_path, name):
    packed, plain = packers.write_pair(tmp_path, PACKERS[name])
    checkpoint, expected = open_checkpoint(packed), open_checkpoint(plain)
    check_tensors(checkpoint.config, checkpoint.shapes(), "m")
    assert checkpoint.config == expected.config
    assert checkpoint.shapes() == expected_shapes(expected.config)
    for tensor in expected.shapes():
        np.testing.assert_array_equal(checkpoint.tensor(tensor), expected.tensor(tensor), tensor)


def test_packed_weights_are_near_the_original(tmp_path):
    # That the packers of these tests, from which everything follows, are quantisers at all.
    original = tiny.write_tiny_llama(tmp_path / "original", hidden=64, intermediate=64)
    name = "model.layers.1.mlp.down_proj.weight"
    value = open_checkpoint(original).tensor(name)
    for kind, bound in {"awq": 0.1, "gptq": 0.1, "gptq_ordered": 0.1, "gptq_8_bits": 0.01}.items():
        packed, _ = packers.write_pair(tmp_path / kind, PACKERS[kind])
        error = np.abs(open_checkpoint(packed).tensor(name) - value).max()
        assert 0.0 < error < bound * np.abs(value).max()


def change(folder: pathlib.Path, **changes) -> None:
    """Sets keys of the quantization_config; None takes one out."""
    config = json.loads((folder / "config.json").read_text())
    merged = config["quantization_config"] | changes
    config["quantization_config"] = {k: v for k, v in merged.items() if v is not None}
    tiny.write_json(folder / "config.json", config)


REFUSED = [
    ("awq", {"bits": 3}, "bits is 3; expected one of 4"),
    ("awq", {"bits": True}, "bits is True; expected one of 4"),
    ("awq", {"version": "gemv"}, "version is 'gemv'; expected one of 'gemm'"),
    ("awq", {"version": None}, "format is None; expected one of 'gemm'"),
    ("awq", {"zero_point": False}, "zero_point is False"),
    ("awq", {"group_size": 0}, "group_size is 0; expected a whole number above 0, or -1"),
    ("awq", {"group_size": 16}, r"qzeros has shape \[2, 8\]; \[4, 8\] goes with"),
    ("gptq", {"bits": 3}, "bits is 3; expected one of 4, 8"),
    ("gptq", {"bits": 2}, "bits is 2; expected one of 4, 8"),
    ("gptq", {"bits": 8}, "goes with the packed weight and the bits"),
    ("gptq", {"group_size": None}, "group_size is None"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format is True"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    ("gptq", {"dynamic": {"lm_head": {"bits": 8}}}, "dynamic is {'lm_head'"),
    ("fp8_tensor", {"fmt": "e3m4"}, "fmt is 'e3m4'"),
    ("fp8_blocks", {"weight_block_size": [128]}, "weight_block_size is .*two whole numbers"),
    ("fp8_blocks", {"weight_block_size": [16, 16]}, r"weight_scale_inv is float32 of shape \[2, 2"),
    ("fp8_blocks", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', whose weights"),
    ("fp8_blocks", {"quant_method": None}, "quant_method None, whose weights cannot be read"),
    ("fp8_blocks", {"quant_method": ["awq"]}, r"quant_method \['awq'\], whose"),
    ("compressed_tensor", {"format": "pack-quantized"}, "format is 'pack-quantized'"),
    ("compressed_tensor", {"format": "int-quantized"}, "format is 'int-quantized'"),
    ("compressed_tensor", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
    ("compressed_tensor", {"config_groups": {}}, "config_groups is {}"),
    ("compressed_tensor", {"config_groups": {"g": []}}, r"config_groups: g is \[\]; expected an"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_other_settings_are_refused_by_name(tmp_path, kind, changes, message):
    folder, _ = packers.write_pair(tmp_path, PACKERS[kind], layers=1)
    change(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).shapes()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"type": "int"}, "weights: type is 'int'; expected one of 'float'"),
        ({"num_bits": 4}, "weights: num_bits is 4"),
        ({"symmetric": False}, "weights: symmetric is False"),
        ({"strategy": "group"}, "weights: strategy is 'group'"),
    ],
)
def test_other_compressed_weights_are_refused_by_name(tmp_path, weights, message):
    packer = packers.fp8(config=compressed(**weights))
    folder, _ = packers.write_pair(tmp_path, packer, layers=1)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "settings", [{"load_in_4bit": True}, {"quant_method": "bitsandbytes"}, [], 4, "awq"]
)
def test_settings_of_no_known_method_are_refused(folder, settings):
    config = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", config | {"quantization_config": settings})
    with pytest.raises(CheckpointError, match=r"quantization_config has quant_method .*gguf"):
        open_checkpoint(folder)


def test_null_says_that_nothing_is_quantised(folder):
    config = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", config | {"quantization_config": None})
    assert open_checkpoint(folder).shapes() == expected_shapes(open_checkpoint(folder).config)


def test_unknown_settings_are_remarked_on(tmp_path, caplog):
    packer = packers.awq(more={"brand_new": 1})
    folder, _ = packers.write_pair(tmp_path, packer, layers=1)
    open_checkpoint(folder)
    assert "quantization_config: unknown keys are ignored: ['brand_new']" in caplog.text


def stored(folder: pathlib.Path) -> dict[str, np.ndarray]:
    file = open_safetensors(folder / "model.safetensors")
    return {name: file.tensor(name) for name in file.entries}


BASE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("awq", "qzeros", "tensor .*up_proj.qzeros is missing"),
        ("awq", "scales", "tensor .*up_proj.scales is missing"),
        ("awq", "qweight", "tensor .*up_proj.qzeros holds whole numbers that belong to no"),
        ("gptq", "qzeros", "tensor .*up_proj.qzeros is missing"),
        ("gptq_ordered", "g_idx", "tensor .*up_proj.g_idx is missing"),
        ("fp8_blocks", "weight_scale_inv", "has 8-bit floats and no weight_scale"),
    ],
)
def test_missing_part_is_named(tmp_path, kind, part, message):
    folder, _ = packers.write_pair(tmp_path, PACKERS[kind], layers=1)
    tensors = stored(folder)
    del tensors[f"{BASE}.{part}"]
    raw_safetensors.write(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).shapes()


@pytest.mark.parametrize(
    ("kind", "part", "value", "message"),
    [
        ("awq", "scales", np.ones((2, 32), np.float16), r"scales has shape \[2, 32\]; \[2, 64\]"),
        ("awq", "scales", np.ones((2, 64), np.int32), "scales is int32 .* expected float16"),
        ("awq", "qweight", np.ones((64, 8), np.float32), "qweight is float32 .* expected int32"),
        ("awq", "qweight", np.ones(64, np.int32), r"of shape \[64\]; .*with 2 axes"),
        ("awq", "weight", np.ones((64, 64), np.float32), "has a weight beside a quantised one"),
        ("gptq", "qzeros", np.ones((3, 8), np.int32), r"qzeros has shape \[3, 8\]; \[2, 8\]"),
        ("gptq", "g_idx", np.zeros(63, np.int32), r"g_idx has shape \[63\]; \[64\] goes"),
        ("fp8_tensor", "weight_scale_inv", np.ones((), np.float32), "asks for one scale"),
        ("fp8_tensor", "weight_scale", np.ones(5, np.float32), r"of shape \[5\]; for a weight of"),
        ("fp8_tensor", "weight_scale", np.ones((), np.int32), "weight_scale is int32"),
    ],
)
def test_parts_that_do_not_go_together_are_named(tmp_path, kind, part, value, message):
    folder, _ = packers.write_pair(tmp_path, PACKERS[kind], layers=1)
    raw_safetensors.write(folder / "model.safetensors", stored(folder) | {f"{BASE}.{part}": value})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).shapes()


def test_zero_points_that_readers_disagree_on_are_refused(tmp_path):
    folder, _ = packers.write_pair(tmp_path, PACKERS["gptq"], layers=1)
    tensors = stored(folder)
    tensors[f"{BASE}.qzeros"][0, 0] |= 0xF0
    raw_safetensors.write(folder / "model.safetensors", tensors)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"qzeros holds 15, .*gptq_v2"):
        checkpoint.tensor(f"{BASE}.weight")
    # The second format means what it says.
    change(folder, checkpoint_format="gptq_v2")
    assert np.isfinite(open_checkpoint(folder).tensor(f"{BASE}.weight")).all()


@pytest.mark.parametrize("group", [-1, 2])
def test_groups_that_are_not_there_are_refused(tmp_path, group):
    folder, _ = packers.write_pair(tmp_path, PACKERS["gptq_ordered"], layers=1)
    tensors = stored(folder)
    tensors[f"{BASE}.g_idx"][3] = group
    raw_safetensors.write(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"g_idx names groups from .* there are 2"):
        open_checkpoint(folder).tensor(f"{BASE}.weight")


def test_biases_of_zeros_that_autogptq_adds_are_left_out(tmp_path):
    folder, plain = packers.write_pair(tmp_path, PACKERS["gptq"], layers=1)
    tensors = stored(folder) | {f"{BASE}.bias": np.zeros(64, np.float16)}
    raw_safetensors.write(folder / "model.safetensors", tensors)
    assert open_checkpoint(folder).shapes() == open_checkpoint(plain).shapes()
    tensors[f"{BASE}.bias"][7] = 0.5
    raw_safetensors.write(folder / "model.safetensors", tensors)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"up_proj\.bias would not be used"):
        check_tensors(checkpoint.config, checkpoint.shapes(), "m")


def test_biases_that_the_model_has_are_kept(tmp_path):
    folder, plain = packers.write_pair(tmp_path, PACKERS["gptq"], layers=1, mlp_bias=True)
    assert open_checkpoint(folder).shapes() == open_checkpoint(plain).shapes()
    np.testing.assert_array_equal(
        open_checkpoint(folder).tensor(f"{BASE}.bias"),
        open_checkpoint(plain).tensor(f"{BASE}.bias"),
    )


def test_scales_of_activations_are_not_used(tmp_path):
    folder, plain = packers.write_pair(tmp_path, PACKERS["fp8_tensor"], layers=1)
    more = {f"{BASE}.input_scale": np.ones((), np.float32)}
    raw_safetensors.write(folder / "model.safetensors", stored(folder) | more)
    change(folder, activation_scheme="static")
    assert open_checkpoint(folder).shapes() == open_checkpoint(plain).shapes()


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_packed_weights_without_settings_are_refused(tmp_path, kind):
    folder, _ = packers.write_pair(tmp_path, PACKERS[kind], layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    tiny.write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config that"):
        open_checkpoint(folder).shapes()


def test_scaled_weights_without_settings_are_refused(tmp_path):
    folder, _ = packers.write_pair(tmp_path, PACKERS["fp8_tensor"], layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    tiny.write_json(folder / "config.json", config)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"weight_scale.* would not be used"):
        check_tensors(checkpoint.config, checkpoint.shapes(), "m")


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_8_bit_floats_without_scales_keep_their_values(folder, dtype):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    every = np.arange(256, dtype=np.uint8).view(dtype)
    small = {name: value.astype(dtype) for name, value in tensors.items()}
    small["model.layers.0.mlp.up_proj.weight"] = np.resize(every, (64, 32))
    raw_safetensors.write(folder / "model.safetensors", small)
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint.config, checkpoint.shapes(), "m")
    for name, value in small.items():
        read = checkpoint.tensor(name)
        assert read.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(read.astype(np.float32), value.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8])
def test_other_dtypes_are_refused_by_name(folder, dtype):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    raw_safetensors.write(folder / "model.safetensors", tensors)
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight has dtype .* supported are F32"
    ):
        open_checkpoint(folder).shapes()
