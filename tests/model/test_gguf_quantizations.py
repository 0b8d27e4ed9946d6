"""Quantised tensors of GGUF files: every number is the one that the format's definition gives."""

import pathlib
import tracemalloc

import ggml_blocks
import gguf
import ml_dtypes
import numpy as np
import pytest
import tiny
import tiny_gguf

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.gguf import GgufCheckpoint

GATE = "blk.0.ffn_gate.weight"
READ_GATE = "model.layers.0.mlp.gate_proj.weight"

# What the package dequantises and `ggml_blocks` has no definition of: its own answer counts.
BY_PACKAGE = [
    "MXFP4",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "TQ1_0",
    "TQ2_0",
]
NOT_READ = ["I8", "I32", "F64", "Q8_1", "Q8_K"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    return tiny.write_tiny_llama(tmp_path_factory.mktemp("source") / "m", layers=1)


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "model.gguf"


def with_tensors(
    path: pathlib.Path, source: pathlib.Path, packed: dict[str, tuple[str, np.ndarray]]
) -> GgufCheckpoint:
    """The source's model with some tensors given as bytes of a quantisation, `[rows, bytes]`."""
    tiny_gguf.write_gguf(
        path, tiny_gguf.llama_metadata(source), tiny_gguf.llama_tensors(source), packed
    )
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GgufCheckpoint)
    return checkpoint


@pytest.mark.parametrize("kind", ggml_blocks.KINDS)
def test_every_number_is_that_of_the_definition(path, source, kind):
    block_bytes, block_numbers, *_ = ggml_blocks.KINDS[kind]
    content = ggml_blocks.random_blocks(kind, 12)
    rows = np.frombuffer(content, np.uint8).reshape(4, 3 * block_bytes)
    read = with_tensors(path, source, {GATE: (kind, rows)}).tensor(READ_GATE)
    assert read.dtype == np.float32
    assert read.shape == (4, 3 * block_numbers)
    np.testing.assert_array_equal(read.reshape(-1), ggml_blocks.decoded(kind, content))
    assert len(np.unique(read)) > 10


@pytest.mark.parametrize("kind", BY_PACKAGE)
def test_other_kinds_are_what_the_package_makes_of_them(path, source, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    rows = np.random.default_rng(0).integers(0, 256, (6, 2 * block_bytes), dtype=np.uint8)
    read = with_tensors(path, source, {GATE: (kind, rows)}).tensor(READ_GATE)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, quantisation)
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_what_the_package_quantises_comes_back(path, source, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    rows = gguf.quants.quantize(values, quantisation)
    read = with_tensors(path, source, {GATE: (kind, rows)}).tensor(READ_GATE)
    np.testing.assert_array_equal(read, gguf.quants.dequantize(rows, quantisation))
    assert np.abs(read - values).max() < {"4": 0.4, "5": 0.2}.get(kind[1], 0.03)


@pytest.mark.parametrize("kind", [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_16_bits_arrive_as_they_are(path, source, kind):
    name, dtype = kind
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    checkpoint = with_tensors(path, source, {GATE: (name, bits.view(np.uint8))})
    np.testing.assert_array_equal(checkpoint.tensor(READ_GATE), bits.view(dtype).astype(np.float32))


def test_kinds_may_differ_from_tensor_to_tensor(path, source):
    names = {
        "blk.0.ffn_gate": "gate_proj",
        "blk.0.ffn_up": "up_proj",
        "blk.0.ffn_down": "down_proj",
    }
    contents = {
        stem: (kind, ggml_blocks.random_blocks(kind, 2))
        for stem, kind in zip(names, ("Q4_K", "Q6_K", "Q8_0"), strict=True)
    }
    packed = {
        f"{stem}.weight": (kind, np.frombuffer(content, np.uint8).reshape(2, -1))
        for stem, (kind, content) in contents.items()
    }
    checkpoint = with_tensors(path, source, packed)
    for stem, (kind, content) in contents.items():
        read = checkpoint.tensor(f"model.layers.0.mlp.{names[stem]}.weight")
        np.testing.assert_array_equal(read.reshape(-1), ggml_blocks.decoded(kind, content))
    original = open_checkpoint(source)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
        np.testing.assert_array_equal(checkpoint.tensor(name), original.tensor(name))


@pytest.mark.parametrize("kind", NOT_READ)
def test_other_kinds_are_refused_by_name(path, source, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    rows = np.zeros((2, block_bytes), np.uint8)
    checkpoint = with_tensors(path, source, {GATE: (kind, rows)})
    with pytest.raises(CheckpointError, match=f"quantisation {kind} is not supported"):
        checkpoint.tensor(READ_GATE)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_large_tensor_needs_little_more_than_itself(path, source, kind):
    # 8 million numbers, in pieces; the package by itself would take twice the result.
    block_numbers = ggml_blocks.KINDS[kind][1]
    block = np.frombuffer(ggml_blocks.random_blocks(kind, 1), np.uint8)
    rows = np.tile(block, (2**23 // 2048, 2048 // block_numbers))
    checkpoint = with_tensors(path, source, {GATE: (kind, rows)})
    checkpoint.shapes()
    tracemalloc.start()
    try:
        read = checkpoint.tensor(READ_GATE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read.nbytes == 32 * 2**20
    assert peak < read.nbytes + 24 * 2**20
    expected = np.resize(ggml_blocks.decoded(kind, block.tobytes()), read.shape)
    np.testing.assert_array_equal(read, expected)


def test_damaged_scales_show_in_the_values(path, source):
    block = bytearray(ggml_blocks.random_blocks("Q4_0", 2))
    block[0:2], block[18:20] = b"\x00\x7e", b"\x00\x7c"
    rows = np.frombuffer(bytes(block), np.uint8).reshape(2, 18)
    read = with_tensors(path, source, {GATE: ("Q4_0", rows)}).tensor(READ_GATE)
    assert np.isnan(read[0]).all()
    assert not np.isfinite(read[1]).any()
