"""Writes tiny models in Hugging Face layout, for tests of every layer.

    folder = write_tiny_llama(tmp_path / "tiny")                 # random weights
    folder = write_scripted_llama(tmp_path / "s", {65: 66})      # token 65 is followed by 66

Ids 0, 1 and 2 are `<unk>`, `<s>` and `</s>`; from 3 on there is one token for each byte
(`byte_id`), then a few merged pairs, so that every text can be encoded.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
import safetensors.numpy

TokenizerKind = Literal["bytes", "sentencepiece"]
ModelType = Literal["llama", "mistral"]

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
FIRST_BYTE_ID = 3

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def byte_id(byte: int) -> int:
    """The id of the token of one byte, in either tokenizer."""
    return FIRST_BYTE_ID + byte


def write_tiny_llama(
    folder: pathlib.Path,
    *,
    vocab_size: int = 272,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 64,
    tie: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    seed: int = 0,
    max_position_embeddings: int = 256,
    eos_token_id: int | Sequence[int] = EOS_ID,
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    num_shards: int = 1,
    tokenizer: TokenizerKind = "bytes",
    add_bos: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
    rope: Mapping[str, Any] | None = None,
    model_type: ModelType = "llama",
    sliding_window: int | None = None,
    layer_types: Sequence[str] | None = None,
    more_config: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """A new folder with a random Llama; returns it.

    Args:
        folder: Is created.
        vocab_size: At least 259, so that every byte has a token.
        hidden: Model width; heads are `head_dim` or hidden / heads wide.
        eos_token_id: Of generation_config.json; the tokenizer's own is always 2.
        num_shards: 1 writes model.safetensors, more write shards and their index.
        tokenizer: "bytes" is byte-level BPE; "sentencepiece" is BPE with Metaspace and byte
            fallback.
        add_bos: The tokenizer puts `<s>` in front.
        rope: `rope_parameters` of config.json.
        model_type: "mistral" has the same weights, and the window in all layers.
        sliding_window: Of config.json.
        layer_types: Of config.json: "full_attention" or "sliding_attention" for each layer.
        more_config: Further keys of config.json; they win.
    """
    width = head_dim or hidden // heads
    tensors = _random_tensors(
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        queries=heads * width,
        keys=kv_heads * width,
        intermediate=intermediate,
        tie=tie,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        seed=seed,
    )
    config = {
        "architectures": [f"{model_type.title()}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | dict(rope or {}),
        "tie_word_embeddings": tie,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": dtype,
        "sliding_window": sliding_window,
    }
    if layer_types is not None:
        config["layer_types"] = list(layer_types)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config | dict(more_config or {}))
    eos_ids = eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos_ids})
    write_weights(folder, {k: v.astype(_DTYPES[dtype]) for k, v in tensors.items()}, num_shards)
    write_tokenizer(folder, vocab_size, kind=tokenizer, add_bos=add_bos, template=chat_template)
    return folder


def write_tiny_model(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    seed: int,
) -> pathlib.Path:
    """A new folder with a random model of any family; returns it.

    Args:
        folder: Is created.
        config: The whole config.json.
        shapes: Name to shape of every tensor, as the family's checkpoints have them.
        seed: Of the numbers: each tensor's depend on it and on the tensor's place among the names.
    """
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    tensors = {}
    for place, name in enumerate(sorted(shapes)):
        random = np.random.default_rng([seed, place])
        values = random.standard_normal(tuple(shapes[name]))
        tensors[name] = (_spread(name, shapes[name]) * values + _middle(name)).astype(np.float32)
    write_weights(folder, tensors)
    write_tokenizer(folder, config["vocab_size"])
    return folder


def _spread(name: str, shape: Sequence[int]) -> float:
    """Of a tensor's numbers: such that values stay about 1 through the layers."""
    if "norm" in name or name.endswith(".bias"):
        return 0.2
    # Small: in a model whose head is the embedding, a token would only be followed by itself.
    return 0.15 if "embed_tokens" in name else 1.5 * shape[-1] ** -0.5


def _middle(name: str) -> float:
    # Norms whose weights have 1 added scale by about 2, which is as good.
    return 1.0 if "norm" in name else 0.0


def write_scripted_llama(
    folder: pathlib.Path,
    successors: Mapping[int, int],
    *,
    default: int = EOS_ID,
    vocab_size: int = 272,
    layers: int = 1,
    max_position_embeddings: int = 256,
    eos_token_id: int | Sequence[int] = EOS_ID,
    tokenizer: TokenizerKind = "bytes",
) -> pathlib.Path:
    """A new folder with a Llama that always follows a token by its successor; returns it.

    The layers add nothing, embeddings are one-hot, and the head is the table of successors: the
    successor's logit is about 16.5, all others are 0.

    Args:
        folder: Is created.
        successors: Token id to the id that follows it.
        default: What follows every other token.
        layers: Decoder layers, all without effect (they still fill the pool).
    """
    write_tiny_llama(
        folder,
        vocab_size=vocab_size,
        hidden=vocab_size,
        layers=layers,
        intermediate=16,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=eos_token_id,
        tokenizer=tokenizer,
    )
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    identity = np.eye(vocab_size, dtype=np.float32)
    following = [successors.get(token, default) for token in range(vocab_size)]
    for name, value in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = np.zeros_like(value)
    tensors["model.embed_tokens.weight"] = identity
    tensors["model.norm.weight"] = np.ones(vocab_size, np.float32)
    tensors["lm_head.weight"] = np.ascontiguousarray(identity[following].T)
    write_weights(folder, tensors)
    return folder


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def write_weights(
    folder: pathlib.Path, tensors: Mapping[str, np.ndarray], num_shards: int = 1
) -> None:
    """model.safetensors, or as many shards as asked for with their index."""
    if num_shards == 1:
        safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        weight_map |= dict.fromkeys(part, name)
        safetensors.numpy.save_file(part, folder / name)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def write_tokenizer(
    folder: pathlib.Path,
    vocab_size: int,
    *,
    kind: TokenizerKind = "bytes",
    add_bos: bool = True,
    template: str | None = CHAT_TEMPLATE,
) -> None:
    """tokenizer.json and tokenizer_config.json."""
    write_json(folder / "tokenizer.json", tokenizer_json(vocab_size, kind=kind, add_bos=add_bos))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)


def tokenizer_json(
    vocab_size: int, *, kind: TokenizerKind = "bytes", add_bos: bool = True
) -> dict[str, Any]:
    """The content of a tokenizer.json as the `tokenizers` library writes it."""
    if vocab_size < FIRST_BYTE_ID + 256:
        raise ValueError(f"vocab_size {vocab_size} is below 259: not every byte has a token")
    vocab, merges = _vocabulary(vocab_size, kind)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(index) for index in range(FIRST_BYTE_ID)],
        "post_processor": _bos_in_front() if add_bos else None,
        **(_BYTE_LEVEL if kind == "bytes" else _METASPACE),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": kind == "sentencepiece",
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_LETTERS = "▁etaoinshrdlu"
_MERGED_PAIRS = (
    (" ", "t"), (" ", "a"), ("h", "e"), ("i", "n"), ("r", "e"), ("o", "n"), (" t", "he"),
    ("e", "r"), (" ", "s"), ("a", "t"), (" ", "o"), ("e", "n"), (" ", "d"),
)  # fmt: skip

_BYTE_LEVEL = {
    "normalizer": None,
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    },
}
_METASPACE = {
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}


def _vocabulary(vocab_size: int, kind: str) -> tuple[dict[str, int], list[list[str]]]:
    """Token to id, and the merges; ids left over have no token, as in padded real models."""
    singles = _byte_characters() if kind == "bytes" else [f"<0x{b:02X}>" for b in range(256)]
    letters = "" if kind == "bytes" else _LETTERS
    tokens = [*_SPECIAL_TOKENS, *singles, *letters][:vocab_size]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for pair in _MERGED_PAIRS:
        left, right = (part.replace(" ", "Ġ" if kind == "bytes" else "▁") for part in pair)
        if left in vocab and right in vocab and len(vocab) < vocab_size:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    return vocab, merges


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    is_itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in is_itself else next(others)) for byte in range(256)]


def _special_token(index: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": _SPECIAL_TOKENS[index], **flags, "special": True}


def _bos_in_front() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            bos,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
    }


def _random_tensors(
    *,
    vocab_size: int,
    hidden: int,
    layers: int,
    queries: int,
    keys: int,
    intermediate: int,
    tie: bool,
    attention_bias: bool,
    mlp_bias: bool,
    seed: int,
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    def norm() -> np.ndarray:
        return 1.0 + normal(hidden, scale=0.1)

    projections = (
        ("self_attn.q_proj", queries, hidden, attention_bias),
        ("self_attn.k_proj", keys, hidden, attention_bias),
        ("self_attn.v_proj", keys, hidden, attention_bias),
        ("self_attn.o_proj", hidden, queries, attention_bias),
        ("mlp.gate_proj", intermediate, hidden, mlp_bias),
        ("mlp.up_proj", intermediate, hidden, mlp_bias),
        ("mlp.down_proj", hidden, intermediate, mlp_bias),
    )
    tensors = {"model.embed_tokens.weight": normal(vocab_size, hidden, scale=1.0)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = norm()
        tensors[f"{prefix}.post_attention_layernorm.weight"] = norm()
        for name, rows, columns, has_bias in projections:
            tensors[f"{prefix}.{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            if has_bias:
                tensors[f"{prefix}.{name}.bias"] = normal(rows, scale=0.2)
    tensors["model.norm.weight"] = norm()
    if not tie:
        # Logits with a spread of about 3: greedy choices are clear, samples are varied.
        tensors["lm_head.weight"] = normal(vocab_size, hidden, scale=3.0 * hidden**-0.5)
    return tensors
