"""GGUF files: the same model as the folder it was made from, or one clear message."""

import dataclasses
import pathlib
import random
import struct
import sys

import numpy as np
import pytest
import tiny
import tiny_gguf

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.gguf import GgufCheckpoint
from jaxpaged.model.checkpoint.tensors import check_tensors, expected_shapes
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_rope import RopeScaling


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    """The folder with biases and uneven heads that the files here are made from."""
    return tiny.write_tiny_llama(
        tmp_path_factory.mktemp("source") / "m",
        heads=6,
        kv_heads=3,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
    )


@pytest.fixture(scope="module")
def metadata(source) -> dict:
    return tiny_gguf.llama_metadata(source)


@pytest.fixture(scope="module")
def tensors(source) -> dict[str, np.ndarray]:
    return tiny_gguf.llama_tensors(source)


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "model.gguf"


def test_packaged_model_has_exactly_the_tensors_of_its_configuration(packaged_model):
    checkpoint = open_checkpoint(packaged_model)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.head_dim, config.rope_theta) == (49152, 64, 100000.0)
    assert config.tie_word_embeddings
    assert checkpoint.shapes() == expected_shapes(config)
    keys = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight")
    assert (keys.dtype, keys.shape) == (np.float32, (192, 576))


def test_file_holds_the_model_of_its_folder(path, source, metadata, tensors):
    original = open_checkpoint(source)
    checkpoint = open_checkpoint(tiny_gguf.write_gguf(path, metadata, tensors))
    assert dataclasses.replace(checkpoint.config, rms_norm_eps=1e-5) == original.config
    assert checkpoint.config.rms_norm_eps == pytest.approx(1e-5)
    assert checkpoint.shapes() == original.shapes()
    for name in original.shapes():
        np.testing.assert_array_equal(checkpoint.tensor(name), original.tensor(name))


QWEN = {
    "vocab_size": 272,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}


def write_qwen(folder: pathlib.Path, kind: str, **changes) -> pathlib.Path:
    """A folder with a random Qwen whose heads are 8 wide in the second, 16 in the third."""
    own = {"qwen2": {"architectures": ["Qwen2ForCausalLM"]}, "qwen3": {"head_dim": 16}}[kind]
    config = QWEN | {"model_type": kind} | own | changes
    shapes = expected_shapes(ModelConfig.from_hf(config, "m"))
    return tiny.write_tiny_model(folder, config, shapes, seed=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_qwen_is_the_model_of_its_folder(path, tmp_path, kind, is_tied):
    folder = write_qwen(tmp_path / "m", kind, tie_word_embeddings=is_tied)
    original = open_checkpoint(folder)
    metadata = tiny_gguf.llama_metadata(folder, kind)
    tensors = tiny_gguf.llama_tensors(folder, kind)
    assert ("blk.1.attn_q.bias" in tensors) == (kind == "qwen2")
    assert ("blk.1.attn_k_norm.weight" in tensors) == (kind == "qwen3")
    checkpoint = open_checkpoint(tiny_gguf.write_gguf(path, metadata, tensors))
    assert dataclasses.replace(checkpoint.config, rms_norm_eps=1e-6) == original.config
    check_tensors(checkpoint.config, checkpoint.shapes(), "m")
    assert checkpoint.shapes() == original.shapes()
    for name in original.shapes():
        np.testing.assert_array_equal(checkpoint.tensor(name), original.tensor(name))


def test_absent_keys_of_a_qwen_are_those_of_the_format(path, tmp_path):
    # Hugging Face's defaults for a Qwen3 are 32 key/value heads and heads 128 wide.
    folder = write_qwen(tmp_path / "m", "qwen3", head_dim=8, num_key_value_heads=6)
    metadata = tiny_gguf.llama_metadata(folder, "qwen3")
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
        del metadata[f"qwen3.{key}"]
    tiny_gguf.write_gguf(path, metadata, tiny_gguf.llama_tensors(folder, "qwen3"))
    assert open_checkpoint(path).shapes() == open_checkpoint(folder).shapes()
    assert open_checkpoint(path).config.num_kv_heads == 6
    assert open_checkpoint(path).config.head_dim == 8


def test_window_of_a_qwen_is_refused(path, tmp_path):
    folder = write_qwen(tmp_path / "m", "qwen2")
    metadata = tiny_gguf.llama_metadata(folder, "qwen2") | {"qwen2.attention.sliding_window": 8}
    tiny_gguf.write_gguf(path, metadata, tiny_gguf.llama_tensors(folder, "qwen2"))
    with pytest.raises(
        CheckpointError, match=r"qwen2\.attention\.sliding_window is 8, which is not"
    ):
        open_checkpoint(path)


def test_missing_output_ties_the_head(path, metadata, tensors):
    tied = {name: value for name, value in tensors.items() if name != "output.weight"}
    checkpoint = open_checkpoint(tiny_gguf.write_gguf(path, metadata, tied))
    assert checkpoint.config.tie_word_embeddings
    check_tensors(checkpoint.config, checkpoint.shapes(), "m")


def test_missing_package_gives_the_command(path, metadata, tensors, monkeypatch):
    tiny_gguf.write_gguf(path, metadata, tensors)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxpaged\[gguf\]'"):
        GgufCheckpoint(path)


@pytest.mark.parametrize("architecture", ["qwen2moe", "gpt2", "mamba"])
def test_other_architecture_is_refused_by_name(path, metadata, tensors, architecture):
    changed = metadata | {"general.architecture": architecture}
    tiny_gguf.write_gguf(path, changed, tensors)
    with pytest.raises(CheckpointError, match=f"general.architecture is '{architecture}'"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
        ({"llama.attention.sliding_window": 2**31}, "sliding_window is 2147483648; expected"),
        ({"llama.attention.sliding_window": [8, 8]}, r"sliding_window is \[8, 8\]; expected"),
        ({"llama.attention.sliding_window_pattern": 2}, "sliding_window_pattern: not supported"),
        ({"llama.logit_scale": 8.0}, "llama.logit_scale is 8.0"),
        ({"llama.brand_new": 1}, "llama.brand_new: not supported in a llama"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length is 4"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "factor is missing"),
        ({"llama.attention.head_count": [6, 6]}, "num_attention_heads is .* expected"),
        ({"split.count": 2}, "split over several"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "300 tokens, but llama.vocab_size is 272"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(path, metadata, tensors, changes, message):
    tiny_gguf.write_gguf(path, metadata | changes, tensors)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_missing_metadata_are_named(path, metadata, tensors):
    del (changed := dict(metadata))["llama.block_count"]
    tiny_gguf.write_gguf(path, changed, tensors)
    with pytest.raises(CheckpointError, match=r"llama\.block_count: missing"):
        open_checkpoint(path)


def test_linear_rope_scaling_is_read(path, metadata, tensors):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    tiny_gguf.write_gguf(path, metadata | scaling, tensors)
    expected = RopeScaling(rope_type="linear", factor=4.0)
    assert open_checkpoint(path).config.rope_scaling == expected


def test_window_is_that_of_all_layers_and_0_is_none(path, metadata, tensors):
    for window, windows in ((8, (8, 8)), (0, (None, None))):
        changed = metadata | {"llama.attention.sliding_window": window}
        assert (
            open_checkpoint(tiny_gguf.write_gguf(path, changed, tensors)).config.windows == windows
        )


def test_mistral_as_the_converter_writes_it_has_no_window(path, tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", model_type="mistral", sliding_window=8)
    assert open_checkpoint(folder).config.windows == (8, 8)
    tiny_gguf.write_gguf(path, tiny_gguf.llama_metadata(folder), tiny_gguf.llama_tensors(folder))
    assert open_checkpoint(path).config.windows == (None, None)


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """The divisors as llama.cpp's converter computes them, one frequency at a time."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequency_factors_of_llama3_are_recognised(path, tmp_path, factor):
    folder = tiny.write_tiny_llama(tmp_path / "m", head_dim=64, rope={"rope_theta": 500000.0})
    factors = {"rope_freqs.weight": llama3_factors(64, 500000.0, factor)}
    tiny_gguf.write_gguf(
        path, tiny_gguf.llama_metadata(folder), tiny_gguf.llama_tensors(folder) | factors
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope_scaling == RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    check_tensors(checkpoint.config, checkpoint.shapes(), "m")


def test_other_frequency_factors_are_refused_by_name(path, metadata, tensors):
    factors = {"rope_freqs.weight": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}
    tiny_gguf.write_gguf(path, metadata, tensors | factors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight holds frequency factors other"):
        open_checkpoint(path)


def test_tensor_without_equivalent_is_an_error(path, metadata, tensors):
    extra = {"blk.0.attn_sinks.weight": np.ones(8, np.float32)}
    checkpoint = open_checkpoint(tiny_gguf.write_gguf(path, metadata, tensors | extra))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight would not be used"):
        check_tensors(checkpoint.config, checkpoint.shapes(), "m")


@pytest.mark.parametrize(
    "name", ["blk.1.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias", "output.bias"]
)
def test_bias_of_one_map_alone_is_an_error(path, tmp_path, name):
    folder = tiny.write_tiny_llama(tmp_path / "plain")
    tensors = tiny_gguf.llama_tensors(folder) | {name: np.ones(32, np.float32)}
    tiny_gguf.write_gguf(path, tiny_gguf.llama_metadata(folder), tensors)
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"bias would not be used"):
        check_tensors(checkpoint.config, checkpoint.shapes(), "m")


def test_pointer_of_git_lfs_is_recognised(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_checkpoint(path)


def test_every_truncation_is_one_clear_error(path, metadata, tensors):
    content = tiny_gguf.write_gguf(path, metadata, tensors).read_bytes()
    random.seed(0)
    for length in [0, 1, 8, 23, 24, *random.sample(range(24, len(content)), 30), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf: "):
            open_checkpoint(path)


def test_random_bytes_are_one_clear_error(path):
    for seed in range(30):
        noise = random.Random(seed).randbytes(2000)
        for content in (noise, b"GGUF\3\0\0\0" + noise, b"GGUF\3\0\0\0" + bytes(16) + noise):
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match=r"model\.gguf: "):
                open_checkpoint(path)


def test_flipped_header_bytes_never_escape_as_other_errors(path, metadata, tensors):
    content = bytearray(tiny_gguf.write_gguf(path, metadata, tensors).read_bytes())
    generator = random.Random(1)
    for _ in range(80):
        changed = bytearray(content)
        changed[generator.randrange(2500)] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            checkpoint = open_checkpoint(path)
            check_tensors(checkpoint.config, checkpoint.shapes(), "m")
        except CheckpointError:
            continue
        assert checkpoint.tensor("model.norm.weight").shape == (32,)


def lying(*, kind: int = 4, length: int = 2**60, item: int = 4) -> bytes:
    """A file whose only metadata value is an array or string of a length that is a lie."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    if kind == 8:
        return head + struct.pack("<IQ", 8, length)
    return head + struct.pack("<IIQ", 9, item, length)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lying(kind=8), "a string of 1152921504606846976 bytes"),
        (lying(), "an array of 1152921504606846976 items"),
        (lying(length=2**20), "reach beyond its end"),
        (lying(item=8, length=2**20), "reaches beyond its end"),
        (lying(item=9, length=1), "an array of items of type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "1152921504606846976 metadata"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**16, 0), "reach beyond its end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**16), "reach beyond its end"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGML" + struct.pack("<IQQ", 3, 0, 0), "begins with b'GGML'"),
    ],
)
def test_lying_lengths_are_refused_at_once(path, content, message):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def with_tensor(*, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    info = struct.pack("<Q", 1) + b"w" + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_tensor(dims=[2**40]), "tensor w ends at byte .* cut short"),
        (with_tensor(dims=[2**32, 2**32]), "a tensor of shape"),
        (with_tensor(dims=[1] * 5), "a tensor with 5 axes"),
        (with_tensor(dims=[0]), "does not divide"),
        (with_tensor(dims=[33], kind=8), "does not divide into quantisation blocks of 32"),
        (with_tensor(dims=[4], kind=999), "quantisation type 999"),
        (with_tensor(dims=[4], offset=7), "tensor w is not aligned to 32 bytes"),
        (with_tensor(dims=[4], offset=2**60), "tensor w ends at byte"),
    ],
)
def test_lying_tensor_extents_are_refused(path, content, message):
    path.write_bytes(content + bytes(64))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_overlapping_tensors_are_refused(path, metadata, tensors):
    content = tiny_gguf.write_gguf(path, metadata, tensors).read_bytes()
    # The second tensor's offset is the last field of its entry, before the third one's name.
    names = list(tensors)
    third = content.index(names[2].encode(), content.index(b"token_embd")) - 8
    path.write_bytes(content[: third - 8] + struct.pack("<Q", 0) + content[third:])
    with pytest.raises(CheckpointError, match="overlap"):
        open_checkpoint(path)


def test_fingerprint_is_stable_and_tells_the_parts_apart(path, source, metadata, tensors):
    tokenizer = tiny_gguf.byte_level_metadata(tiny.tokenizer_json(272), 272)
    base = metadata | tokenizer | {"tokenizer.chat_template": "a"}

    def fingerprint(changes: dict) -> dict[str, str]:
        return open_checkpoint(tiny_gguf.write_gguf(path, base | changes, tensors)).fingerprint()

    before = fingerprint({})
    assert before == fingerprint({})
    for part, changes in {
        "config": {"llama.rope.freq_base": 20000.0},
        "tokenizer": {"tokenizer.ggml.add_bos_token": False},
        "chat_template": {"tokenizer.chat_template": "b"},
    }.items():
        after = fingerprint(changes)
        assert {key for key in before if before[key] != after[key]} == {part}
