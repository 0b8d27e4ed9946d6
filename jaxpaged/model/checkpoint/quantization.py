"""Which format a checkpoint's weights are quantised in, as its `config.json` says.

Knows the formats' modules; they know nothing of each other.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint.awq import AwqFormat
from jaxpaged.model.checkpoint.compressed_tensors import read_compressed_tensors
from jaxpaged.model.checkpoint.fp8 import read_fp8
from jaxpaged.model.checkpoint.gptq import GptqFormat
from jaxpaged.model.checkpoint.quantization_fields import QuantizationFields
from jaxpaged.model.checkpoint.stored_tensors import StoredTensors
from jaxpaged.model.checkpoint.tensors import Shape
from jaxpaged.model.shown import shown

# The second is what compressed-tensors called the first in its beginnings.
KEYS = ("quantization_config", "compression_config")


@runtime_checkable
class WeightFormat(Protocol):
    """How the weight of a linear map is put together from its parts.

    Attributes:
        marker: Last part of the name of the tensor that holds the numbers.
        parts: Last parts of the names of all tensors that belong to a quantised weight.
    """

    marker: str
    parts: frozenset[str]

    def shape(self, stored: StoredTensors, base: str) -> Shape:
        """`[out, in]` of the map `base`, its parts checked; reads no data."""
        ...

    def weight(self, stored: StoredTensors, base: str) -> np.ndarray:
        """The weight of the map `base` in float32, `[out, in]`."""
        ...


_READERS: Mapping[str, Callable[[QuantizationFields], WeightFormat]] = {
    "awq": AwqFormat,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": GptqFormat,
}


def read_format(config: Mapping[str, Any], where: str) -> WeightFormat | None:
    """The format of quantised weights, or None for ones that are not quantised.

    Args:
        config: The parsed `config.json`.
        where: Names the file in errors.

    Raises:
        CheckpointError: A format, or a setting of one, that is not read; the message names it.
    """
    key = next((key for key in KEYS if config.get(key) is not None), None)
    if key is None:
        return None
    settings = config[key]
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(method, str) or method not in _READERS:
        raise CheckpointError(
            f"{where}: {key} has quant_method {shown(method)}, whose weights cannot be read; "
            f"supported are {', '.join(_READERS)}. Take a version of the model that is not "
            "quantised, or a .gguf file; bitsandbytes and others are undone by transformers: "
            "load the model, then dequantize() and save_pretrained(folder)"
        )
    return _READERS[method](QuantizationFields(values=settings, where=f"{where}: {key}"))
