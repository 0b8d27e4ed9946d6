"""Writes tiny Llama models as `.gguf` files, from the folders that `tiny` writes."""

import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from jaxpaged.model.checkpoint import open_checkpoint

Metadata = dict[str, Any]


def llama_metadata(folder: pathlib.Path, architecture: str = "llama") -> Metadata:
    """The metadata that llama.cpp's converter writes for the model in a folder; no window."""
    config = open_checkpoint(folder).config
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": architecture, **named}


def byte_level_metadata(tokenizer_json: Mapping[str, Any], vocab_size: int) -> Metadata:
    """The metadata of the byte-level tokenizer that `tiny` writes; its ids 0 to 2 are control."""
    model = tokenizer_json["model"]
    tokens = [*model["vocab"], *(f"[PAD{i}]" for i in range(len(model["vocab"]), vocab_size))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i < 3 else 1 for i in range(vocab_size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def llama_tensors(folder: pathlib.Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """The folder's tensors as llama.cpp's converter names and orders them."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    tensors = {}
    for name in checkpoint.shapes():
        value = checkpoint.tensor(name)
        if ".q_proj." in name and architecture == "llama":
            value = _permute(value, config.num_heads)
        if ".k_proj." in name and architecture == "llama":
            value = _permute(value, config.num_kv_heads)
        tensors[_gguf_name(name)] = value
    return tensors


def write_gguf(
    path: pathlib.Path,
    metadata: Metadata,
    tensors: Mapping[str, np.ndarray],
    packed: Mapping[str, tuple[str, np.ndarray]] | None = None,
) -> pathlib.Path:
    """A new `.gguf` file; returns it. Floats are written as float32, whole numbers as uint32.

    Args:
        packed: Tensors that take the place of others: their quantisation, and its bytes.
    """
    writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
    adders = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if key != "general.architecture":
            adders[type(value)](key, value)
    for name, tensor in tensors.items():
        if packed is not None and name in packed:
            kind, content = packed[name]
            raw_dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, content, raw_dtype=raw_dtype)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_STEMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        stems = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
        stem, _, kind = name.rpartition(".")
        return f"{stems.get(stem, 'output')}.{kind}"
    _, _, layer, stem = name.split(".", 3)
    stem, _, kind = stem.rpartition(".")
    return f"blk.{layer}.{_STEMS[stem]}.{kind}"


def _permute(value: np.ndarray, num_heads: int) -> np.ndarray:
    """Row h*D + i of a head goes to h*D + 2*i for the first half, 2*(i - D/2) + 1 for the other."""
    width = value.shape[0] // num_heads
    half = width // 2
    order = [
        head * width + (pair if is_first else half + pair)
        for head in range(num_heads)
        for pair in range(half)
        for is_first in (True, False)
    ]
    return np.ascontiguousarray(value[order])
