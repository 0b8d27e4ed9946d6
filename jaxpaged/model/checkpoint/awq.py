"""Weights quantised by AWQ, as AutoAWQ's "gemm" version packs them.

A map of `in` inputs and `out` outputs is held as `qweight` [in, out / 8], `qzeros`
[groups, out / 8] and `scales` [groups, out]; a weight is `(q - zero) * scale`. The eight numbers of
a word are the outputs 0, 2, 4, 6, 1, 3, 5, 7 of their eight, from the lowest bits up.
"""

import numpy as np

from jaxpaged.model.checkpoint import packed_words
from jaxpaged.model.checkpoint.quantization_fields import QuantizationFields
from jaxpaged.model.checkpoint.stored_tensors import StoredTensors
from jaxpaged.model.checkpoint.tensors import Shape

_BITS = 4
# Where the eight outputs of a word are in it: the inverse of the order above.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

_KEYS = frozenset({"quant_method", "bits", "group_size", "version", "format", "zero_point"})
# Which modules are packed shows in the tensors; the rest is for AutoAWQ's own kernels.
_WITHOUT_EFFECT = frozenset(
    {"backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"}
    | {"modules_to_not_convert"}
)


class AwqFormat:
    """Reads the packed weights of one checkpoint.

    Raises:
        CheckpointError: The settings ask for another way of packing.
    """

    marker = "qweight"
    parts = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, settings: QuantizationFields) -> None:
        settings.check_keys(_KEYS, _WITHOUT_EFFECT)
        settings.one_of("bits", (_BITS,))
        # Newer exporters say "format".
        key = "version" if settings.values.get("version") is not None else "format"
        settings.one_of(key, ("gemm", "GEMM"))
        settings.one_of("zero_point", (True,))
        self._group_size = settings.group_size()

    def shape(self, stored: StoredTensors, base: str) -> Shape:
        """`[out, in]`, after a look at the shapes of all parts."""
        width, words = packed_words.entry(stored, f"{base}.qweight", ("int32",), 2).shape
        packed_words.entry(stored, f"{base}.qzeros", ("int32",), 2)
        packed_words.entry(stored, f"{base}.scales", packed_words.SCALE_DTYPES, 2)
        groups = packed_words.num_groups(width, self._group_size)
        outputs = words * len(_PLACES)
        packed_words.check_shape(stored, f"{base}.qzeros", (groups, words))
        packed_words.check_shape(stored, f"{base}.scales", (groups, outputs))
        return outputs, width

    def weight(self, stored: StoredTensors, base: str) -> np.ndarray:
        """The weight `[out, in]` in float32; exact where scales have 16 bits."""
        outputs, width = self.shape(stored, base)
        scales = stored.read(f"{base}.scales").astype(np.float32)
        zeros = _numbers(stored.read(f"{base}.qzeros"))
        words = stored.read(f"{base}.qweight")
        weight = np.empty((width, outputs), np.float32)
        size = width if self._group_size == -1 else self._group_size
        for group in range(len(scales)):
            rows = slice(group * size, (group + 1) * size)
            np.subtract(_numbers(words[rows]), zeros[group].astype(np.float32), out=weight[rows])
            weight[rows] *= scales[group]
        return weight.T


def _numbers(words: np.ndarray) -> np.ndarray:
    """The numbers of all words of a row, one for each output, in their order."""
    return packed_words.unpacked(words, _BITS)[..., _PLACES].reshape(len(words), -1)
