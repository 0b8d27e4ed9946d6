"""How a model rotates queries and keys by position, as its `config.json` declares it."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxpaged.errors import CheckpointError
from jaxpaged.model.config_families import Family
from jaxpaged.model.config_fields import Fields
from jaxpaged.model.shown import shown

RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Attributes:
        rope_type: "linear" divides every frequency by `factor`; "dynamic" raises the base as far
            as sequences are longer than the model was trained for; "llama3" divides the low
            frequencies, keeps the high ones and blends between, and so does "yarn", which finds
            them another way and scales the rotated vectors; "longrope" divides each frequency by a
            factor of its own, and scales too.
        factor: The stretch.
        low_freq_factor: llama3: wavelengths above `original / low_freq_factor` are divided.
        high_freq_factor: llama3: wavelengths below `original / high_freq_factor` are kept.
        original_max_position_embeddings: llama3, yarn, longrope: the context the model was first
            trained with.
        attention_factor: yarn, longrope: what rotated queries and keys are multiplied by.
        beta_fast: yarn: frequencies that turn more often in the original context are kept.
        beta_slow: yarn: those that turn less often are divided.
        is_truncated: yarn: the bounds of the blend are whole pairs of a head.
        short_factors: longrope: divisors while no sequence is longer than the original context.
        long_factors: longrope: divisors otherwise.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """What a configuration says of rotation.

    Attributes:
        theta: Base of the wavelengths.
        scaling: None for plain rotary embedding.
        share: Which part of a head is rotated, from its beginning.
        local_theta: The base of layers with a window, never stretched; None where it is the same
            for all layers.
    """

    theta: float
    scaling: RopeScaling | None
    share: float = 1.0
    local_theta: float | None = None


_ALWAYS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_KEYS: Mapping[str, frozenset[str]] = {
    "default": _ALWAYS,
    "linear": _ALWAYS | {"factor"},
    "dynamic": _ALWAYS | {"factor"},
    "llama3": _ALWAYS
    | {"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"},
    "yarn": _ALWAYS
    | {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    },
    "longrope": _ALWAYS
    | {
        "attention_factor",
        "factor",
        "long_factor",
        "original_max_position_embeddings",
        "short_factor",
    },
}
# What Phi-3's first folders call longrope.
_OLD_LONGROPE = ("su", "yarn")

_MAX_FACTOR = 2**20
"""No model stretches as far; lengths and powers of it stay numbers."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(fields: Fields, family: Family, head_dim: int) -> RopeSettings:
    """The rotation of a model, from the old spelling or from `rope_parameters`.

    Args:
        fields: The whole `config.json`.
        family: Whose it is.
        head_dim: Width of a head.

    Raises:
        CheckpointError: A kind of rotation that is not known, or malformed or missing keys of it.
    """
    rope, local = _objects(fields, family)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    share = _share(fields, rope, family)
    local_theta = None
    if family.has_local_rope:
        local_theta = local.number("rope_theta", fields.number("rope_local_base_freq"))
        if _rope_type(local) != "default":
            local.fail("rope_type", "'default', which is what is supported in layers with a window")
        _check_keys(local, "default")
    pairs = int(head_dim * share) // 2
    if int(head_dim * share) % 2 or pairs == 0:
        fields.fail("partial_rotary_factor", f"an even part of a head of {head_dim}")
    scaling = _scaling(fields, rope, family, pairs)
    if scaling is not None and scaling.rope_type == "yarn" and theta <= 1.0:
        (rope if rope.values.get("rope_theta") else fields).fail("rope_theta", "more than 1")
    return RopeSettings(
        theta=theta,
        scaling=scaling,
        share=share,
        local_theta=local_theta,
    )


def _factor(rope: Fields, default: float | None = None) -> float:
    factor = rope.number("factor", default)
    if factor > _MAX_FACTOR:
        rope.fail("factor", f"at most {_MAX_FACTOR}")
    return factor


def _objects(fields: Fields, family: Family) -> tuple[Fields, Fields]:
    """The object that describes the rotation, and that of layers with a window."""
    nothing = Fields(values={}, where=fields.where)
    given = [key for key in ("rope_parameters", "rope_scaling") if fields.values.get(key)]
    if not given:
        return nothing, nothing
    key = given[0]
    if len(given) == 2 and fields.values[key] != fields.values[given[1]]:
        fields.fail("rope_scaling", "the same as rope_parameters, or only one of the two")
    rope = _object(fields, key)
    if not family.has_local_rope or not rope.values.keys() & {_FULL, _SLIDING}:
        return rope, nothing
    unknown = sorted(rope.values.keys() - {_FULL, _SLIDING})
    if unknown:
        raise CheckpointError(
            f"{rope.where}: {', '.join(unknown)} is not supported beside {_FULL} and {_SLIDING}"
        )
    full, sliding = (
        _object(rope, kind) if rope.values.get(kind) else nothing for kind in (_FULL, _SLIDING)
    )
    return full, sliding


def _object(fields: Fields, key: str) -> Fields:
    value = fields.values[key]
    if not isinstance(value, Mapping):
        fields.fail(key, "an object")
    return Fields(values=value, where=f"{fields.where}: {key}")


def _rope_type(rope: Fields) -> Any:  # noqa: ANN401 - whatever the file holds
    return rope.values.get("rope_type") or rope.values.get("type") or "default"


def _check_keys(rope: Fields, rope_type: str) -> None:
    unknown = sorted(rope.values.keys() - _KEYS[rope_type])
    if unknown:
        raise CheckpointError(
            f"{rope.where}: {', '.join(unknown)} is not supported with rope_type {rope_type!r}; "
            "supported keys are " + ", ".join(sorted(_KEYS[rope_type]))
        )


def _share(fields: Fields, rope: Fields, family: Family) -> float:
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    is_supported = share == 1.0 or "partial_rotary_factor" in family.keys
    if not is_supported or share > 1.0:
        expected = "at most 1" if is_supported else "1.0, which is what is supported in this family"
        holder = rope if rope.values.get("partial_rotary_factor") is not None else fields
        holder.fail("partial_rotary_factor", expected)
    return share


def _scaling(fields: Fields, rope: Fields, family: Family, pairs: int) -> RopeScaling | None:
    rope_type = _rope_type(rope)
    if rope_type in _OLD_LONGROPE and "original_max_position_embeddings" in family.keys:
        rope_type = "longrope"
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        found = "rope_type" if rope.values.get("rope_type") else "type"
        raise CheckpointError(
            f"{rope.where}: {found} is {shown(rope_type)}, which is not supported; supported are "
            + ", ".join(map(repr, _KEYS))
        )
    _check_keys(rope, rope_type)
    if rope_type == "linear":
        return RopeScaling(rope_type="linear", factor=_factor(rope))
    if rope_type == "dynamic":
        return RopeScaling(rope_type="dynamic", factor=_factor(rope))
    if rope_type == "llama3":
        return _llama3(rope)
    if rope_type == "yarn":
        return _yarn(fields, rope)
    if rope_type == "longrope":
        return _longrope(fields, rope, pairs)
    return None


def _llama3(rope: Fields) -> RopeScaling:
    scaling = RopeScaling(
        rope_type="llama3",
        factor=_factor(rope),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.fail("high_freq_factor", f"more than low_freq_factor {scaling.low_freq_factor}")
    return scaling


def _original_length(fields: Fields, rope: Fields) -> int:
    """The context of the first training; Phi-3 says it beside the object, and that counts."""
    most = fields.size("max_position_embeddings")
    inside = rope.size("original_max_position_embeddings", most)
    return fields.size("original_max_position_embeddings", inside)


def _yarn(fields: Fields, rope: Fields) -> RopeScaling:
    original = _original_length(fields, rope)
    factor = _factor(rope)
    magnitudes = [rope.values.get(key) for key in ("mscale", "mscale_all_dim")]
    if all(magnitudes):
        rotated, every = rope.number("mscale"), rope.number("mscale_all_dim")
        usual = _magnitude(factor, rotated) / _magnitude(factor, every)
    else:
        usual = _magnitude(factor, 1.0)
    scaling = RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", usual),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        is_truncated=rope.flag("truncate", default=True),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        rope.fail("beta_fast", f"more than beta_slow {scaling.beta_slow}")
    return scaling


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(fields: Fields, rope: Fields, pairs: int) -> RopeScaling:
    original = _original_length(fields, rope)
    factor = _factor(rope, fields.size("max_position_embeddings") / original)
    usual = 1.0
    if factor > 1.0:
        if original < 2:
            rope.fail("original_max_position_embeddings", "at least 2")
        usual = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RopeScaling(
        rope_type="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", usual),
        short_factors=_factors(rope, "short_factor", pairs),
        long_factors=_factors(rope, "long_factor", pairs),
    )


def _factors(rope: Fields, key: str, pairs: int) -> tuple[float, ...]:
    values = rope.values.get(key)
    expected = f"a list of {pairs} finite numbers above 0, one for each rotated pair of a head"
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != pairs:
        found = f"a list of {len(values)}" if isinstance(values, list) else repr(values)
        raise CheckpointError(f"{rope.where}: {key} is {found}; expected {expected}")
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0.0 < value <= sys.float_info.max:
            raise CheckpointError(f"{rope.where}: {key} has {shown(value)}; expected {expected}")
    return tuple(map(float, values))
