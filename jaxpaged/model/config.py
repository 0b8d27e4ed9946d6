"""What a Llama-family model's `config.json` declares, as one checked value.

Knows nothing of weights or devices.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config_fields import Fields
from jaxpaged.model.config_keys import check_keys
from jaxpaged.model.config_windows import Windows, read_windows

RopeType = Literal["linear", "llama3"]

# A file may lie; a value per layer is made before any tensor is looked for.
_MAX_LAYERS = 4096

# What Hugging Face takes for a Mistral where a key is absent (null says none).
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Attributes:
        rope_type: "linear" divides every frequency by `factor`; "llama3" divides the low ones,
            keeps the high ones and blends between.
        factor: The stretch.
        low_freq_factor: llama3: wavelengths above `original / low_freq_factor` are divided.
        high_freq_factor: llama3: wavelengths below `original / high_freq_factor` are kept.
        original_max_position_embeddings: llama3: the context the model was first trained with.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and the constants of one Llama-family decoder; hashable.

    Attributes:
        vocab_size: Rows of the embedding; may exceed the tokenizer's tokens.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads of a layer.
        num_kv_heads: Key/value heads of a layer; divides `num_heads`.
        head_dim: Width of a head; even.
        max_position_embeddings: Longest sequence the model was trained for, in tokens.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: None for plain rotary embedding.
        rms_norm_eps: Added to the mean square before its root.
        tie_word_embeddings: The head is the embedding.
        attention_bias: All four attention projections have a bias.
        mlp_bias: All three MLP projections have a bias.
        windows: Of every layer, the keys that a query sees, its own included; None where it sees
            all of them. All None unless given.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    windows: Windows = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")

    @property
    def max_window(self) -> int | None:
        """The widest window, or None if a layer sees all keys: what lies outside of it, no layer
        reads again."""
        widths = [window for window in self.windows if window is not None]
        return max(widths) if len(widths) == len(self.windows) else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> "ModelConfig":
        """The value of a Hugging Face configuration of a Llama or a Mistral.

        Args:
            config: The parsed `config.json`.
            where: Names the file in errors.

        Raises:
            CheckpointError: Neither of them, a key is missing or malformed, or a key asks for a
                behaviour that is not supported; the message names the key.
        """
        check_keys(config, where)
        if config["model_type"] == "mistral":
            config = {**_MISTRAL_DEFAULTS, **config}
        fields = Fields(values=config, where=where)
        num_heads = fields.size("num_attention_heads")
        num_kv_heads = fields.size("num_key_value_heads", num_heads)
        hidden_size = fields.size("hidden_size")
        head_dim = fields.size("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            fields.fail("num_key_value_heads", f"a divisor of {num_heads} heads")
        if head_dim % 2 or head_dim == 0:
            fields.fail("head_dim", f"an even width, not {head_dim}")
        num_layers = fields.size("num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            fields.fail("num_hidden_layers", f"at most {_MAX_LAYERS} layers")
        rope_theta, rope_scaling = _rope(fields)
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.size("max_position_embeddings"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=fields.number("rms_norm_eps"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            windows=read_windows(fields, num_layers),
        )


_ROPE_KEYS = frozenset(
    {
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
        "rope_theta",
        "rope_type",
        "type",
    }
)


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling, from the old spelling or from `rope_parameters`."""
    rope = _rope_fields(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    rope_type = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling(rope_type="linear", factor=rope.number("factor"))
    if rope_type != "llama3":
        rope.fail("rope_type", "'default', 'linear' or 'llama3', which are what is supported")
    scaling = RopeScaling(
        rope_type="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.fail("high_freq_factor", f"more than low_freq_factor {scaling.low_freq_factor}")
    return theta, scaling


def _rope_fields(fields: Fields) -> Fields:
    given = [key for key in ("rope_parameters", "rope_scaling") if fields.values.get(key)]
    if not given:
        return Fields(values={}, where=fields.where)
    if len(given) == 2 and fields.values[given[0]] != fields.values[given[1]]:
        fields.fail("rope_scaling", "the same as rope_parameters, or only one of the two")
    rope = fields.values[given[0]]
    if not isinstance(rope, Mapping):
        fields.fail(given[0], "an object")
    unknown = sorted(key for key in rope if key not in _ROPE_KEYS)
    if rope.get("partial_rotary_factor") == 1.0:
        unknown.remove("partial_rotary_factor")
    if unknown:
        raise CheckpointError(
            f"{fields.where}: {given[0]}: {', '.join(unknown)} is not supported; supported keys "
            "are " + ", ".join(sorted(_ROPE_KEYS))
        )
    return Fields(values=rope, where=f"{fields.where}: {given[0]}")
