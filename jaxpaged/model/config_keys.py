"""Which keys of a `config.json` a model of a known family has, and which ask for another model.

Every key is honoured, known to be without effect on completions, or refused by name.
"""

import logging
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config_families import FAMILIES
from jaxpaged.model.shown import shown

_log = logging.getLogger(__name__)

# Read by `ModelConfig.from_hf` in every family, and the token ids by the tokenizer.
_HONOURED = frozenset(
    {
        "architectures",
        "attention_bias",
        "bos_token_id",
        "eos_token_id",
        "head_dim",
        "hidden_act",
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

# A key that changes what a model of some family computes, and the values that leave it as it is in
# the families that do not have it.
_SUPPORTED_VALUES: Mapping[str, tuple[object, ...]] = {
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
    "use_bidirectional_attention": (None, False),
    "rope_local_base_freq": (None,),
    "no_rope_layer_interval": (None,),
    "sliding_window_pattern": (None,),
    "logits_scaling": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_decoder": (None, True, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "auto_map": (None,),
}


def check_keys(config: Mapping[str, Any], where: str) -> None:
    """Makes sure that `config` describes a model of a known family and nothing more.

    Raises:
        CheckpointError: Another architecture, or a key that asks for a behaviour that is not
            supported.
    """
    _check_architecture(config, where)
    family = FAMILIES[config["model_type"]]
    known = family.keys | family.without_effect
    for key, supported in _SUPPORTED_VALUES.items():
        if key not in known and key in config and config[key] not in supported:
            raise CheckpointError(
                f"{where}: {key} is {shown(config[key])}, which is not supported in a "
                f"{config['model_type']}; supported: " + ", ".join(map(repr, supported))
            )
    unknown = sorted(set(config) - _HONOURED - _WITHOUT_EFFECT - known - set(_SUPPORTED_VALUES))
    if unknown:
        # Hugging Face does not read them either, so the completions are the same.
        _log.warning(
            "%s: keys that a %s does not have are ignored: %s",
            where,
            config["model_type"],
            unknown,
        )


def _check_architecture(config: Mapping[str, Any], where: str) -> None:
    model_type = config.get("model_type")
    if model_type is None:
        raise CheckpointError(
            f"{where}: model_type is missing; expected the config.json of one of "
            + ", ".join(FAMILIES)
        )
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    expected = [family.architecture] if family else None
    architectures = config.get("architectures") or expected
    if family is None or architectures != expected:
        supported = ", ".join(
            f"{kind!r} with {family.architecture!r}" for kind, family in FAMILIES.items()
        )
        raise CheckpointError(
            f"{where}: model_type {shown(model_type)} with architectures {shown(architectures)} is "
            f"not supported; supported is model_type {supported}"
        )
