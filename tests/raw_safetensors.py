"""Writes safetensors files, also with 8-bit floats, for which the package has no NumPy dtype."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
}


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> pathlib.Path:
    """A new file with the tensors in their order; returns it."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        content = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path
