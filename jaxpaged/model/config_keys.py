"""Which keys of a `config.json` a Llama or a Mistral has, and which ask for another model.

Every key is honoured, known to be without effect on completions, or refused by name.
"""

import logging
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import CheckpointError

_log = logging.getLogger(__name__)

# Read by `ModelConfig.from_hf`, and the token ids by the tokenizer.
_HONOURED = frozenset(
    {
        "architectures",
        "attention_bias",
        "bos_token_id",
        "eos_token_id",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    }
)

# What Hugging Face writes and what does not change the completion of a prompt.
_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "attention_dropout",
        "dtype",
        "initializer_range",
        "is_llama_config",
        "name_or_path",
        "pad_token_id",
        "pretraining_tp",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)

# A Mistral's weights are a Llama's, by name too; it differs in having a sliding window.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

# A key that changes what the model computes, and the values that leave it as it is.
_SUPPORTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": (None, "silu"),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_decoder": (None, True, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "auto_map": (None,),
}


def check_keys(config: Mapping[str, Any], where: str) -> None:
    """Makes sure that `config` describes a Llama or a Mistral and nothing more.

    Raises:
        CheckpointError: Another architecture, or a key that asks for a behaviour that is not
            supported.
    """
    _check_architecture(config, where)
    for key, supported in _SUPPORTED_VALUES.items():
        if key in config and config[key] not in supported:
            raise CheckpointError(
                f"{where}: {key} is {config[key]!r}, which is not supported; supported: "
                + ", ".join(repr(value) for value in supported)
            )
    unknown = sorted(set(config) - _HONOURED - _WITHOUT_EFFECT - set(_SUPPORTED_VALUES))
    if unknown:
        # Hugging Face's Llama does not read them either, so the completions are the same.
        _log.warning("%s: keys that a Llama does not have are ignored: %s", where, unknown)


def _check_architecture(config: Mapping[str, Any], where: str) -> None:
    model_type = config.get("model_type")
    if model_type is None:
        raise CheckpointError(
            f"{where}: model_type is missing; expected the config.json of a Llama or Mistral model"
        )
    expected = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    architectures = config.get("architectures") or [expected]
    if expected is None or architectures != [expected]:
        supported = " or ".join(f"{kind!r} with {name!r}" for kind, name in _ARCHITECTURES.items())
        raise CheckpointError(
            f"{where}: model_type {model_type!r} with architectures {architectures!r} is not "
            f"supported; supported is model_type {supported}"
        )
