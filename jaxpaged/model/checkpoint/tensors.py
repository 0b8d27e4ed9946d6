"""Which tensors a model has and of what shapes, by their Hugging Face names.

Knows nothing of file formats.
"""

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config import ModelConfig

Shape = tuple[int, ...]

HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"

_NAMED_AT_MOST = 6
_MAX_NAME = 512


_NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "behind": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}

# A fused tensor and the projections that are its rows, in their order.
FUSED_MAPS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


# Parts of names in a Llama or Qwen3 and what a Mixtral has in their place.
_MIXTRAL = {
    "mlp.": "block_sparse_moe.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


class TensorSource(NamedTuple):
    """Where a checkpoint holds a tensor of the decoder."""

    name: str
    rows: slice


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may be called so: short, and without what a terminal would not print."""
    return len(name) <= _MAX_NAME and name.isprintable()


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name to shape ([out, in] for projections) of every tensor the model is made of."""
    width = config.hidden_size
    shapes: dict[str, Shape] = {_EMBEDDING: (config.vocab_size, width)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name in _NORMS[config.norm_places]:
            shapes[f"{prefix}.{name}.weight"] = (width,)
        for name, size in _query_key_norms(config).items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = (size,)
        for name, shape, has_bias in _stored_projections(config):
            shapes[f"{prefix}.{name}.weight"] = shape
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, width)
    return shapes


def tensor_source(config: ModelConfig, name: str) -> TensorSource:
    """Where the checkpoint holds a tensor that the decoder knows by the name it has in a Llama."""
    if config.tensor_layout == "mixtral":
        return TensorSource(_as_mixtral(name), slice(None))
    if config.tensor_layout == "llama":
        return TensorSource(name, slice(None))
    sizes = {part: shape[0] for part, shape, _ in _projections(config)}
    for fused, parts in FUSED_MAPS.items():
        first = 0
        for part in parts:
            if f".{part}." in name:
                rows = slice(first, first + sizes[part])
                return TensorSource(name.replace(part, fused), rows)
            first += sizes[part]
    return TensorSource(name, slice(None))


def linear_maps(config: ModelConfig) -> dict[str, Shape]:
    """Name within a layer to shape ([out, in]) of the linear maps that all tokens go through."""
    is_routed = config.experts is not None
    return {
        name: shape
        for name, shape, _ in _projections(config)
        if not (is_routed and name.startswith("mlp."))
    }


def stored_maps(config: ModelConfig, *, fused: bool) -> dict[str, tuple[str, ...]]:
    """By the names that files have for them, the linear maps that are the rows of each.

    Args:
        config: The model.
        fused: The files hold several maps in one tensor, as those of a Phi-3 do.
    """
    single = {name: (name,) for name in linear_maps(config)}
    if not fused:
        return single
    held = {part for parts in FUSED_MAPS.values() for part in parts}
    return FUSED_MAPS | {name: parts for name, parts in single.items() if name not in held}


def check_tensors(config: ModelConfig, shapes: Mapping[str, Shape], where: str) -> None:
    """Compares the tensors of a file with the ones the configuration asks for.

    A tied model's own head is ignored, since the embedding is its head, and so are the rotary
    tables that old exporters wrote.

    Args:
        config: What is asked for.
        shapes: Name to shape of every tensor there is.
        where: Names the model in errors.

    Raises:
        CheckpointError: Tensors are missing, have the wrong shape, or would not be used.
    """
    expected = expected_shapes(config)
    missing = expected.keys() - shapes.keys()
    if missing:
        raise CheckpointError(
            f"{where}: {_names(missing)} missing; the configuration asks for "
            f"{len(expected)} tensors{_called_otherwise(missing, shapes)}"
        )
    extra = {name for name in shapes.keys() - expected.keys() if not _is_ignored(name, config)}
    if extra:
        raise CheckpointError(
            f"{where}: {_names(extra)} would not be used by the model that the configuration "
            "describes; the weights belong to another architecture or another configuration"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(shapes[name])}; the configuration asks "
                f"for {list(shape)}{_resized(name, shape, tuple(shapes[name]))}"
            )


def _query_key_norms(config: ModelConfig) -> dict[str, int]:
    """Name within attention, and width."""
    if config.query_key_norm == "none":
        return {}
    heads = (config.num_heads, config.num_kv_heads) if config.query_key_norm == "width" else (1, 1)
    return dict(
        zip(("q_norm", "k_norm"), (count * config.head_dim for count in heads), strict=True)
    )


def _stored_projections(config: ModelConfig) -> tuple[tuple[str, Shape, bool], ...]:
    """The projections as the checkpoint holds them, fused or each by itself."""
    single = _projections(config)
    if config.tensor_layout == "mixtral":
        return tuple((_as_mixtral(name), shape, bias) for name, shape, bias in single)
    if config.tensor_layout == "llama":
        return single
    by_name = {name: (shape, has_bias) for name, shape, has_bias in single}
    fused = []
    for name, parts in FUSED_MAPS.items():
        rows = sum(by_name[part][0][0] for part in parts)
        fused.append((name, (rows, config.hidden_size), by_name[parts[0]][1]))
    held = {part for parts in FUSED_MAPS.values() for part in parts}
    return (*fused, *(one for one in single if one[0] not in held))


def _projections(config: ModelConfig) -> tuple[tuple[str, Shape, bool], ...]:
    """Name within the layer, shape, and whether there is a bias."""
    width = config.hidden_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    has_bias = config.attention_bias or config.qkv_bias
    return (
        ("self_attn.q_proj", (queries, width), has_bias),
        ("self_attn.k_proj", (keys, width), has_bias),
        ("self_attn.v_proj", (keys, width), has_bias),
        ("self_attn.o_proj", (width, queries), config.attention_bias),
        *_feed_forward(config),
    )


def _feed_forward(config: ModelConfig) -> list[tuple[str, Shape, bool]]:
    width, inner = config.hidden_size, config.intermediate_size
    maps = (
        ("gate_proj", (inner, width)),
        ("up_proj", (inner, width)),
        ("down_proj", (width, inner)),
    )
    if config.experts is None:
        return [(f"mlp.{name}", shape, config.mlp_bias) for name, shape in maps]
    count = config.experts.count
    return [("mlp.gate", (count, width), False)] + [
        (f"mlp.experts.{expert}.{name}", shape, False)
        for expert in range(count)
        for name, shape in maps
    ]


def _as_mixtral(name: str) -> str:
    for ours, its in _MIXTRAL.items():
        name = name.replace(ours, its)
    return name


def _is_ignored(name: str, config: ModelConfig) -> bool:
    is_rotary_table = name.endswith("rotary_emb.inv_freq")
    return is_rotary_table or (name == HEAD and config.tie_word_embeddings)


def _called_otherwise(missing: Set[str], shapes: Mapping[str, Shape]) -> str:
    """A remark where the tensors seem to be there by other names."""
    name = min(missing - {HEAD}, default=HEAD)
    bare = name.removeprefix("model.")
    found = next((other for other in shapes if other == bare or other.endswith(f".{name}")), None)
    if found is None:
        return ""
    return (
        f". There is {found}: the file is of a part of this model, or of one that it is a part of. "
        "Save it again as the causal language model that config.json names (with transformers: "
        "AutoModelForCausalLM.from_pretrained, then save_pretrained)"
    )


def _resized(name: str, asked: Shape, found: Shape) -> str:
    """A remark where only the number of rows of the vocabulary differs."""
    if name not in (_EMBEDDING, HEAD) or len(found) != 2 or found[1:] != asked[1:]:
        return ""
    return (
        f". The vocabulary was resized or padded without config.json: set vocab_size to {found[0]} "
        "there if both embedding and head have so many rows"
    )


def _names(tensors: Iterable[str]) -> str:
    names = sorted(tensors)
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more}"
