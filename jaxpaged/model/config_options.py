"""The constants by which families differ, as a `config.json` declares them."""

import dataclasses
from typing import Literal, NamedTuple

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config_families import Family
from jaxpaged.model.config_fields import Fields
from jaxpaged.model.shown import shown

# Hugging Face's names; the last two are the same curve.
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Of all layers together. A file may lie; every one has tensors that are named before any is found.
_MAX_EXPERTS = 2**17


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The MLPs of a layer that has several.

    Attributes:
        count: How many.
        per_token: How many of them a token goes through.
        is_normed: What they give a token is weighed by shares that add up to 1.
    """

    count: int
    per_token: int
    is_normed: bool


class Options(NamedTuple):
    """Fields of `ModelConfig`, by the same names."""

    activation: Literal["silu", "gelu_tanh"]
    attention_scale: float | None
    score_cap: float | None
    logit_cap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    rotary_layers: tuple[bool, ...]
    experts: RoutedExperts | None
    intermediate_size: int


def read_options(fields: Fields, family: Family, *, num_layers: int, hidden_size: int) -> Options:
    """The options that keys of a family ask for; keys of other families were refused before.

    Raises:
        CheckpointError: A key is malformed, or names an activation that is not known.
    """
    root = hidden_size**0.5 if family.scales_embedding else 1.0
    return Options(
        activation=_activation(fields, family),
        attention_scale=_attention_scale(fields),
        score_cap=_optional(fields, "attn_logit_softcapping"),
        logit_cap=_optional(fields, "final_logit_softcapping"),
        embedding_multiplier=fields.number("embedding_multiplier", root),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
        rotary_layers=_rotary_layers(fields, family, num_layers),
        experts=_experts(fields, num_layers) if family.has_experts else None,
        intermediate_size=fields.size(family.mlp_width_key),
    )


def _optional(fields: Fields, key: str) -> float | None:
    return None if fields.values.get(key) is None else fields.number(key)


def _activation(fields: Fields, family: Family) -> Literal["silu", "gelu_tanh"]:
    key = family.activation_key
    name = fields.values.get(key, "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{fields.where}: {key} is {shown(name)}, which is not supported; supported: "
            + ", ".join(map(repr, _ACTIVATIONS))
        )
    return _ACTIVATIONS[name]


def _attention_scale(fields: Fields) -> float | None:
    scalar = _optional(fields, "query_pre_attn_scalar")
    if scalar is not None:
        return scalar**-0.5
    return _optional(fields, "attention_multiplier")


def _experts(fields: Fields, num_layers: int) -> RoutedExperts:
    key = "num_local_experts" if fields.values.get("num_local_experts") else "num_experts"
    count, per_token = fields.size(key), fields.size("num_experts_per_tok")
    if count * num_layers > _MAX_EXPERTS:
        fields.fail(key, f"at most {_MAX_EXPERTS} experts in {num_layers} layers together")
    if per_token > count:
        fields.fail("num_experts_per_tok", f"at most {count}, which is how many experts there are")
    return RoutedExperts(count=count, per_token=per_token, is_normed=fields.flag("norm_topk_prob"))


def _rotary_layers(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Of every layer, whether it rotates: `no_rope_layers` has 1 for those that do.

    Empty in families whose layers all do.
    """
    if "no_rope_layers" not in family.keys:
        return ()
    given = fields.values.get("no_rope_layers")
    if given is None:
        interval = fields.size("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(given, list) or len(given) != num_layers:
        found = f"a list of {len(given)}" if isinstance(given, list) else repr(given)
        raise CheckpointError(
            f"{fields.where}: no_rope_layers is {found}; expected a list with one entry for each "
            f"of {num_layers} layers"
        )
    for layer, entry in enumerate(given):
        if entry not in (0, 1):
            raise CheckpointError(
                f"{fields.where}: no_rope_layers is {shown(entry)} at layer {layer}; expected 1 "
                "where a layer rotates and 0 where it does not"
            )
    return tuple(bool(entry) for entry in given)
