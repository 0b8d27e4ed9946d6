"""What the `adapter_config.json` of a LoRA adapter says: what it changes, and how much.

Every key of PEFT's is honoured, without effect on what is computed, or refused by name. Knows the
names of maps as transformers has them, not which of them a model has.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpaged.errors import CheckpointError

MAX_RANK = 4096
"""Largest rank; more is a damaged file."""

_ALL_LINEAR = "all-linear"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_LAYERS = "layers"

_HONOURED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    }
)

_WITHOUT_EFFECT = frozenset(
    {
        "base_model_name_or_path",
        "revision",
        "task_type",
        "auto_mapping",
        "peft_version",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "eva_config",
        "runtime_config",
    }
)
"""Keys of training, of the loading process, or for people; and options of methods that have a key
of their own, which is refused."""

# How an adapter began. The others take something out of the model's own weights.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")

_REMEDIES = {
    "use_dora": "DoRA scales the columns of the merged weights; merge the adapter into the model",
    "modules_to_save": "such an adapter holds whole modules; merge it into the model",
    "trainable_token_indices": "such an adapter holds new embeddings; merge it into the model",
    "bias": 'only "none" is supported; merge the adapter into the model',
    "lora_bias": "merge the adapter into the model",
    "fan_in_fan_out": "the weights of this model are not stored transposed; set it to false",
    "target_parameters": "parameters of routed experts are not adapted; merge the adapter",
    "layer_replication": "save the model with its replicated layers, and the adapter merged",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A configuration that is understood in full.

    Attributes:
        where: Names the file in errors.
        rank: Of the factors of a map that `rank_pattern` does not name.
        alpha: The same of what is divided by the rank for the scale.
        is_rank_stabilised: The divisor is the root of the rank (arXiv:2312.03732).
        rank_pattern: Ranks by patterns of names.
        alpha_pattern: The same of alpha.
        targets: Names or ends of names of the maps that are changed, or one pattern of whole
            names.
        excluded: The same of maps that are not.
        layers: The layers that are changed; None for all.
    """

    where: str
    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None

    def targeted(self, names: Sequence[str]) -> set[str]:
        """The names, as `model.layers.0.self_attn.q_proj`, of maps that are changed."""
        excluded = self._matching("exclude_modules", self.excluded, names)
        if self.targets == _ALL_LINEAR:
            return set(names) - excluded
        return self._matching("target_modules", self.targets, names) - excluded

    def ranks(self, names: Sequence[str]) -> dict[str, int]:
        """The rank of each of these maps."""
        found = self._by_pattern("rank_pattern", self.rank_pattern, names)
        return {name: int(found.get(name, self.rank)) for name in names}

    def scales(self, names: Sequence[str]) -> dict[str, float]:
        """What the product of each map's factors is multiplied by."""
        found = self._by_pattern("alpha_pattern", self.alpha_pattern, names)
        return {
            name: found.get(name, self.alpha)
            / (math.sqrt(rank) if self.is_rank_stabilised else rank)
            for name, rank in self.ranks(names).items()
        }

    def _matching(self, key: str, wanted: tuple[str, ...] | str, names: Sequence[str]) -> set[str]:
        if isinstance(wanted, str):
            return self._found(key, wanted, names)
        whole = set(wanted) & set(names)
        ends = tuple(f".{end}" for end in wanted)
        found = {name for name in names if name.endswith(ends)} - whole if ends else set()
        if key == "target_modules" and self.layers is not None:
            found = {name for name in found if _layer(name) in self.layers}
        return whole | found

    def _by_pattern(
        self, key: str, patterns: Mapping[str, int | float], names: Sequence[str]
    ) -> dict[str, int | float]:
        """The value of the first pattern that fits a name or its end, for names that have one."""
        values: dict[str, int | float] = {}
        for pattern, value in patterns.items():
            for name in self._found(key, rf"(.*\.)?({pattern})", names):
                values.setdefault(name, value)
        return values

    def _found(self, key: str, pattern: str, names: Sequence[str]) -> set[str]:
        """The names that a pattern fits as a whole.

        RE2 takes time proportional to the text; Python's own engine can be made to run for ever.
        """
        # Here, for few adapters have expressions and an engine does without tables.
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            options = pc.MatchSubstringOptions(f"^(?:{pattern})$")
            fits = pc.call_function(
                "match_substring_regex", [pa.array(names, pa.string())], options
            )
        except (pa.ArrowInvalid, UnicodeEncodeError):
            raise CheckpointError(
                f"{self.where}: {key}: {pattern!r} is not a regular expression in RE2's syntax, "
                "which has neither lookaround nor backreferences; write a list of names"
            ) from None
        return {name for name, is_found in zip(names, fits.to_pylist(), strict=True) if is_found}


def parse(content: Mapping[str, Any], where: str) -> AdapterConfig:
    """The configuration.

    Args:
        content: The whole of `adapter_config.json`.
        where: Names the file in errors.

    Raises:
        CheckpointError: A key asks for something that is not computed here, or is malformed.
    """
    kind = content.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{where}: peft_type is {kind!r}; only LORA adapters are supported")
    for key, value in content.items():
        if key not in _HONOURED and key not in _WITHOUT_EFFECT:
            _check_unused(key, value, where)
    layers = content.get("layers_to_transform")
    if layers not in (None, []):
        _check_layers_pattern(content.get("layers_pattern"), where)
        if isinstance(content.get("target_modules"), str):
            raise CheckpointError(
                f"{where}: layers_to_transform goes with a list of target_modules, not with a "
                "pattern; name the layers in the pattern"
            )
    return AdapterConfig(
        where=where,
        rank=_rank(content.get("r"), "r", where),
        alpha=_alpha(content.get("lora_alpha"), "lora_alpha", where),
        is_rank_stabilised=_flag(content.get("use_rslora") or False, "use_rslora", where),
        rank_pattern=_pattern(content, "rank_pattern", _rank, where),
        alpha_pattern=_pattern(content, "alpha_pattern", _alpha, where),
        targets=_names(content.get("target_modules"), "target_modules", where),
        excluded=_names(content.get("exclude_modules") or [], "exclude_modules", where),
        layers=_layers(layers, where),
    )


def _check_unused(key: str, value: object, where: str) -> None:
    """Refuses a key that would change what is computed, also one that is not known here."""
    if key == "init_lora_weights":
        is_fine = value in _PLAIN_BEGINNINGS
        remedy = (
            "such an adapter belongs to weights that its training changed first; save it with "
            "path_initial_model_for_weight_conversion, as PEFT describes, or merge it"
        )
    elif key == "bias":
        is_fine, remedy = value in (None, "none"), _REMEDIES[key]
    else:
        # Everything that PEFT has added so far is off by null, false or nothing.
        is_fine = value in (None, False, [], {}, "")
        remedy = _REMEDIES.get(key, "it is not supported; merge the adapter into the model")
    if not is_fine:
        raise CheckpointError(f"{where}: {key} is {_shown(value)}: {remedy}")


def _check_layers_pattern(value: object, where: str) -> None:
    patterns = [value] if isinstance(value, str) else value
    if patterns not in (None, [], [""]) and patterns != [_LAYERS]:
        raise CheckpointError(
            f"{where}: layers_pattern is {_shown(value)}; the layers of this model are called "
            f"{_LAYERS!r}"
        )


def _rank(value: object, key: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise CheckpointError(
            f"{where}: {key} must be a whole number from 1 to {MAX_RANK}, found {_shown(value)}"
        )
    return value


def _alpha(value: object, key: str, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(str(value))):
        raise CheckpointError(f"{where}: {key} must be a finite number, found {_shown(value)}")
    return float(str(value))


def _flag(value: object, key: str, where: str) -> bool:
    if type(value) is not bool:
        raise CheckpointError(f"{where}: {key} must be true or false, found {_shown(value)}")
    return value


def _pattern(content: Mapping[str, Any], key: str, read: Any, where: str) -> dict[str, Any]:  # noqa: ANN401
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} must be an object, found {_shown(value)}")
    return {pattern: read(one, f"{key}[{pattern!r}]", where) for pattern, one in value.items()}


def _names(value: object, key: str, where: str) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        return _ALL_LINEAR if value.lower() == _ALL_LINEAR else value
    names = value if isinstance(value, list) else [value]
    is_enough = bool(names) or key != "target_modules"
    if is_enough and all(isinstance(name, str) and name for name in names):
        return tuple(map(str, names))
    raise CheckpointError(
        f"{where}: {key} must be a list of names, a regular expression or "
        f"{_ALL_LINEAR!r}, found {_shown(value)}"
    )


def _layers(value: object, where: str) -> tuple[int, ...] | None:
    if value in (None, []):
        return None
    items: Iterable[object] = value if isinstance(value, list) else [value]
    found = tuple(item for item in items if type(item) is int and item >= 0)
    if len(found) != len(value if isinstance(value, list) else [value]):
        raise CheckpointError(
            f"{where}: layers_to_transform must be numbers of layers, found {_shown(value)}"
        )
    return found


def _layer(name: str) -> int | None:
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
