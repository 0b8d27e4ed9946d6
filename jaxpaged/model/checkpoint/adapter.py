"""A LoRA adapter in PEFT's format: a folder with `adapter_config.json` and safetensors.

    y = x W + scale (x A) B        a linear map with weights W, changed by two narrow factors

Opened against the model that it is to change: every tensor has a map of that model, every map that
the configuration names has its tensors, shapes are checked. Knows nothing of devices.
"""

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model.checkpoint import adapter_config, members
from jaxpaged.model.checkpoint.adapter_config import AdapterConfig
from jaxpaged.model.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from jaxpaged.model.checkpoint.tensors import FUSED_MAPS, Shape, linear_maps, stored_maps
from jaxpaged.model.config import ModelConfig

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_PREFIX = "base_model.model."
_A, _B = "lora_A.weight", "lora_B.weight"
_NAMED_AT_MOST = 4
# What float32 and bfloat16 have room for.
_MOST = 3e38
_CHUNK_BYTES = 4 * 1024 * 1024

# Tensors of kinds that are not read, and what to say of them.
_REFUSED = (
    (re.compile(r"lora_embedding_[AB]"), "an adapted embedding or head is not supported"),
    (re.compile(r"lora_magnitude_vector"), "DoRA is not supported"),
    (re.compile(r"modules_to_save"), "whole modules in an adapter are not supported"),
    (re.compile(r"\blm_head\b"), "an adapted head is not supported"),
    (re.compile(r"\bembed_tokens\b"), "an adapted embedding is not supported"),
    (re.compile(r"experts|block_sparse_moe|\bmlp\.gate\."), "routed experts are not adapted"),
    (re.compile(r"lora_[AB]\.bias"), "biases in an adapter are not supported"),
)


class Factors(NamedTuple):
    """Of one map of one layer, in float64."""

    a: np.ndarray
    """`[rank, in]`."""
    b: np.ndarray
    """`[out, rank]`, the scale in it."""


class _Source(NamedTuple):
    """Where the factors of a map are: the stored map, its rows, and the scale."""

    name: str
    rows: slice
    scale: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter whose configuration and headers have been read and checked.

    Attributes:
        path: The folder.
        digest: SHA-256 of its configuration and of every byte of its weights.
        ranks: By the map's name within a layer, the largest rank in any layer.
    """

    path: pathlib.Path
    digest: str
    ranks: Mapping[str, int]
    _file: SafetensorsFile
    _sources: Mapping[tuple[int, str], _Source]

    def factors(self, layer: int, name: str) -> Factors | None:
        """What changes a map of a layer; None if nothing does.

        Raises:
            CheckpointError: A tensor cannot be read, or holds a number that is not finite.
        """
        source = self._sources.get((layer, name))
        if source is None:
            return None
        a, b = (self._tensor(f"{_PREFIX}{source.name}.{end}") for end in (_A, _B))
        b = b[source.rows] * source.scale
        # Rows of other adapters meet these numbers with a zero, and zero times infinity is NaN.
        for end, factor in ((_A, a), (_B, b)):
            if not (np.abs(factor) < _MOST).all():
                raise CheckpointError(
                    f"{self._file.path}: tensor {_PREFIX}{source.name}.{end} holds numbers that "
                    "are not finite, or are not with their scale; the training went wrong, or the "
                    "file is damaged"
                )
        return Factors(a=a, b=b)

    def _tensor(self, name: str) -> np.ndarray:
        return self._file.tensor(name).astype(np.float64)


def open_adapters(paths: Mapping[str, str], model: ModelConfig) -> dict[str, Adapter]:
    """The adapters in the folders of a job, by name, for a model.

    Raises:
        ConfigError: There is no folder at a path.
        CheckpointError: As `open_adapter` raises it.
    """
    return {name: open_adapter(_locate(name, path), model) for name, path in paths.items()}


def _locate(name: str, path: str) -> pathlib.Path:
    found = None if "://" in path else pathlib.Path(path).expanduser()
    if found is None or not found.is_dir():
        raise ConfigError(
            f"adapters.{name}: {path!r} is not a folder on this machine; give the folder that "
            f"holds {_CONFIG} and {_WEIGHTS}"
        )
    return found


def open_adapter(path: pathlib.Path, model: ModelConfig) -> Adapter:
    """The adapter in a folder, for a model.

    Raises:
        CheckpointError: A file is missing, damaged or a pickle; the configuration asks for what is
            not computed here; a tensor is missing, unused or of another shape.
    """
    config_path = members.member(path, _CONFIG)
    if config_path is None:
        raise CheckpointError(f"{path}: {_CONFIG} is missing; expected an adapter as PEFT saves it")
    content = members.read_bytes(config_path)
    config = adapter_config.parse(members.parse_object(content, config_path), str(config_path))
    weights_path = members.member(path, _WEIGHTS)
    if weights_path is None:
        raise CheckpointError(_no_weights(path))
    file = open_safetensors(weights_path)
    shapes = {name: entry.shape for name, entry in file.entries.items()}
    maps = _stored_maps(model, shapes)
    names = _check_tensors(config, shapes, model, maps, str(weights_path))
    ranks, scales = config.ranks(names), config.scales(names)
    parts = _parts(model, maps)
    sources = {
        (_layer(name), part): _Source(name, rows, scales[name])
        for name in names
        for part, rows in parts[_within_layer(name)]
    }
    largest: dict[str, int] = {}
    for (_, part), source in sources.items():
        largest[part] = max(largest.get(part, 0), ranks[source.name])
    return Adapter(
        path=path,
        digest=_digest(content, weights_path),
        ranks=largest,
        _file=file,
        _sources=sources,
    )


def _stored_maps(model: ModelConfig, shapes: Mapping[str, Shape]) -> Mapping[str, tuple[str, ...]]:
    """The maps as the adapter's own model had them: a converted one has each by itself."""
    fused = any(f".{name}." in tensor for tensor in shapes for name in FUSED_MAPS)
    return stored_maps(model, fused=fused or model.tensor_layout == "phi3")


def _check_tensors(
    config: AdapterConfig,
    shapes: Mapping[str, Shape],
    model: ModelConfig,
    maps: Mapping[str, tuple[str, ...]],
    where: str,
) -> list[str]:
    """The stored maps that the adapter changes, once its tensors are known to be just theirs."""
    for pattern, reason in _REFUSED:
        found = [name for name in shapes if pattern.search(name)]
        if found:
            raise CheckpointError(f"{where}: {_listed(found)}: {reason}; merge the adapter")
    widths = _stored_shapes(model, maps)
    known = [f"model.layers.{layer}.{name}" for layer in range(model.num_layers) for name in widths]
    targeted = config.targeted(known)
    if not targeted:
        raise CheckpointError(
            f"{config.where}: target_modules name no linear map of this model; it has "
            f"{', '.join(widths)}"
        )
    names = [name for name in known if name in targeted]
    ranks = config.ranks(names)
    expected: dict[str, Shape] = {}
    for name in names:
        rows, columns = widths[_within_layer(name)]
        expected[f"{_PREFIX}{name}.{_A}"] = (ranks[name], columns)
        expected[f"{_PREFIX}{name}.{_B}"] = (rows, ranks[name])
    if missing := expected.keys() - shapes.keys():
        raise CheckpointError(
            f"{where}: {_listed(missing)} missing, which target_modules of {_CONFIG} ask for"
        )
    if extra := shapes.keys() - expected.keys():
        raise CheckpointError(
            f"{where}: {_listed(extra)} would not be used: {_CONFIG} does not target it, or the "
            "adapter belongs to another model"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(shapes[name])}; this model and the rank "
                f"in {_CONFIG} ask for {list(shape)}"
            )
    return names


def _parts(
    model: ModelConfig, maps: Mapping[str, tuple[str, ...]]
) -> dict[str, list[tuple[str, slice]]]:
    """By stored map, the decoder's maps in it with their rows."""
    sizes = linear_maps(model)
    found: dict[str, list[tuple[str, slice]]] = {}
    for stored, parts in maps.items():
        first, found[stored] = 0, []
        for part in parts:
            found[stored].append((part, slice(first, first + sizes[part][0])))
            first += sizes[part][0]
    return found


def _stored_shapes(
    model: ModelConfig, maps: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[int, int]]:
    sizes = linear_maps(model)
    return {
        stored: (sum(sizes[part][0] for part in parts), sizes[parts[0]][1])
        for stored, parts in maps.items()
    }


def _layer(name: str) -> int:
    return int(name.split(".")[2])


def _within_layer(name: str) -> str:
    return name.split(".", 3)[3]


def _digest(config: bytes, weights: pathlib.Path) -> str:
    digest = hashlib.sha256(f"{_CONFIG} {len(config)}\n".encode())
    digest.update(config)
    try:
        with weights.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{weights}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _no_weights(path: pathlib.Path) -> str:
    if members.member(path, _PICKLE) is None:
        return f"{path}: {_WEIGHTS} is missing; download it"
    return (
        f"{path}: only {_PICKLE} is there, not {_WEIGHTS}. Pickle files can run code when they are "
        "opened and are refused: load the adapter with PEFT where you trust it, then "
        "save_pretrained(folder, safe_serialization=True)"
    )


def _listed(tensors: Iterable[str]) -> str:
    names = sorted(tensors)
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{more}"
