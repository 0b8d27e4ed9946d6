"""Folders in Hugging Face layout: what is read, what is ignored, what is refused."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.tensors import check_tensors, expected_shapes

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path) -> pathlib.Path:
    return tiny.write_tiny_llama(tmp_path / "sharded", num_shards=2)


def edit_index(folder: pathlib.Path, tensor: str, name: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][tensor] = name
    tiny.write_json(folder / INDEX, index)


def checked_shapes(folder: pathlib.Path) -> dict:
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint.config, checkpoint.shapes(), str(folder))
    return checkpoint.shapes()


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_all_tensors_arrive_from_any_number_of_files(tmp_path, shared_folder, num_shards):
    folder = tiny.write_tiny_llama(tmp_path / "m", num_shards=num_shards)
    checkpoint = open_checkpoint(folder)
    expected = safetensors.numpy.load_file(shared_folder / "model.safetensors")
    assert checkpoint.shapes() == expected_shapes(checkpoint.config)
    for name, value in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_dtype_is_kept(tmp_path, dtype):
    folder = tiny.write_tiny_llama(tmp_path / "m", dtype=np.dtype(dtype).name)
    assert open_checkpoint(folder).tensor("model.norm.weight").dtype == dtype


def test_biases_are_read(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", attention_bias=True, mlp_bias=True)
    assert checked_shapes(folder)["model.layers.0.mlp.down_proj.bias"] == (32,)
    assert np.any(open_checkpoint(folder).tensor("model.layers.0.self_attn.o_proj.bias"))


def test_biases_that_the_configuration_lacks_are_an_error(tmp_path):
    folder = tiny.write_tiny_llama(
        tmp_path / "m", attention_bias=True, more_config={"attention_bias": False}
    )
    with pytest.raises(CheckpointError, match=r"q_proj\.bias.* would not be used"):
        checked_shapes(folder)


def test_tied_head_with_and_without_tensor(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "tied", tie=True)
    assert "lm_head.weight" not in checked_shapes(folder)
    with_head = tiny.write_tiny_llama(
        tmp_path / "with", tie=False, more_config={"tie_word_embeddings": True}
    )
    checked_shapes(with_head)


def test_untied_head_without_tensor_is_an_error(tmp_path):
    folder = tiny.write_tiny_llama(
        tmp_path / "m", tie=True, more_config={"tie_word_embeddings": False}
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight missing"):
        checked_shapes(folder)


def test_missing_shard_is_named_before_any_is_read(sharded):
    missing = "model-00002-of-00002.safetensors"
    (sharded / missing).unlink()
    # The shard that is left could not be read either: it is not looked at.
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=f"{missing} is listed in .* but missing"):
        open_checkpoint(sharded).shapes()


def test_files_that_the_index_does_not_list_are_ignored(sharded):
    safetensors.numpy.save_file(
        {"stray": np.ones(4, np.float32)}, sharded / "consolidated.safetensors"
    )
    (sharded / "pytorch_model.bin").write_bytes(b"pickle")
    assert "stray" not in checked_shapes(sharded)


def test_tensor_beside_the_listed_ones_in_a_shard_is_an_error(sharded):
    shard = sharded / "model-00001-of-00002.safetensors"
    tensors = safetensors.numpy.load_file(shard) | {"extra.weight": np.ones(2, np.float32)}
    safetensors.numpy.save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=r"extra\.weight would not be used"):
        checked_shapes(sharded)


def test_tensor_that_two_shards_hold_is_that_of_the_index(sharded):
    first, second = (sharded / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    tensors = safetensors.numpy.load_file(second)
    name = sorted(tensors)[0]
    other = {name: tensors[name] + 1.0}
    safetensors.numpy.save_file(safetensors.numpy.load_file(first) | other, first)
    np.testing.assert_array_equal(open_checkpoint(sharded).tensor(name), tensors[name])
    edit_index(sharded, name, first.name)
    np.testing.assert_array_equal(open_checkpoint(sharded).tensor(name), other[name])


def test_shard_cut_short_is_named(sharded):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: .* cut short"):
        open_checkpoint(sharded).shapes()


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-00002.safetensors"])
def test_pointer_of_git_lfs_is_recognised(sharded, name):
    (sharded / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match=rf"{name}: is not the file, but .*git lfs pull"):
        open_checkpoint(sharded).shapes()


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00002-of-00002.safetensors"])
def test_any_file_that_is_a_link_out_of_the_folder_is_refused(sharded, name):
    outside = sharded.parent / "outside"
    (sharded / name).rename(outside)
    # By way of another link, which lies inside.
    (sharded / "hop").symlink_to(outside)
    (sharded / name).symlink_to("hop")
    with pytest.raises(CheckpointError, match=r"is a link to .*outside, outside the model folder"):
        open_checkpoint(sharded).shapes()


def test_link_that_leads_nowhere_is_a_missing_file(sharded):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("gone")
    with pytest.raises(CheckpointError, match=f"{shard.name} is listed in .* but missing"):
        open_checkpoint(sharded).shapes()


def test_folder_may_be_a_link_itself(sharded, tmp_path):
    (tmp_path / "link").symlink_to(sharded)
    assert "model.norm.weight" in checked_shapes(tmp_path / "link")


def test_tensor_that_its_shard_lacks_is_named(sharded):
    edit_index(sharded, "model.ghost.weight", "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"00001.*tensor model\.ghost\.weight is missing"):
        open_checkpoint(sharded).shapes()


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/tmp/x.safetensors",
        "a\\b.safetensors",
        "sub/x.safetensors",
        "C:x.safetensors",
        "..\\x.safetensors",
        "~/x.safetensors",
    ],
)
def test_index_that_leads_out_of_the_folder_is_refused(sharded, name):
    safetensors.numpy.save_file(
        {"model.norm.weight": np.ones(32, np.float32)}, sharded.parent / "x.safetensors"
    )
    edit_index(sharded, "model.norm.weight", name)
    with pytest.raises(CheckpointError, match="not the plain name of a file inside"):
        open_checkpoint(sharded).shapes()


@pytest.mark.parametrize("name", ["model.bin", "weights", "", 7, None, "a\0.safetensors"])
def test_index_that_names_other_files_is_refused(sharded, name):
    edit_index(sharded, "model.norm.weight", name)
    with pytest.raises(CheckpointError, match=r"weight_map places model\.norm\.weight in"):
        open_checkpoint(sharded).shapes()


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": [1]}])
def test_index_without_map_is_refused(sharded, content):
    tiny.write_json(sharded / INDEX, content)
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map is missing or empty"):
        open_checkpoint(sharded).shapes()


def test_link_out_of_the_folder_is_refused(folder):
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"is a link to .* outside the model folder"):
        open_checkpoint(folder).shapes()


def test_link_inside_the_folder_is_followed(folder):
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    assert "model.norm.weight" in checked_shapes(folder)


def test_hub_cache_links_to_its_own_blobs_are_followed(folder):
    cache = folder.parent / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(pathlib.Path("../../blobs", str(number)))
    assert "model.norm.weight" in checked_shapes(snapshot)
    assert open_checkpoint(snapshot).tokenizer().bos_id == tiny.BOS_ID


def test_hub_cache_link_to_another_models_blobs_is_refused(folder):
    cache = folder.parent / "models--org--name" / "snapshots"
    cache.mkdir(parents=True)
    snapshot = folder.rename(cache / "abc")
    other = folder.parent / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (snapshot / "model.safetensors").rename(other / "1")
    (snapshot / "model.safetensors").symlink_to(other / "1")
    with pytest.raises(CheckpointError, match="outside the model folder"):
        open_checkpoint(snapshot).shapes()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_alone_are_refused_with_the_remedy(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=f"only {name}.* convert the model to safetensors"):
        open_checkpoint(folder).shapes()


def test_folder_without_weights_says_so(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(folder).shapes()


def test_folder_without_config_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"[]", "found list"), (b"\xff\xfe", "not valid JSON")],
)
def test_broken_config_is_one_clear_error(folder, content, message):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        open_checkpoint(folder)


def test_tensor_that_is_not_there_is_named(shared_folder):
    with pytest.raises(CheckpointError, match=r"tensor nope is missing"):
        open_checkpoint(shared_folder).tensor("nope")


def test_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="neither a folder"):
        open_checkpoint(path)


def test_fingerprint_is_stable_and_tells_the_parts_apart(folder):
    before = open_checkpoint(folder).fingerprint()
    assert before == open_checkpoint(folder).fingerprint()
    assert before.keys() == {
        "config",
        "generation_config",
        "tokenizer",
        "chat_template",
        "weights",
    }
    changes = {
        "config": ("config.json", b'{"rms_norm_eps": 1e-05', b'{"rms_norm_eps": 1e-06'),
        "generation_config": ("generation_config.json", b"2", b"3"),
        "tokenizer": ("tokenizer.json", b'"version": "1.0"', b'"version": "1.1"'),
    }
    for part, (name, old, new) in changes.items():
        content = (folder / name).read_bytes()
        changed = content.replace(old, new) if old in content else content + b" "
        (folder / name).write_bytes(changed)
        after = open_checkpoint(folder).fingerprint()
        assert {key for key in before if before[key] != after[key]} == {part}
        (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tiny.write_weights(folder, {"w": np.zeros(3, np.float32)})
    after = open_checkpoint(folder).fingerprint()
    assert {key for key in before if before[key] != after[key]} == {"chat_template", "weights"}
