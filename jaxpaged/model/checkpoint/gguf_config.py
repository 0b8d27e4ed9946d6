"""The model configuration in the metadata of a GGUF file.

Every key of the architecture is honoured, known to be without effect, or refused by name.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint.gguf_header import GgufHeader, Value
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_rope import RopeScaling
from jaxpaged.model.shown import shown

# The architectures of files, which are Hugging Face's model types too.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# GGUF key below the architecture's name to the Hugging Face key; all of them must be there.
_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_CHECKED_BELOW = frozenset(
    {
        "attention.sliding_window",
        "attention.value_length",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
    }
)
# The values with which a key leaves the model as it is.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}


def build_config(header: GgufHeader, rope_factors: np.ndarray | None, where: str) -> ModelConfig:
    """The configuration of the model in a GGUF file.

    Args:
        header: The file's header.
        rope_factors: The content of `rope_freqs.weight`, or None when there is none.
        where: Names the file in errors.

    Raises:
        CheckpointError: Another architecture, a missing key, or one that is not supported.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{where}: general.architecture is {shown(architecture)}, which is not supported; "
            f"supported are {', '.join(map(repr, _ARCHITECTURES))}"
        )
    if header.metadata.get("split.count", 1) != 1:
        raise CheckpointError(
            f"{where}: split.count is {shown(header.metadata['split.count'])}: models split over "
            "several .gguf files are not supported; merge them with llama.cpp's gguf-split"
        )
    prefix = f"{architecture}."
    keys = _Keys(
        architecture=str(architecture),
        values={
            key.removeprefix(prefix): value
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        },
        where=where,
    )
    _check_keys(keys)
    config = ModelConfig.from_hf(_to_hf(keys, header), where)
    config = dataclasses.replace(config, windows=(_window(keys),) * config.num_layers)
    _check_head_dim(keys, config.head_dim)
    _check_vocabulary(keys, header, config.vocab_size)
    if rope_factors is None:
        return config
    return _with_rope_factors(config, rope_factors, where)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The keys of the architecture, without its name in front."""

    architecture: str
    values: Mapping[str, Value]
    where: str

    def fail(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.where}: {self.architecture}.{key} is {shown(self.values[key])}{expected}"
        )

    def named(self, keys: Iterable[str]) -> str:
        return ", ".join(sorted(f"{self.architecture}.{key}" for key in keys))


def _check_keys(keys: _Keys) -> None:
    known = _REQUIRED.keys() | _OPTIONAL.keys() | _CHECKED_BELOW | _NEUTRAL.keys()
    unknown = keys.values.keys() - known
    if unknown:
        raise CheckpointError(
            f"{keys.where}: {keys.named(unknown)}: not supported in a {keys.architecture}"
        )
    missing = _REQUIRED.keys() - keys.values.keys()
    if missing:
        raise CheckpointError(f"{keys.where}: {keys.named(missing)}: missing; the model needs it")
    for key, values in _NEUTRAL.items():
        if key in keys.values and keys.values[key] not in values:
            keys.fail(key, ", which is not supported")


def _to_hf(keys: _Keys, header: GgufHeader) -> dict[str, Any]:
    """The same configuration as Hugging Face writes it; what is not a key shows in the tensors."""
    named = _REQUIRED | _OPTIONAL
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    # Null is what llama.cpp takes for an absent key, whatever a family's own default is.
    config: dict[str, Any] = {"head_dim": None, "num_key_value_heads": None}
    if isinstance(tokens, list) and tokens:
        config["vocab_size"] = len(tokens)
    config |= {named[key]: value for key, value in keys.values.items() if key in named}
    config["model_type"] = keys.architecture
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    if keys.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    scaling = keys.values.get("rope.scaling.type", "none")
    if scaling == "linear":
        factor = keys.values.get("rope.scaling.factor")
        config["rope_scaling"] = {"type": "linear", "factor": factor}
    elif scaling != "none":
        keys.fail(
            "rope.scaling.type", ", which is not supported; supported are 'none' and 'linear'"
        )
    return config


def _window(keys: _Keys) -> int | None:
    """The window of all layers, or None.

    llama.cpp does not read the key in files of these architectures, and its converter writes
    Mistrals as Llamas without it. A file that has it is of a model that was trained with a window.
    """
    key = "attention.sliding_window"
    window = keys.values.get(key, 0)
    if type(window) is not int or not 0 <= window < 2**31:
        keys.fail(key, "; expected a whole number, 0 for no window")
    if window and keys.architecture != "llama":
        keys.fail(key, ", which is not supported: which layers have it is not said")
    return window or None


def _check_head_dim(keys: _Keys, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.values.get(key, head_dim) != head_dim:
            keys.fail(key, f", which is not supported; it must be the width of a head, {head_dim}")


def _check_vocabulary(keys: _Keys, header: GgufHeader, vocab_size: int) -> None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise CheckpointError(
            f"{keys.where}: tokenizer.ggml.tokens has {len(tokens)} tokens, but "
            f"{keys.architecture}.vocab_size is {vocab_size}"
        )


def _with_rope_factors(config: ModelConfig, factors: np.ndarray, where: str) -> ModelConfig:
    # llama.cpp stores the divisors of the frequencies and not what they were made from: those of
    # Llama 3.1 and 3.2 are recognised, others are not guessed.
    if factors.shape != (config.head_dim // 2,) or not 0.0 < factors.max() < np.inf:
        raise CheckpointError(
            f"{where}: rope_freqs.weight is damaged: expected {config.head_dim // 2} finite "
            "numbers above 0; download the file again"
        )
    scaling = RopeScaling(rope_type="llama3", factor=float(factors.max()))
    expected = _llama3_factors(config, scaling)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0.0):
        raise CheckpointError(
            f"{where}: rope_freqs.weight holds frequency factors other than those of Llama 3.1 and "
            "3.2, which are not supported; use the model's Hugging Face folder"
        )
    if config.rope_scaling is not None:
        raise CheckpointError(
            f"{where}: rope_freqs.weight together with rope.scaling.type is not supported"
        )
    return dataclasses.replace(config, rope_scaling=scaling)


def _llama3_factors(config: ModelConfig, scaling: RopeScaling) -> np.ndarray:
    """By what Llama 3.1 divides each rotary frequency."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    wavelengths = 2.0 * math.pi * config.rope_theta**exponents
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / wavelengths
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - kept) / scaling.factor + kept)
