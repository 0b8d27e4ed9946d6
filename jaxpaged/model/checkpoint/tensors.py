"""Which tensors a Llama has and of what shapes, by their Hugging Face names.

Knows nothing of file formats.
"""

from collections.abc import Iterable, Mapping

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config import ModelConfig

Shape = tuple[int, ...]

HEAD = "lm_head.weight"

_NAMED_AT_MOST = 6


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name to shape ([out, in] for projections) of every tensor the model is made of."""
    width = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (width,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (width,)
        for name, shape, has_bias in _projections(config):
            shapes[f"{prefix}.{name}.weight"] = shape
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, width)
    return shapes


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
            f"{len(expected)} tensors"
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
                f"for {list(shape)}"
            )


def _projections(config: ModelConfig) -> tuple[tuple[str, Shape, bool], ...]:
    """Name within the layer, shape, and whether there is a bias."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return (
        ("self_attn.q_proj", (queries, width), config.attention_bias),
        ("self_attn.k_proj", (keys, width), config.attention_bias),
        ("self_attn.v_proj", (keys, width), config.attention_bias),
        ("self_attn.o_proj", (width, queries), config.attention_bias),
        ("mlp.gate_proj", (inner, width), config.mlp_bias),
        ("mlp.up_proj", (inner, width), config.mlp_bias),
        ("mlp.down_proj", (width, inner), config.mlp_bias),
    )


def _is_ignored(name: str, config: ModelConfig) -> bool:
    is_rotary_table = name.endswith("rotary_emb.inv_freq")
    return is_rotary_table or (name == HEAD and config.tie_word_embeddings)


def _names(tensors: Iterable[str]) -> str:
    names = sorted(tensors)
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more}"
