"""A model of any format becomes an Orbax checkpoint that gives the same decoder and tokenizer."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny
import tiny_gguf
from flax import nnx

from jaxpaged import convert
from jaxpaged.errors import CheckpointError, ConfigError, OutputConflictError, StorageError
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint, tokenizer_files
from jaxpaged.model.checkpoint.orbax_index import MARKER

TEXTS = [
    "",
    "the cat",
    " on the\n\nmat ",
    "naïve <s>x</s> 😀",
    "<assistant>",
    "a  b\tc",
    "0123 456",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """A tiny Llama, in bfloat16 and shards."""
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return tiny.write_tiny_llama(folder, dtype="bfloat16", num_shards=3, attention_bias=True)


@pytest.fixture(scope="module")
def converted(model) -> pathlib.Path:
    """The same as an Orbax checkpoint, which no test changes."""
    return convert.convert(str(model), model.with_name("converted"))


def metadata_of(folder: pathlib.Path) -> dict[str, object]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab_size = open_checkpoint(folder).config.vocab_size
    return {
        **tiny_gguf.llama_metadata(folder),
        **tiny_gguf.byte_level_metadata(tokenizer, vocab_size),
    }


def decoder(path: pathlib.Path, **options) -> dict[str, np.ndarray]:
    """The decoder's arrays by their place."""
    options = {"dtype": jnp.dtype("float32"), "layer_loop": "scan"} | options
    state = nnx.state(weights.load(open_checkpoint(path), **options))
    return {str(place): np.asarray(value[...]) for place, value in nnx.to_flat_state(state)}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.dtype == other[name].dtype, name
        np.testing.assert_array_equal(values, other[name], err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": jnp.dtype("bfloat16")},
        {"dtype": jnp.dtype("float16")},
        {"layer_loop": "unrolled"},
        {"layer_loop": "unrolled", "dtype": jnp.dtype("bfloat16")},
        {"attention": "llvm"},
    ],
    ids=str,
)
def test_decoder_has_the_bits_of_the_source(model, converted, options):
    assert_same(decoder(converted, **options), decoder(model, **options))


def test_checkpoints_are_alike_by_name(model, converted):
    source, found = open_checkpoint(model), open_checkpoint(converted)
    assert found.config == source.config
    assert found.shapes() == source.shapes()
    for name in source.shapes():
        assert found.stored_dtype(name) == source.stored_dtype(name) == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found.tensor(name), source.tensor(name))


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenizer_of_a_folder_stays(tmp_path, kind, add_bos):
    folder = tiny.write_tiny_llama(
        tmp_path / "m", tokenizer=kind, add_bos=add_bos, eos_token_id=[2, 5]
    )
    found = convert.convert(str(folder), tmp_path / "out")
    one, other = open_checkpoint(folder).tokenizer(), open_checkpoint(found).tokenizer()
    assert tokenizer_files.differences(one, other) == []
    assert other.eos_ids == {2, 5}
    assert [other.encode(text) for text in TEXTS] == [one.encode(text) for text in TEXTS]


def test_packaged_gguf_keeps_config_tokenizer_and_template(packaged_model, tmp_path):
    source = open_checkpoint(packaged_model)
    found = open_checkpoint(convert.convert(str(packaged_model), tmp_path / "out"))
    assert found.config == source.config
    one, other = source.tokenizer(), found.tokenizer()
    texts = [
        *TEXTS,
        "<|im_start|>user\nHi<|im_end|>\n",
        "It's 12,345.67 — déjà vu",
        "漢字 かな",
        "a" * 99,
    ]
    assert [other.encode(text) for text in texts] == [one.encode(text) for text in texts]
    marked = [one.protect(text) for text in texts]
    assert [other.encode(text) for text in marked] == [one.encode(text) for text in marked]
    assert (other.eos_ids, other.bos_id, other.adds_bos) == (one.eos_ids, one.bos_id, one.adds_bos)
    assert other.special_tokens == one.special_tokens
    messages = [{"role": "user", "content": "Hi"}]
    assert other.chat_template.render(messages) == one.chat_template.render(messages)
    # Quantised, so bfloat16; what was float32 stays.
    assert found.stored_dtype("model.embed_tokens.weight") == ml_dtypes.bfloat16
    assert found.stored_dtype("model.norm.weight") == np.float32
    name = "model.layers.3.self_attn.q_proj.weight"
    expected = source.tensor(name).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.tensor(name), expected)


@pytest.mark.parametrize("tie", [True, False])
def test_gguf_in_float32_has_the_bits_of_the_source(tmp_path, tie):
    folder = tiny.write_tiny_llama(tmp_path / "tiny", tie=tie, tokenizer="bytes")
    tensors = tiny_gguf.llama_tensors(folder)
    source = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", metadata_of(folder), tensors)
    found = convert.convert(str(source), tmp_path / "out", dtype="float32")
    assert_same(decoder(found), decoder(source))
    one, other = open_checkpoint(source).tokenizer(), open_checkpoint(found).tokenizer()
    assert tokenizer_files.differences(one, other) == []


def test_gguf_without_template_or_bos(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "tiny", chat_template=None)
    kept = {k: v for k, v in metadata_of(folder).items() if "bos" not in k and "chat" not in k}
    tensors = tiny_gguf.llama_tensors(folder)
    source = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", kept, tensors)
    found = convert.convert(str(source), tmp_path / "out")
    one, other = open_checkpoint(source).tokenizer(), open_checkpoint(found).tokenizer()
    assert tokenizer_files.differences(one, other) == []
    assert other.chat_template is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_as_asked_for(model, tmp_path, dtype):
    found = open_checkpoint(convert.convert(str(model), tmp_path / "out", dtype=dtype))
    assert {found.stored_dtype(name).name for name in found.shapes()} == {dtype}
    name = "model.layers.1.mlp.down_proj.weight"
    expected = open_checkpoint(model).tensor(name).astype(np.dtype(dtype))
    np.testing.assert_array_equal(found.tensor(name), expected)


def test_tensors_of_one_kind_and_several_dtypes_become_float32(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "tiny", dtype="bfloat16")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tiny.write_weights(folder, tensors | {name: tensors[name].astype(np.float16)})
    found = open_checkpoint(convert.convert(str(folder), tmp_path / "out"))
    assert found.stored_dtype("model.layers.0.mlp.up_proj.weight") == np.float32
    assert_same(decoder(found.path), decoder(folder))


def test_converted_model_converts_again(converted, tmp_path):
    found = convert.convert(str(converted), tmp_path / "out", dtype="float32")
    assert_same(decoder(found), decoder(converted))
    source = json.loads((found / MARKER).read_text())["source"]
    assert source["format"] == "orbax"


def test_provenance_says_what_it_was_made_from(model, converted):
    index = json.loads((converted / MARKER).read_text())
    source = index["source"]
    assert source["model"] == str(model)
    assert source["format"] == "safetensors"
    assert source["fingerprint"] == open_checkpoint(model).fingerprint()
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in model.glob("*.safetensors")
    }
    assert source["weight_files"] == digests
    assert {"jaxpaged", "orbax-checkpoint", "jax", "python"} <= index["versions"].keys()
    assert index["created"].endswith("+00:00")


def test_fingerprint_is_of_the_model_and_not_of_the_writing(model, converted, tmp_path):
    again = open_checkpoint(convert.convert(str(model), tmp_path / "again"))
    assert again.fingerprint() == open_checkpoint(converted).fingerprint()
    other = open_checkpoint(convert.convert(str(model), tmp_path / "other", dtype="float32"))
    changed = {
        part for part, digest in other.fingerprint().items() if digest != again.fingerprint()[part]
    }
    assert changed == {"weights"}


def test_orbax_reads_the_folder_as_one_composite_checkpoint(converted):
    import orbax.checkpoint as ocp

    index = json.loads((converted / MARKER).read_text())
    items = {f"{name}.000": ocp.args.PyTreeRestore() for name in index["arrays"]}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(converted / "weights", args=ocp.args.Composite(**items))
    shapes = {name: list(found[f"{name}.000"]["array"].shape) for name in index["arrays"]}
    assert shapes == {name: array["shape"] for name, array in index["arrays"].items()}


def test_target_that_holds_something_is_refused_and_left(model, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(OutputConflictError, match="is there already"):
        convert.convert(str(model), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    with pytest.raises(OutputConflictError, match="is there already"):
        convert.convert(str(model), tmp_path / "kept.txt")


def test_empty_target_is_taken(model, tmp_path):
    (tmp_path / "out").mkdir()
    assert_same(decoder(convert.convert(str(model), tmp_path / "out")), decoder(model))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_target_may_be_a_link_to_an_empty_folder(model, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert convert.convert(str(model), tmp_path / "link") == tmp_path / "disk"
    assert (tmp_path / "link").is_symlink()
    assert open_checkpoint(tmp_path / "link").shapes()


def test_other_files_of_the_folder_are_neither_read_nor_taken_along(model, tmp_path):
    source = shutil.copytree(model, tmp_path / "source")
    (source / "trainer_state.json").write_bytes(b"")
    os.truncate(source / "trainer_state.json", 2**28)
    (source / "notes.json").symlink_to(tmp_path / "elsewhere.json")
    found = convert.convert(str(source), tmp_path / "target")
    assert not {"trainer_state.json", "notes.json"} & {path.name for path in found.iterdir()}


def test_model_that_is_wrong_leaves_nothing(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "tiny")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tiny.write_weights(folder, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight missing"):
        convert.convert(str(folder), tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []
    with pytest.raises(ConfigError, match="does not exist"):
        convert.convert(str(tmp_path / "none"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def child(*code: str) -> subprocess.Popen:
    """A process that runs these lines."""
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(convert.__file__).parents[1],
    )


def test_kill_leaves_no_target_and_the_next_attempt_names_what_is_left(model, tmp_path):
    target = tmp_path / "out"
    code = (
        "import os, signal, pathlib",
        "from jaxpaged import convert",
        "def note(text):",
        "    if text.startswith('written layers.mlp.up_proj'):",
        "        os.kill(os.getpid(), signal.SIGKILL)",
        f"convert.convert({str(model)!r}, pathlib.Path({str(target)!r}), note=note)",
    )
    with child(*code) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    (left,) = tmp_path.iterdir()
    notes: list[str] = []
    convert.convert(str(model), target, note=notes.append)
    assert_same(decoder(target), decoder(model))
    assert any(str(left) in note and "killed" in note for note in notes)


def test_disk_that_takes_no_more_is_told_and_nothing_is_left(model, tmp_path):
    target = tmp_path / "out"
    code = (
        "import pathlib, resource, signal",
        "from jaxpaged import convert, errors",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000))",
        "try:",
        f"    convert.convert({str(model)!r}, pathlib.Path({str(target)!r}), dtype='float32')",
        "except errors.StorageError as error:",
        "    print(error)",
    )
    with child(*code) as process:
        out, error = process.communicate()
    assert "cannot be written" in out, error
    assert list(tmp_path.iterdir()) == []


def test_parent_that_is_a_file_is_told(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be"):
        convert.convert(str(model), tmp_path / "file" / "out")


def test_experts_and_fused_tensors_are_stored_as_the_decoder_has_them(tmp_path):
    config = {
        "model_type": "phi3",
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.qkv_proj.weight": (64, 32),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_up_proj.weight": (96, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (272, 32), "lm_head.weight": (272, 32)}
    shapes |= {"model.norm.weight": (32,)}
    folder = tiny.write_tiny_model(tmp_path / "phi3", config, shapes, seed=0)
    found = convert.convert(str(folder), tmp_path / "out")
    assert_same(decoder(found), decoder(folder))
    expected = dataclasses.replace(open_checkpoint(folder).config, tensor_layout="llama")
    assert open_checkpoint(found).config == expected


def test_routed_experts_are_stored_as_the_decoder_has_them(tmp_path):
    config = {
        "model_type": "mixtral",
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "block_sparse_moe.gate.weight": (3, 32),
        **{f"self_attn.{name}_proj.weight": (16, 32) for name in "kv"},
        **{f"self_attn.{name}_proj.weight": (32, 32) for name in "qo"},
        **{
            f"block_sparse_moe.experts.{expert}.{name}.weight": (48, 32)
            for expert in range(3)
            for name in ("w1", "w3")
        },
        **{f"block_sparse_moe.experts.{expert}.w2.weight": (32, 48) for expert in range(3)},
    }
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (272, 32), "lm_head.weight": (272, 32)}
    shapes |= {"model.norm.weight": (32,)}
    folder = tiny.write_tiny_model(tmp_path / "mixtral", config, shapes, seed=0)
    found = convert.convert(str(folder), tmp_path / "out")
    for loop in ("scan", "unrolled"):
        assert_same(decoder(found, layer_loop=loop), decoder(folder, layer_loop=loop))


@pytest.mark.parametrize("loop", ["scan", "unrolled"])
def test_arrays_in_several_pieces_are_put_together(tmp_path, loop):
    shape = {"hidden": 256, "layers": 5, "intermediate": 7168, "vocab_size": 34_000, "tie": True}
    folder = tiny.write_tiny_llama(tmp_path / "tiny", **shape)
    found = convert.convert(str(folder), tmp_path / "out")
    arrays = json.loads((found / MARKER).read_text())["arrays"]
    # 7 MiB a layer, and 33 MiB of embeddings.
    assert arrays["layers.mlp.up_proj.kernel"]["rows"] == 1
    assert arrays["layers.self_attn.q_proj.kernel"]["rows"] == 5
    assert arrays["embed_tokens"]["rows"] == 8192
    assert (found / "weights" / "layers.mlp.up_proj.kernel.001").is_dir()
    assert_same(decoder(found, layer_loop=loop), decoder(folder, layer_loop=loop))
    name = "model.embed_tokens.weight"
    source = open_checkpoint(folder)
    np.testing.assert_array_equal(open_checkpoint(found).tensor(name), source.tensor(name))
