"""What a Llama-family model's `config.json` declares, as one checked value.

Knows nothing of weights or devices.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config_keys import check_keys

RopeType = Literal["linear", "llama3"]


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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> "ModelConfig":
        """The value of a Hugging Face Llama configuration.

        Args:
            config: The parsed `config.json`.
            where: Names the file in errors.

        Raises:
            CheckpointError: Not a Llama, a key is missing or malformed, or a key asks for a
                behaviour that is not supported; the message names the key.
        """
        check_keys(config, where)
        fields = _Fields(config, where)
        num_heads = fields.size("num_attention_heads")
        num_kv_heads = fields.size("num_key_value_heads", num_heads)
        hidden_size = fields.size("hidden_size")
        head_dim = fields.size("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            fields.fail("num_key_value_heads", f"a divisor of {num_heads} heads")
        if head_dim % 2 or head_dim == 0:
            fields.fail("head_dim", f"an even width, not {head_dim}")
        rope_theta, rope_scaling = _rope(fields)
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
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
        )


class _Fields:
    """Typed look-ups in one parsed JSON object, with errors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def size(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            self.fail(key, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, "a number")
        if not 0.0 < value < math.inf:
            self.fail(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def fail(self, key: str, expected: str) -> NoReturn:
        found = self.values.get(key)
        raise CheckpointError(f"{self.where}: {key} is {found!r}; expected {expected}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: {key} is missing; a Llama model needs it")
        return value


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


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
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


def _rope_fields(fields: _Fields) -> _Fields:
    given = [key for key in ("rope_parameters", "rope_scaling") if fields.values.get(key)]
    if not given:
        return _Fields({}, fields.where)
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
    return _Fields(rope, f"{fields.where}: {given[0]}")
