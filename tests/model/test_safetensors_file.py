"""Headers of safetensors files are checked before data is read; data is bit-exact."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint.safetensors_file import open_safetensors


def write(
    path: pathlib.Path, header: object, data: bytes = b"", *, length: int | None = None
) -> pathlib.Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(shape: list, begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float32, "F32"), (np.float16, "F16"), (ml_dtypes.bfloat16, "BF16")]
)
def test_every_bit_arrives(path, dtype, name):
    width = np.dtype(dtype).itemsize
    # All bit patterns of 16 bits: subnormals, infinities and every NaN among them.
    bits = np.arange(2**16, dtype=np.uint16).view(np.dtype(f"u{width}")).reshape(2, -1)
    header = {"a": entry(list(bits.shape), 0, bits.nbytes, name)}
    tensor = open_safetensors(write(path, header, bits.tobytes())).tensor("a")
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.view(bits.dtype), bits)


def test_bfloat16_written_by_the_library_is_read_back(path):
    values = np.arange(-8, 8).reshape(4, 4).astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file({"w": values}, path)
    np.testing.assert_array_equal(open_safetensors(path).tensor("w"), values)


def test_metadata_is_no_tensor(path):
    file = open_safetensors(write(path, {"__metadata__": {"format": "pt"}}))
    assert file.entries == {}


def test_scalars_and_empty_tensors_are_allowed(path):
    header = {"scalar": entry([], 0, 4), "empty": entry([0, 3], 4, 4)}
    assert open_safetensors(write(path, header, b"\0" * 4)).entries["empty"].shape == (0, 3)


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\0" * 8, b"\xff" * 64, b"PK\3\4" * 16])
def test_other_content_is_one_clear_error(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        open_safetensors(path)


def test_header_longer_than_the_file_is_an_error(path):
    write(path, {}, length=10**9)
    with pytest.raises(CheckpointError, match="claims a header of 1000000000 bytes"):
        open_safetensors(path)


def test_header_beyond_the_cap_is_an_error_without_reading_it(path):
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="claims a header of 200000000 bytes"):
        open_safetensors(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1, 2]", "not a JSON object"),
        (b"{nope}", "header is not JSON"),
        (b'{"a": 1, "a": 2}', "a name occurs twice"),
        (b"[" * 5000, "header is not JSON"),
        ({"a": 1}, "tensor a has dtype None"),
        ({"a": entry([2], 0, 16, "I64")}, "tensor a has dtype 'I64'; supported are F32, F16, BF16"),
        ({"a": entry([-1], 0, 4)}, r"tensor a has the malformed shape \[-1\]"),
        ({"a": entry([1.5], 0, 4)}, "malformed shape"),
        ({"a": entry([True], 0, 4)}, "malformed shape"),
        ({"a": entry([1] * 9, 0, 4)}, "malformed shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "malformed offsets"),
        ({"a": entry([2], 0, 4)}, "tensor a of shape .* needs 8 bytes, but its offsets span 4"),
        ({"a": entry([1], 8, 4)}, "offsets span -4"),
        ({"a": entry([4], 0, 16)}, "tensor a ends at byte 16 of the data, but there are only 8"),
        ({"a": entry([2**62, 4], 0, 4)}, "needs 73786976294838206464 bytes"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "tensors a and b overlap"),
        ({"a": entry([1], 0, 4)}, "4 bytes behind the last tensor belong to no tensor"),
        ({"a": entry([1], 4, 8)}, "4 bytes before tensor a belong to no tensor"),
        ({"a": entry([2**63], 0, 8)}, "malformed shape"),
        ({"a": entry([1], 0, 2**63)}, "malformed offsets"),
        ({"a\x1b[2J": entry([2], 0, 8)}, r"'a\\x1b\[2J' is not the name of a tensor"),
        ({"a" * 513: entry([2], 0, 8)}, "'a+...a+' is not the name of a tensor"),
        ({"a": entry([2], 0, 8, ["F32"])}, r"tensor a has dtype \['F32'\]"),
    ],
)
def test_lying_header_is_named(path, header, message):
    write(path, header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(path)


def test_pointer_of_git_lfs_is_recognised(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_safetensors(path)


def test_file_that_became_shorter_is_an_error(path):
    safetensors.numpy.save_file({"w": np.zeros((8, 8), np.float32)}, path)
    file = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="tensor w: the file has become shorter"):
        file.tensor("w")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read tensor w"):
        file.tensor("w")


def test_file_cut_short_names_a_tensor(path):
    safetensors.numpy.save_file({"w": np.zeros((8, 8), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"tensor w ends at .* cut short"):
        open_safetensors(path)
