"""Files made to cost time and memory are refused with one clear error, within bounds.

They are opened in a process of its own that may take 1 GiB more than it has and 60 seconds of a
processor; most would take many times that if their sizes were believed, or all of them parsed.
"""

import json
import pathlib
import pickle
import re
import struct
import subprocess
import sys

import pytest
import tiny

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.tensors import check_tensors

OPEN_ALL = """
import json, pathlib, resource, sys
from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint import folder, gguf
import gguf as package

pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
messages = {}
for path in sys.argv[1:]:
    try:
        open_checkpoint(pathlib.Path(path)).shapes()
    except CheckpointError as error:
        messages[path] = str(error)
print(json.dumps(messages))
"""


def refusals(*paths: pathlib.Path) -> dict[str, str]:
    """What opening each of the files says, all in one child."""
    ran = subprocess.run(
        [sys.executable, "-c", OPEN_ALL, *map(str, paths)],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def check_refused(files: dict[pathlib.Path, str]) -> None:
    """Every file is refused in words that match."""
    said = refusals(*files)
    for path, words in files.items():
        message = said.get(str(path), "opened")
        assert re.search(words, message), f"{path.name}: {message[:500]}"
        assert len(message) < 2_000


def tiny_tensors(count: int) -> bytes:
    return b",".join(b'"%d":{"dtype":"I32"}' % number for number in range(count))


HEADERS = {
    "nested_lists": (b'{"a":' + b"[" * (30 * 2**20), "more than 2097152 values"),
    "fewer_nested_lists": (b'{"a":' + b"[" * 500_000, "nested too deeply"),
    "nested_objects": (b'{"a":' * 300_000, "nested too deeply"),
    "empty_lists": (b'{"a":[' + b"[]," * (10 * 2**20) + b"[]]}", "more than 2097152 values"),
    "numbers": (b'{"a":[' + b"0," * (15 * 2**20) + b"0]}", "more than 2097152 values"),
    "tensors": (b"{%s}" % tiny_tensors(2**19), "lists 524288 tensors; expected at most 131072"),
    "long_name": (f'{{"{"x" * (30 * 2**20)}🦙": 1}}'.encode(), "is not the name of a tensor"),
    "long_shape": (b'{"a":{"dtype":"F32","shape":[%s0]}}' % (b"0," * 10**6), "malformed shape"),
    "long_number": (b'{"a":{"dtype":"F32","shape":[%s]}}' % (b"9" * 4000), "malformed shape"),
    "longer_number": (b'{"a":{"dtype":"F32","shape":[%s]}}' % (b"9" * 10**6), "header is not JSON"),
}


def test_headers_of_safetensors_are_parsed_within_bounds(tmp_path):
    files = {}
    for name, (header, words) in HEADERS.items():
        folder = tiny.write_tiny_llama(tmp_path / name, layers=1)
        content = len(header).to_bytes(8, "little") + header
        (folder / "model.safetensors").write_bytes(content)
        files[folder] = words
    folder = tiny.write_tiny_llama(tmp_path / "long", layers=1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write((10**8).to_bytes(8, "little") + b"{")
        file.truncate(2 * 10**8)
    files[folder] = "claims a header of 100000000 bytes; expected at most 33554432"
    check_refused(files)


JSON_FILES = {
    "config.json": {
        "nested": (b"[" * (100 * 2**20), "config.json: not valid JSON: it has more than"),
        "wide": (b'{"a":[' + b"[]," * (40 * 2**20), "config.json: not valid JSON: it has more"),
        "deep": (b'{"a":' * 10**6, "config.json: not valid JSON: it is nested too deeply"),
        "large": (b" " * (129 * 2**20), "larger than 134217728 bytes; not a model's file"),
        "long_value": (
            b'{"model_type":"llama","vocab_size":"%s"}' % (b"x" * (60 * 2**20)),
            "vocab_size is 'xxx|num_attention_heads is missing",
        ),
    },
    "model.safetensors.index.json": {
        "wide": (b'{"weight_map":[' + b"{}," * (40 * 2**20), "index.json: not valid JSON"),
        "files": (
            b'{"weight_map":{%s}}'
            % b",".join(b'"%d":"%d.safetensors"' % (i, i) for i in range(10**5)),
            "and 99994 more are listed in",
        ),
    },
}


def test_json_files_are_parsed_within_bounds(tmp_path):
    files = {}
    for name, contents in JSON_FILES.items():
        for kind, (content, words) in contents.items():
            folder = tiny.write_tiny_llama(tmp_path / f"{kind}_{name}", layers=1)
            if name != "config.json":
                (folder / "model.safetensors").unlink()
            (folder / name).write_bytes(content)
            files[folder] = words
    check_refused(files)


def value(key: str, content: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + content


def gguf_header(*entries: bytes, tensors: int = 0, values: int | None = None) -> bytes:
    count = len(entries) if values is None else values
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + b"".join(entries)


def array(kind: int, length: int) -> bytes:
    return struct.pack("<IIQ", 9, kind, length)


# Behind each are a billion zero bytes, which take no space on the disk: what is claimed is there.
GGUF_FILES = {
    "many_values": (gguf_header(values=2**30), "1073741824 metadata claimed"),
    "many_tensors": (gguf_header(tensors=2**30), "1073741824 tensors"),
    "empty_names": (gguf_header(values=2**15), "'' occurs twice"),
    "numbers": (gguf_header(value("a", array(4, 2**24))), "an array of 16777216 items"),
    "empty_texts": (gguf_header(value("a", array(8, 2**24))), "an array of 16777216 items"),
    "many_arrays": (
        gguf_header(*(value(f"{i}", array(0, 2**21) + bytes(2**21)) for i in range(4))),
        "an array of 2097152 items",
    ),
    "long_text": (gguf_header(value("a", struct.pack("<IQ", 8, 2**29))), "a string of 536870912"),
    "long_name": (gguf_header(struct.pack("<Q", 2**29)), "a string of 536870912"),
    "long_texts_in_array": (
        gguf_header(value("a", array(8, 2**20) + struct.pack("<Q", 2**29))),
        "reaches beyond its end",
    ),
    "large_tensor": (
        gguf_header(
            value("w", struct.pack("<I4QIQ", 4, *[2**20] * 3, 4, 0, 0)), tensors=1, values=0
        ),
        "tensor w ends at byte|a tensor of shape",
    ),
}


def test_headers_of_gguf_are_parsed_within_bounds(tmp_path):
    files = {}
    for name, (header, words) in GGUF_FILES.items():
        path = tmp_path / f"{name}.gguf"
        with path.open("wb") as file:
            file.write(header)
            file.truncate(10**9)
        files[path] = words
    check_refused(files)


ABSURD = [10**9, 10**12, 10**400, -1, 0, 1.5, 1e300, float("nan"), float("inf"), True, "4", [4], {}]


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "head_dim",
        "num_hidden_layers",
        "num_key_value_heads",
    ],
)
def test_absurd_sizes_of_a_config_are_refused(folder, key):
    config = json.loads((folder / "config.json").read_text())
    for absurd in ABSURD:
        tiny.write_json(folder / "config.json", config | {key: absurd})
        with pytest.raises(CheckpointError):
            check_tensors(open_checkpoint(folder).config, open_checkpoint(folder).shapes(), "m")


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_absurd_numbers_of_a_config_are_refused(folder, key):
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    for absurd in (10**400, -1, 0, float("nan"), float("inf"), -float("inf"), True, "4", [4], {}):
        tiny.write_json(folder / "config.json", config | {key: absurd})
        with pytest.raises(CheckpointError, match=f"{key} is"):
            open_checkpoint(folder)


def test_experts_without_end_are_refused(folder):
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_experts_per_tok": 2,
        "num_local_experts": 10**9,
    }
    tiny.write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match=r"num_local_experts is 1000000000; expected at most"):
        open_checkpoint(folder)


def pickled(folder: pathlib.Path) -> bytes:
    class Trap:
        def __reduce__(self) -> tuple:
            return pathlib.Path.touch, (folder / "ran",)

    return pickle.dumps(Trap())


def test_pickle_by_the_name_of_a_safetensors_file_is_not_run(folder):
    (folder / "model.safetensors").write_bytes(pickled(folder))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(folder).shapes()
    assert not (folder / "ran").exists()


def test_pickle_by_the_name_of_a_gguf_file_is_not_run(tmp_path):
    (tmp_path / "model.gguf").write_bytes(pickled(tmp_path))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "model.gguf")
    assert not (tmp_path / "ran").exists()


def test_pickle_that_the_index_lists_is_refused(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", num_shards=2)
    (folder / "pytorch_model.bin").write_bytes(pickled(folder))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "pytorch_model.bin"
    tiny.write_json(folder / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in 'pytorch_model\.bin'"):
        open_checkpoint(folder).shapes()
    assert not (folder / "ran").exists()
