"""Writes tiny LoRA adapters in PEFT's format, and models they are merged into.

    folder = write_tiny_adapter(tmp_path / "sql", model, rank=4)
    merged = merge(tmp_path / "merged", model, folder)           # W + scale * B A, in float64

What PEFT would do with the keys used here is written out a second time, with Python's own regular
expressions.
"""

import json
import math
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
from tiny import write_json

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def adapter_config(**changes: object) -> dict[str, Any]:
    """An `adapter_config.json` as PEFT 0.21 writes it, with keys changed."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "somebody/some-model",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(ATTENTION),
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | changes


def write_tiny_adapter(
    folder: pathlib.Path,
    model: pathlib.Path,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    strength: float = 1.0,
    **changes: object,
) -> pathlib.Path:
    """A new folder with a random adapter for a model; returns it.

    Args:
        folder: Is created.
        model: The model's folder.
        targets: `target_modules`, a list.
        rank: `r`.
        seed: Of the numbers.
        strength: How much is added, in sizes of the model's weights.
        changes: Further keys of the configuration.
    """
    config = adapter_config(r=rank, target_modules=list(targets), **changes)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in _targeted(config, model).items():
        inner, scale = _rank(config, name), _scale(config, name)
        a = random.standard_normal((inner, shape[1])) * shape[1] ** -0.5
        b = random.standard_normal((shape[0], inner)) * strength / (abs(scale) * inner**0.5)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.astype(np.float32)
    write_adapter(folder, config, tensors)
    return folder


def write_adapter(
    folder: pathlib.Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """A new folder with a configuration and tensors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", config)
    safetensors.numpy.save_file(dict(tensors), folder / "adapter_model.safetensors")


def random_factors(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, np.ndarray]:
    """Tensors of these shapes; each one's numbers depend on the seed and its place by name."""
    tensors = {}
    for place, name in enumerate(sorted(shapes)):
        random = np.random.default_rng([seed, place])
        spread = 1.0 if "lora_A" in name else 0.3
        values = random.standard_normal(tuple(shapes[name])) * spread * shapes[name][-1] ** -0.5
        tensors[name] = values.astype(np.float32)
    return tensors


def merge(folder: pathlib.Path, model: pathlib.Path, adapter: pathlib.Path) -> pathlib.Path:
    """A new folder with the model and an adapter merged into its weights."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    for name in _targeted(config, model):
        a, b = (factors[f"{PREFIX}{name}.lora_{which}.weight"].astype(np.float64) for which in "AB")
        merged = tensors[f"{name}.weight"].astype(np.float64) + _scale(config, name) * b @ a
        tensors[f"{name}.weight"] = merged.astype(np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def _targeted(config: Mapping[str, Any], model: pathlib.Path) -> dict[str, tuple[int, ...]]:
    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    found = {}
    for name, tensor in sorted(tensors.items()):
        key = name.removesuffix(".weight")
        if any(key.endswith(f".{target}") for target in config["target_modules"]):
            layers = config["layers_to_transform"]
            if layers is None or int(key.split(".")[2]) in layers:
                found[key] = tensor.shape
    return found


def _first(patterns: Mapping[str, Any], name: str, default: Any) -> Any:  # noqa: ANN401
    fitting = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    return next(fitting, default)


def _rank(config: Mapping[str, Any], name: str) -> int:
    return _first(config["rank_pattern"], name, config["r"])


def _scale(config: Mapping[str, Any], name: str) -> float:
    alpha, rank = _first(config["alpha_pattern"], name, config["lora_alpha"]), _rank(config, name)
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
