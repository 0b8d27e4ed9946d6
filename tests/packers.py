"""Packs weights as AWQ, GPTQ and 8-bit floats are defined, one number at a time.

    pack = packers.gptq(bits=4, group_size=32)
    folder, plain = packers.write_pair(tmp_path, pack)      # the same model twice

A packer takes a map's weight `[out, in]` and gives back its parts by the last part of their names,
and the weight that they stand for, in float32.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import raw_safetensors
import safetensors.numpy
import tiny

_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


class Packed(NamedTuple):
    """A weight in its parts, and what they stand for."""

    parts: dict[str, np.ndarray]
    weight: np.ndarray


class Packer(NamedTuple):
    """How weights are packed, and what config.json says of it."""

    pack: Callable[[np.ndarray], Packed]
    config: dict[str, Any]


def write_pair(
    folder: pathlib.Path, packer: Packer, *, layers: int = 2, mlp_bias: bool = False
) -> tuple[pathlib.Path, pathlib.Path]:
    """A folder with a tiny Llama whose layers' maps are packed, and one with the same weights in
    float32."""
    sizes = {"hidden": 64, "intermediate": 64, "layers": layers, "mlp_bias": mlp_bias}
    more = {"quantization_config": packer.config}
    packed = tiny.write_tiny_llama(folder / "packed", **sizes, more_config=more)
    plain = tiny.write_tiny_llama(folder / "plain", **sizes)
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    stored: dict[str, np.ndarray] = {}
    for name, value in list(tensors.items()):
        if not name.endswith("proj.weight"):
            stored[name] = value
            continue
        parts, tensors[name] = packer.pack(value)
        stored |= {f"{name.removesuffix('.weight')}.{part}": v for part, v in parts.items()}
    raw_safetensors.write(packed / "model.safetensors", stored)
    tiny.write_weights(plain, tensors)
    return packed, plain


def awq(*, group_size: int = 32, more: Mapping[str, Any] | None = None) -> Packer:
    """4 bits with zero points; a word holds eight outputs in AWQ's order."""

    def pack(weight: np.ndarray) -> Packed:
        numbers, zeros, scales, dequantised = _quantised(weight, 4, _groups(weight, group_size))
        return Packed(
            {
                "qweight": _words(numbers, 4, _AWQ_OUTPUTS),
                "qzeros": _words(zeros, 4, _AWQ_OUTPUTS),
                "scales": scales,
            },
            dequantised,
        )

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size}
    return Packer(pack, {**config, "version": "gemm", "zero_point": True, **(more or {})})


def gptq(
    *,
    bits: int = 4,
    group_size: int = 32,
    is_ordered: bool = False,
    has_g_idx: bool = True,
    checkpoint_format: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Packer:
    """A word holds consecutive inputs, or the zero points of consecutive outputs, less 1."""

    def pack(weight: np.ndarray) -> Packed:
        groups = _groups(weight, group_size)
        if is_ordered:
            groups = np.random.default_rng(0).permutation(groups)
        numbers, zeros, scales, dequantised = _quantised(weight, bits, groups)
        in_order = tuple(range(32 // bits))
        stored = zeros if checkpoint_format == "gptq_v2" else zeros - 1
        parts = {
            "qweight": np.ascontiguousarray(_words(numbers.T, bits, in_order).T),
            "qzeros": _words(stored, bits, in_order),
            "scales": scales,
        }
        return Packed(parts | ({"g_idx": groups} if has_g_idx else {}), dequantised)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False}
    if checkpoint_format is not None:
        config["checkpoint_format"] = checkpoint_format
    return Packer(pack, {**config, "desc_act": is_ordered, **(more or {})})


def fp8(
    *,
    block: tuple[int, int] | None = None,
    scale_shape: Callable[[int], tuple[int, ...]] = lambda outputs: (),
    scale_name: str = "weight_scale",
    config: Mapping[str, Any] | None = None,
) -> Packer:
    """8-bit floats with a scale for each block, or of a shape that depends on the outputs."""

    def pack(weight: np.ndarray) -> Packed:
        outputs, width = weight.shape
        random = np.random.default_rng(outputs)
        shape = scale_shape(outputs)
        if block is not None:
            shape = (-(-outputs // block[0]), -(-width // block[1]))
        scale = random.uniform(0.001, 0.01, shape).astype(np.float32)
        rows, columns = block or (1, width)
        whole = np.broadcast_to(
            scale.reshape(shape if block else (-1, 1)), (outputs, 1) if not block else shape
        )
        of_each = np.array(
            [[whole[o // rows, i // columns] for i in range(width)] for o in range(outputs)],
            np.float32,
        )
        stored = (weight / of_each).astype(ml_dtypes.float8_e4m3fn)
        parts = {"weight": stored, scale_name: scale}
        return Packed(parts, stored.astype(np.float32) * of_each)

    of_blocks = {} if block is None else {"weight_block_size": list(block)}
    return Packer(pack, dict(config or {"quant_method": "fp8", "fmt": "e4m3", **of_blocks}))


def _groups(weight: np.ndarray, group_size: int) -> np.ndarray:
    """The group of every input."""
    width = weight.shape[1]
    size = width if group_size == -1 else group_size
    return np.array([i // size for i in range(width)], np.int32)


def _quantised(
    weight: np.ndarray, bits: int, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Numbers `[in, out]`, zero points and scales `[groups, out]`, and the weight they give."""
    most = 2**bits - 1
    count = int(groups.max()) + 1
    width, outputs = weight.shape[1], weight.shape[0]
    zeros = np.zeros((count, outputs), np.int64)
    scales = np.zeros((count, outputs), np.float16)
    numbers = np.zeros((width, outputs), np.int64)
    dequantised = np.zeros_like(weight)
    for group in range(count):
        inputs = np.flatnonzero(groups == group)
        for output in range(outputs):
            values = weight[output, inputs]
            scale = np.float16((values.max() - values.min()) / most)
            # Never 0: less 1 it could not be stored.
            zero = int(np.clip(np.round(-values.min() / np.float32(scale)), 1, most))
            q = np.clip(np.round(values / np.float32(scale)) + zero, 0, most).astype(np.int64)
            zeros[group, output], scales[group, output], numbers[inputs, output] = zero, scale, q
            dequantised[output, inputs] = (q - zero).astype(np.float32) * np.float32(scale)
    return numbers, zeros, scales, dequantised


def _words(numbers: np.ndarray, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Words along the last axis; place `i` of one holds its number `order[i]`."""
    rows, columns = numbers.shape
    words = np.zeros((rows, columns // len(order)), np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            for place, column in enumerate(order):
                number = int(numbers[row, word * len(order) + column])
                words[row, word] |= np.uint32(number << (place * bits))
    return words.view(np.int32)
