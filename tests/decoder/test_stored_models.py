"""What a checkpoint holds is what the decoder has: heads tied or not, biases, every bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny
import tiny_gguf
from forward import last_logits

from jaxpaged.errors import CheckpointError
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint

PROMPT = list(range(3, 40))


def load(path, dtype="float32"):
    return weights.load(open_checkpoint(path), dtype=jnp.dtype(dtype), layer_loop="scan")


def test_head_of_a_tied_model_is_the_embedding_whatever_the_file_holds(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", tie=True)
    expected = last_logits(load(folder), PROMPT)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for head in (tensors["model.embed_tokens.weight"], np.ones((272, 32), np.float32)):
        tiny.write_weights(folder, tensors | {"lm_head.weight": head})
        np.testing.assert_array_equal(last_logits(load(folder), PROMPT), expected)


def test_untied_model_has_its_own_head(tmp_path):
    tied = tiny.write_tiny_llama(tmp_path / "tied", tie=True)
    folder = tiny.write_tiny_llama(tmp_path / "own", tie=False)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert np.abs(last_logits(load(folder), PROMPT) - last_logits(load(tied), PROMPT)).max() > 0.1
    tiny.write_weights(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    np.testing.assert_allclose(
        last_logits(load(folder), PROMPT), last_logits(load(tied), PROMPT), atol=1e-4
    )


def test_untied_model_without_a_head_is_an_error_before_anything_is_read(tmp_path):
    folder = tiny.write_tiny_llama(
        tmp_path / "m", tie=True, more_config={"tie_word_embeddings": False}
    )
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight missing"):
        load(folder)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_every_bit_arrives_in_the_decoder(tmp_path, dtype):
    folder = tiny.write_tiny_llama(tmp_path / "m", dtype=np.dtype(dtype).name)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    wide = np.dtype(dtype).itemsize == 4
    unsigned = np.uint32 if wide else np.uint16
    # Subnormals, infinities and every kind of NaN among them.
    bits = np.arange(272 * 32, dtype=np.uint32) * (2**32 // (272 * 32) if wide else 7)
    values = bits.astype(unsigned).view(dtype).reshape(272, 32)
    tiny.write_weights(folder, tensors | {"model.embed_tokens.weight": values})
    embedding = np.asarray(load(folder, np.dtype(dtype).name).embed_tokens[...])
    np.testing.assert_array_equal(embedding.view(unsigned), values.view(unsigned))


def test_gguf_file_gives_the_logits_of_its_folder(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", attention_bias=True, mlp_bias=True, kv_heads=1)
    path = tiny_gguf.write_gguf(
        tmp_path / "m.gguf", tiny_gguf.llama_metadata(folder), tiny_gguf.llama_tensors(folder)
    )
    np.testing.assert_array_equal(
        last_logits(load(path), PROMPT), last_logits(load(folder), PROMPT)
    )


def test_no_bias_of_a_checkpoint_is_without_effect(tmp_path):
    folder = tiny.write_tiny_llama(tmp_path / "m", attention_bias=True, mlp_bias=True, layers=1)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    expected = last_logits(load(folder), PROMPT)
    biases = [name for name in tensors if name.endswith(".bias")]
    assert len(biases) == 7
    for name in biases:
        random = np.random.default_rng(0).standard_normal(tensors[name].shape)
        changed = tensors | {name: random.astype(np.float32)}
        tiny.write_weights(folder, changed)
        difference = np.abs(last_logits(load(folder), PROMPT) - expected).max()
        assert difference > 1e-3, name
