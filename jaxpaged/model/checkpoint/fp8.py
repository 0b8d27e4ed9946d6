"""Weights in 8-bit floats with scales: one for a tensor, for each output, or for each block.

As DeepSeek and Qwen publish them (`quant_method` "fp8": `weight_scale_inv`, which weights are
multiplied by in spite of its name, or `weight_scale`), and as compressed-tensors writes them
("float-quantized": `weight_scale`). Only weights are read so: activations are not rounded to 8 bits
here, whatever `activation_scheme` says, and scales that were measured for them are not used.
"""

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import packed_words
from jaxpaged.model.checkpoint.quantization_fields import QuantizationFields
from jaxpaged.model.checkpoint.stored_tensors import StoredTensors
from jaxpaged.model.checkpoint.tensors import Shape

_DTYPES = ("float8_e4m3fn", "float8_e5m2")
_SCALES = ("weight_scale", "weight_scale_inv")

_KEYS = frozenset({"quant_method", "fmt", "weight_block_size"})
_WITHOUT_EFFECT = frozenset(
    {"activation_scheme", "ignored_layers", "modules_to_not_convert", "scale_fmt"}
)

Block = tuple[int, int]


class Fp8Format:
    """Reads the scaled weights of one checkpoint.

    Args:
        block: Outputs and inputs that share a scale, where there is one for each block.
    """

    marker = "weight"
    parts = frozenset({"weight", *_SCALES, "input_scale"})

    def __init__(self, block: Block | None) -> None:
        self._block = block

    def shape(self, stored: StoredTensors, base: str) -> Shape:
        """`[out, in]`, after a look at the shape of its scale."""
        shape = packed_words.entry(stored, f"{base}.weight", _DTYPES, 2).shape
        self._scale_name(stored, base)
        return shape

    def weight(self, stored: StoredTensors, base: str) -> np.ndarray:
        """The weight `[out, in]` in float32, its products rounded once."""
        name = self._scale_name(stored, base)
        scale = stored.read(name).astype(np.float32)
        weight = stored.read(f"{base}.weight").astype(np.float32)
        if scale.size == 1:
            weight *= scale.reshape(())
        elif self._block is None:
            weight *= scale.reshape(-1, 1)
        else:
            rows, columns = self._block
            for index, row in enumerate(scale):
                of_block = weight[index * rows : (index + 1) * rows]
                of_block *= np.repeat(row, columns)[: weight.shape[1]]
        return weight

    def _scale_name(self, stored: StoredTensors, base: str) -> str:
        """The name of the one scale, whose shape goes with the weight's."""
        found = [name for leaf in _SCALES if (name := f"{base}.{leaf}") in stored.files]
        if len(found) != 1:
            raise CheckpointError(
                f"{stored.where}: tensor {base}.weight has 8-bit floats and "
                f"{' and '.join(found) or 'no weight_scale'}; quantization_config asks for one "
                "scale"
            )
        outputs, width = stored.entry(f"{base}.weight").shape
        allowed: list[Shape] = [(), (1,), (1, 1)]
        if self._block is None:
            allowed += [(outputs,), (outputs, 1)]
        else:
            allowed += [(-(-outputs // self._block[0]), -(-width // self._block[1]))]
        scale = stored.entry(found[0])
        if scale.shape not in allowed or scale.dtype.name not in packed_words.SCALE_DTYPES:
            raise CheckpointError(
                f"{stored.where}: tensor {found[0]} is {scale.dtype.name} of shape "
                f"{list(scale.shape)}; for a weight of {outputs} x {width} expected are shapes "
                + ", ".join(str(list(shape)) for shape in allowed)
            )
        return found[0]


def read_fp8(settings: QuantizationFields) -> Fp8Format:
    """The format of `quant_method` "fp8".

    Raises:
        CheckpointError: The settings ask for something else.
    """
    settings.check_keys(_KEYS, _WITHOUT_EFFECT)
    settings.one_of("fmt", (None, "e4m3", "e5m2"))
    return Fp8Format(settings.block("weight_block_size"))
