"""Whatever bytes a model's files hold: it opens and every tensor can be read, or one clear error.

Valid files are damaged at random, and headers are made up of lies. Nothing but a `CheckpointError`
may come out; a file that opens must give every tensor in its shape.
"""

import json
import pathlib
import re
import struct
from typing import Any

import numpy as np
import packers
import pytest
import tiny
import tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.safetensors_file import open_safetensors
from jaxpaged.model.checkpoint.tensors import check_tensors

unhurried = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])

NUMBERS = [
    0,
    1,
    2,
    31,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
TEXTS = [b"[", b"{", b'"', b"}", b"]", b",", b"\\", b"\\ud800", b"\xff", b"NaN", b"1e999", b"null"]
TEXTS += [b"true", b"-1", b"9" * 30, b"9" * 5000, b'"dtype":"I32"', b"[" * 2000, b'{"a":' * 300]
OUTSIDE = ["../x.safetensors", "/x.safetensors", "a\\x.safetensors", "", ".", "model.bin"]
KEYS = ["general.architecture", "general.alignment", "llama.block_count", "split.count"]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([*NUMBERS, -1, 10**400, 1.5, float("nan"), float("inf"), -float("inf")])
    | st.sampled_from(["", "F32", "\ud800", "silu", "x" * 500]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)


def read_all(path: pathlib.Path) -> bool:
    """Whether the model opens; then all of its tensors have been read."""
    message = ""
    try:
        checkpoint = open_checkpoint(path)
        shapes = checkpoint.shapes()
        check_tensors(checkpoint.config, shapes, "m")
        checkpoint.fingerprint()
        for name, shape in shapes.items():
            tensor = checkpoint.tensor(name)
            assert tensor.shape == tuple(shape)
            assert tensor.dtype.itemsize >= 2
    except CheckpointError as error:
        message = str(error)
    # Short, whatever the file holds.
    assert len(message) < 10_000
    return not message


@st.composite
def damage(draw: st.DrawFn, content: bytes, reach: int) -> bytes:
    """`content` with a few bytes changed, put in or taken out among the first `reach`."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, min(reach, len(changed))))
        kind = draw(st.sampled_from(["set", "number", "text", "remove", "cut"]))
        if kind == "set":
            changed[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            layout = draw(st.sampled_from(["<I", "<Q"]))
            number = draw(st.sampled_from(NUMBERS)) % 2 ** (8 * struct.calcsize(layout))
            changed[place : place + struct.calcsize(layout)] = struct.pack(layout, number)
        elif kind == "text":
            changed[place:place] = draw(st.sampled_from(TEXTS))
        elif kind == "remove":
            del changed[place : place + draw(st.integers(1, 40))]
        else:
            del changed[draw(st.integers(0, len(changed))) :]
    return bytes(changed)


FORMATS = {
    "plain": None,
    "awq": packers.awq(),
    "gptq": packers.gptq(is_ordered=True),
    "fp8": packers.fp8(block=(48, 40), scale_name="weight_scale_inv"),
}


@pytest.fixture(scope="module", params=FORMATS)
def folder(request, tmp_path_factory) -> pathlib.Path:
    packer = FORMATS[request.param]
    place = tmp_path_factory.mktemp("damaged")
    if packer is None:
        return tiny.write_tiny_llama(place / "m", layers=1)
    return packers.write_pair(place, packer, layers=1)[0]


@pytest.fixture(scope="module")
def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def header_of(content: bytes) -> bytes:
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


def test_the_files_to_be_damaged_open(folder):
    assert read_all(folder)


@given(st.data())
@unhurried
def test_damaged_safetensors(folder, weights, data):
    header = header_of(weights)
    changed = data.draw(damage(weights, 8 + len(header)))
    if data.draw(st.booleans()):
        # The header's length follows, so that its JSON is looked at.
        length = len(header) + len(changed) - len(weights)
        changed = max(length, 0).to_bytes(8, "little") + changed[8:]
    (folder / "model.safetensors").write_bytes(changed)
    read_all(folder)
    (folder / "model.safetensors").write_bytes(weights)


@given(st.data())
@unhurried
def test_numbers_of_a_safetensors_header_lie(folder, weights, data):
    header = header_of(weights)
    places = [match.span() for match in re.finditer(rb"(?<=[\[ ])\d+", header)]
    begin, end = data.draw(st.sampled_from(places))
    lie = str(data.draw(st.sampled_from([*NUMBERS, -1, 1.5, 10**30]))).encode()
    changed = header[:begin] + lie + header[end:]
    content = len(changed).to_bytes(8, "little") + changed + weights[8 + len(header) :]
    (folder / "model.safetensors").write_bytes(content)
    read_all(folder)
    (folder / "model.safetensors").write_bytes(weights)


sizes = st.sampled_from([*NUMBERS, 3, 4, 8, 16, -1])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F8_E4M3", "I32", "F64", "", None, 3]),
        "shape": st.lists(sizes, max_size=9) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "\n", "\ud800"]), entries))
@unhurried
def test_made_up_safetensors_header(tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "made_up.safetensors"
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(16))
    try:
        file = open_safetensors(path)
    except CheckpointError:
        return
    for name, entry in file.entries.items():
        assert file.tensor(name).shape == entry.shape


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> tuple[pathlib.Path, bytes, int]:
    """A valid file, its bytes, and where its header ends."""
    place = tmp_path_factory.mktemp("gguf")
    source = tiny.write_tiny_llama(place / "m", layers=1)
    tokenizer = tiny_gguf.byte_level_metadata(tiny.tokenizer_json(272), 272)
    tensors = tiny_gguf.llama_tensors(source)
    metadata = tiny_gguf.llama_metadata(source) | tokenizer
    path = tiny_gguf.write_gguf(place / "model.gguf", metadata, tensors)
    content = path.read_bytes()
    return path, content, len(content) - sum(tensor.nbytes for tensor in tensors.values())


def test_the_gguf_file_to_be_damaged_opens(gguf_file):
    assert read_all(gguf_file[0])


@given(st.data())
@unhurried
def test_damaged_gguf(gguf_file, data):
    path, content, header_bytes = gguf_file
    path.write_bytes(data.draw(damage(content, header_bytes)))
    read_all(path)
    path.write_bytes(content)


@given(st.data())
@unhurried
def test_damaged_tensor_table_of_a_gguf_file(gguf_file, data):
    path, content, header_bytes = gguf_file
    table = content.index(b"token_embd") - 8
    changed = content[:table] + data.draw(damage(content[table:], header_bytes - table))
    path.write_bytes(changed)
    read_all(path)
    path.write_bytes(content)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


lengths = st.sampled_from(NUMBERS)
kinds = st.integers(0, 14)
values = (
    st.builds(lambda kind, number: struct.pack("<IQ", kind, number), kinds, lengths)
    | st.builds(lambda kind, n: struct.pack("<IIQ", 9, kind, n) + bytes(16), kinds, lengths)
    | st.builds(lambda number: struct.pack("<II", 4, number % 2**32), lengths)
)
keys = st.sampled_from(
    [*KEYS, "llama.embedding_length", "llama.attention.head_count", "tokenizer.ggml.tokens"]
)
stored_tensors = st.builds(
    lambda dims, kind, offset: (
        struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)
    ),
    st.lists(lengths, max_size=5),
    st.integers(0, 45),
    lengths,
)


@given(st.dictionaries(keys, values), st.dictionaries(st.text(max_size=3), stored_tensors))
@unhurried
def test_made_up_gguf_header(tmp_path_factory, metadata, tensors):
    path = tmp_path_factory.getbasetemp() / "made_up.gguf"
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata) + 1)
    content += text("general.name") + struct.pack("<I", 8) + text("llama")
    for table in (metadata, tensors):
        content += b"".join(text(name) + entry for name, entry in table.items())
    path.write_bytes(content + bytes(64))
    assert not read_all(path)


CONFIG_KEYS = [
    "architectures", "attention_bias", "head_dim", "hidden_act", "hidden_size", "layer_types",
    "intermediate_size", "max_position_embeddings", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "quantization_config", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings",
    "torch_dtype", "unheard_of", "vocab_size",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, min_size=1, max_size=3))
@unhurried
def test_made_up_config(folder, changes):
    path = folder / "config.json"
    before = path.read_bytes()
    path.write_text(json.dumps(json.loads(before) | changes))
    read_all(folder)
    path.write_bytes(before)


SETTINGS = [
    "bits", "checkpoint_format", "config_groups", "desc_act", "dynamic", "fmt", "format",
    "group_size", "quant_method", "version", "weight_block_size", "zero_point",
]  # fmt: skip
METHODS = st.sampled_from(
    ["awq", "gptq", "fp8", "compressed-tensors", "gemm", 4, 8, 32, -1, [48, 40]]
)


@given(st.dictionaries(st.sampled_from(SETTINGS), json_values | METHODS, min_size=1, max_size=3))
@unhurried
def test_made_up_quantization_config(folder, changes):
    path = folder / "config.json"
    before = path.read_bytes()
    content = json.loads(before)
    changed = content.get("quantization_config", {}) | changes
    path.write_text(json.dumps(content | {"quantization_config": changed}))
    read_all(folder)
    path.write_bytes(before)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> pathlib.Path:
    return tiny.write_tiny_llama(tmp_path_factory.mktemp("sharded") / "m", layers=1, num_shards=2)


SHARD = "model-00001-of-00002.safetensors"
names = st.sampled_from(
    [*OUTSIDE, SHARD, "\ud800.safetensors", "x" * 300 + ".safetensors", "\0.safetensors"]
)
tensor_names = st.sampled_from(["model.norm.weight", "ghost", "\ud800", ""])


@given(st.dictionaries(tensor_names, names | json_values, min_size=1) | json_values)
@unhurried
def test_made_up_index(sharded, weight_map):
    path = sharded / "model.safetensors.index.json"
    before = path.read_bytes()
    content: dict[str, Any] = json.loads(before)
    if isinstance(weight_map, dict):
        weight_map = content["weight_map"] | weight_map
    path.write_text(json.dumps({"weight_map": weight_map}))
    read_all(sharded)
    path.write_bytes(before)


def test_data_of_any_kind_is_read(folder, weights):
    # Scales that are infinite or not a number, groups at random: values or one clear error.
    header = header_of(weights)
    for seed in range(20):
        noise = np.random.default_rng(seed).bytes(len(weights) - 8 - len(header))
        (folder / "model.safetensors").write_bytes(weights[: 8 + len(header)] + noise)
        read_all(folder)
    (folder / "model.safetensors").write_bytes(weights)
