"""What sets a family of models apart from a plain Llama, by the `model_type` of its `config.json`.

A table and its words: nothing here reads a file, and the decoder knows options, not families.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

QueryKeyNorm = Literal["none", "head", "width"]
NormPlaces = Literal["before", "behind", "around"]
NormScale = Literal["rounded", "wide", "one_plus"]
TensorLayout = Literal["llama", "phi3", "mixtral"]
WindowRule = Literal["declared", "all", "upper", "pattern", "without_rope"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The options of a family that its `config.json` does not spell out.

    Attributes:
        architecture: The only entry of `architectures`.
        defaults: What Hugging Face takes where a key is absent and it is not a Llama's value; null
            says none.
        keys: Keys that this family honours and a Llama does not have.
        without_effect: Keys that change no completion in this family.
        has_qkv_bias: Queries, keys and values have a bias, whatever `attention_bias` says.
        query_key_norm: See `ModelConfig`.
        norm_places: See `ModelConfig`.
        norm_scale: See `ModelConfig`.
        activation_key: Which key names the activation.
        scales_embedding: Embeddings are multiplied by the root of their width.
        tensor_layout: See `ModelConfig`.
        has_experts: Each layer has several MLPs.
        mlp_width_key: Which key is the width of the MLP, or of each of them.
        windows: Which layers have the window of `sliding_window` where `layer_types` is absent:
            "declared" none (the window is refused), "all", "upper" those from `max_window_layers`
            on, "pattern" all but every n-th, "without_rope" those that do not rotate.
        has_local_rope: Layers with a window rotate by frequencies of their own.
    """

    architecture: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()
    has_qkv_bias: bool = False
    query_key_norm: QueryKeyNorm = "none"
    norm_places: NormPlaces = "before"
    norm_scale: NormScale = "rounded"
    activation_key: str = "hidden_act"
    scales_embedding: bool = False
    tensor_layout: TensorLayout = "llama"
    has_experts: bool = False
    mlp_width_key: str = "intermediate_size"
    windows: WindowRule = "declared"
    has_local_rope: bool = False


_EXPERT_KEYS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})
# Of training, or of what is given back beside logits.
_EXPERTS_WITHOUT_EFFECT = frozenset(
    {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}
)
_UPPER_WINDOWS = frozenset({"max_window_layers"})
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_KEYS = frozenset(
    {
        "final_logit_softcapping",
        "hidden_activation",
        "query_pre_attn_scalar",
        "sliding_window_pattern",
    }
)
# The second repeats what `layer_types` says beside it.
_GEMMA_WITHOUT_EFFECT = frozenset({"cache_implementation", "_sliding_window_pattern"})

FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults={
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        keys=_UPPER_WINDOWS,
        has_qkv_bias=True,
        windows="upper",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={
            "head_dim": 128,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        keys=_UPPER_WINDOWS,
        query_key_norm="head",
        windows="upper",
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults={
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rope_theta": 1000000.0,
        },
        keys=_EXPERT_KEYS,
        without_effect=_EXPERTS_WITHOUT_EFFECT,
        windows="all",
        tensor_layout="mixtral",
        has_experts=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        keys=_EXPERT_KEYS | {"moe_intermediate_size", "norm_topk_prob"},
        without_effect=_EXPERTS_WITHOUT_EFFECT | {"max_window_layers"},
        query_key_norm="head",
        windows="all",
        has_experts=True,
        mlp_width_key="moe_intermediate_size",
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults={"original_max_position_embeddings": 4096},
        keys=frozenset({"original_max_position_embeddings", "partial_rotary_factor"}),
        # The published folders name code that Hugging Face has taken over since.
        without_effect=frozenset({"auto_map", "embd_pdrop", "resid_pdrop"}),
        tensor_layout="phi3",
        windows="all",
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        defaults={"attention_multiplier": 1.0},
        keys=frozenset(
            {
                "attention_multiplier",
                "embedding_multiplier",
                "logits_scaling",
                "residual_multiplier",
            }
        ),
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        keys=frozenset({"no_rope_layer_interval", "no_rope_layers"}),
        without_effect=frozenset({"max_window_layers"}),
        windows="without_rope",
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        query_key_norm="width",
        norm_places="behind",
        norm_scale="wide",
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults={
            **_GEMMA_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        keys=_GEMMA_KEYS | {"attn_logit_softcapping"},
        without_effect=_GEMMA_WITHOUT_EFFECT,
        norm_places="around",
        norm_scale="one_plus",
        activation_key="hidden_activation",
        scales_embedding=True,
        windows="pattern",
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults={
            **_GEMMA_DEFAULTS,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1000000.0,
            "sliding_window_pattern": 6,
        },
        keys=_GEMMA_KEYS | {"rope_local_base_freq"},
        without_effect=_GEMMA_WITHOUT_EFFECT,
        query_key_norm="head",
        norm_places="around",
        norm_scale="one_plus",
        activation_key="hidden_activation",
        scales_embedding=True,
        windows="pattern",
        has_local_rope=True,
    ),
}
