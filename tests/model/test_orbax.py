"""Damaged and hostile folders in Orbax's format are refused, by messages that say what to do."""

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tiny

from jaxpaged import convert
from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint, orbax_arrays
from jaxpaged.model.checkpoint.orbax_index import MARKER
from jaxpaged.model.checkpoint.tensors import check_tensors

UP = "layers.mlp.up_proj.kernel"
PIECE = f"{UP}.000"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> pathlib.Path:
    """A checkpoint that no test changes."""
    folder = tmp_path_factory.mktemp("orbax")
    source = tiny.write_tiny_llama(folder / "source")
    return convert.convert(str(source), folder / "converted")


@pytest.fixture
def mine(converted, tmp_path) -> pathlib.Path:
    """A copy to be damaged."""
    return shutil.copytree(converted, tmp_path / "mine")


def rewrite(folder: pathlib.Path, *keys: str, value: Any) -> None:  # noqa: ANN401
    """Sets a value of the index; `...` removes it."""
    path = folder / MARKER
    index = json.loads(path.read_text())
    *outer, last = keys
    inner = index
    for key in outer:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(index))


def largest(folder: pathlib.Path, array: str = UP) -> pathlib.Path:
    """The file with an array's values."""
    files = [path for path in (folder / "weights" / f"{array}.000").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_copy_is_the_same_model(converted, mine):
    assert open_checkpoint(mine).fingerprint() == open_checkpoint(converted).fingerprint()
    assert open_checkpoint(mine).weight_files()


def test_looking_at_it_loads_neither_orbax_nor_jax(converted):
    code = (
        "import pathlib, sys",
        "from jaxpaged.model.checkpoint import open_checkpoint",
        f"found = open_checkpoint(pathlib.Path({str(converted)!r}))",
        "found.shapes(), found.fingerprint(), found.tokenizer(), found.weight_files()",
        "print(sorted({'jax', 'orbax', 'tensorstore'} & sys.modules.keys()))",
    )
    root = pathlib.Path(convert.__file__).parents[1]
    command = [sys.executable, "-c", "\n".join(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("version", [0, 2, 99])
def test_other_version_is_refused_by_number(mine, version):
    rewrite(mine, "version", value=version)
    with pytest.raises(CheckpointError, match=rf"version {version}, this jaxpaged reads version 1"):
        open_checkpoint(mine)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("format",), "other", "not the index of a checkpoint"),
        (("version",), "1", "not the index of a checkpoint"),
        (("version",), ..., "not the index of a checkpoint"),
        (("config",), ..., "damaged: config"),
        (("config",), [], "damaged: config"),
        (("config", "hidden_size"), "32", r"config\.hidden_size"),
        (("config", "num_layers"), "2", r"config\.num_layers"),
        (("config", "num_layers"), 10**9, "num_layers"),
        (("config", "num_layers"), 0, "num_layers is 0"),
        (("config", "num_layers"), 3, "2 windows for 3 layers"),
        (("config", "head_dim"), 7, "head_dim"),
        (("config", "vocab_size"), -1, "vocab_size is -1"),
        (("config", "num_kv_heads"), 3, "num_kv_heads"),
        (("config", "activation"), "relu", r"config\.activation"),
        (("config", "from_the_future"), True, "from_the_future: not known to this version"),
        (("arrays", UP, "dtype"), "object", "dtype"),
        (("arrays", UP, "shape"), [2, -1], "shape"),
        (("arrays", UP, "shape"), [2, 2**50, 4], "shape"),
        (("arrays", UP, "shape"), [], "shape"),
        (("arrays", UP, "rows"), 0, "pieces of 0 rows"),
        (("arrays", UP, "rows"), 3, "pieces of 3 rows"),
        (("arrays", "embed_tokens", "shape"), [2**39, 32], "pieces of 272 rows"),
        (
            ("arrays", "../up"),
            {"shape": [1], "dtype": "float32", "rows": 1, "sha256": ""},
            "not the name",
        ),
        (("files", "../../etc/passwd"), 5, "not a file below"),
        (("files", "/etc/passwd"), 5, "not a file below"),
        (("files", "none"), 5, "none: cannot be read"),
    ],
    ids=str,
)
def test_index_that_lies_is_refused(mine, keys, value, message):
    rewrite(mine, *keys, value=value)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(mine)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_index_that_is_no_json_is_refused(mine, content):
    (mine / MARKER).write_bytes(content)
    with pytest.raises(CheckpointError, match=MARKER):
        open_checkpoint(mine)


def test_index_that_is_a_folder_is_refused(mine):
    (mine / MARKER).unlink()
    (mine / MARKER).mkdir()
    with pytest.raises(CheckpointError, match="is not a file"):
        open_checkpoint(mine)


def test_missing_array_is_named_before_weights_are_read(mine):
    rewrite(mine, "arrays", "norm.scale", value=...)
    found = open_checkpoint(mine)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight missing"):
        check_tensors(found.config, found.shapes(), str(mine))
    with pytest.raises(CheckpointError, match=r"array norm\.scale is missing"):
        next(found.pieces("norm.scale"))
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        found.tensor("model.norm.weight")


@pytest.mark.parametrize(
    ("shape", "message"),
    [([2, 64, 32], "tensor model.layers.0.mlp.up_proj.weight has shape"), ([3, 32, 64], "shape")],
)
def test_changed_shape_is_named_before_weights_are_read(mine, shape, message):
    rewrite(mine, "arrays", UP, "shape", value=shape)
    found = open_checkpoint(mine)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(found.config, found.shapes(), str(mine))


def test_array_of_another_shape_than_the_index_says_is_refused(mine):
    other = mine / "weights" / PIECE
    shutil.rmtree(other)
    orbax_arrays.save(other, np.zeros((2, 64, 32), np.float32))
    files = {
        path.relative_to(mine / "weights").as_posix(): path.stat().st_size
        for path in (mine / "weights").rglob("*")
        if path.is_file()
    }
    rewrite(mine, "files", value=files)
    found = open_checkpoint(mine)
    with pytest.raises(
        CheckpointError, match=r"has shape \[2, 64, 32\]; its index says \[2, 32, 6"
    ):
        found.tensor("model.layers.0.mlp.up_proj.weight")


def test_array_of_another_dtype_than_the_index_says_is_refused(mine):
    rewrite(mine, "arrays", UP, "dtype", value="bfloat16")
    with pytest.raises(CheckpointError, match="is float32; its index says bfloat16"):
        open_checkpoint(mine).tensor("model.layers.0.mlp.up_proj.weight")


def test_missing_folder_of_an_array_is_refused(mine):
    shutil.rmtree(mine / "weights" / PIECE)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*copy the whole folder"):
        open_checkpoint(mine)


def test_truncated_values_are_refused_without_being_read(mine):
    path = largest(mine)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is cut short or was changed"):
        open_checkpoint(mine)


def test_values_that_are_gone_are_refused(mine):
    largest(mine).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(mine)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA"])
def test_garbage_of_the_right_size_is_refused_when_it_is_read(mine, name):
    path = mine / "weights" / PIECE / name
    path.write_bytes(b"\x07" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(mine).tensor("model.layers.0.mlp.up_proj.weight")


def test_link_out_of_the_folder_is_refused(mine, tmp_path):
    path = largest(mine)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside the model folder"):
        open_checkpoint(mine)


def test_folder_that_is_a_link_out_is_refused(mine, tmp_path):
    (mine / "weights" / PIECE).rename(tmp_path / "elsewhere")
    (mine / "weights" / PIECE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside the model folder"):
        open_checkpoint(mine)


def test_link_inside_the_folder_is_followed(mine):
    path = largest(mine)
    path.rename(mine / "moved")
    path.symlink_to(mine / "moved")
    assert open_checkpoint(mine).tensor("model.layers.0.mlp.up_proj.weight").shape == (64, 32)


@pytest.mark.parametrize("place", ["checkpoint", f"{PIECE}/checkpoint", f"{PIECE}/d/more.pkl"])
def test_file_that_nobody_wrote_is_refused(mine, place):
    # Of another Orbax's layout: it would be read in the place of the values.
    (mine / "weights" / place).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="not a file that was written with the others"):
        open_checkpoint(mine)


def test_changed_config_json_is_refused_since_it_would_do_nothing(mine):
    path = mine / "config.json"
    path.write_text(path.read_text().replace("10000.0", "20000.0"))
    with pytest.raises(CheckpointError, match="change it in the source and convert that again"):
        open_checkpoint(mine)


def test_changed_template_is_another_model(mine, converted):
    (mine / "chat_template.jinja").write_text("{{ messages[0].content }}")
    before, after = open_checkpoint(converted).fingerprint(), open_checkpoint(mine).fingerprint()
    assert {part for part in before if before[part] != after[part]} == {"chat_template"}


def test_missing_tokenizer_is_told(mine):
    (mine / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        open_checkpoint(mine).fingerprint()
