"""Weights quantised by GPTQ, as AutoGPTQ and GPTQModel pack them.

A map of `in` inputs and `out` outputs is held as `qweight` [in * bits / 32, out], whose words hold
consecutive inputs, `qzeros` [groups, out * bits / 32], `scales` [groups, out], and `g_idx` [in],
the group of every input; a weight is `(q - zero) * scale`. The format "gptq" stores zero points
less 1, "gptq_v2" as they are.
"""

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint import packed_words
from jaxpaged.model.checkpoint.quantization_fields import QuantizationFields
from jaxpaged.model.checkpoint.stored_tensors import StoredTensors
from jaxpaged.model.checkpoint.tensors import Shape

_KEYS = frozenset(
    {"quant_method", "bits", "group_size", "desc_act", "checkpoint_format", "format"}
    | {"adapter", "dynamic", "is_marlin_format", "pack_dtype"}
)
# How the quantiser chose its numbers, and settings of kernels. Which modules are packed shows in
# the tensors, and zero points are stored for symmetric weights too.
_WITHOUT_EFFECT = frozenset(
    {"act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs"}
    | {"damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "exllama_config"}
    | {"hyb_act", "lm_head", "max_input_length", "meta", "model_file_base_name"}
    | {"model_name_or_path", "model_seqlen", "module_name_preceding_first_block"}
    | {"modules_in_block_to_quantize", "mse", "pad_token_id", "quantizer", "static_groups", "sym"}
    | {"tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"}
)
# What is unpacked at a time stays in a processor's cache.
_ROWS_OF_WORDS = 16


class GptqFormat:
    """Reads the packed weights of one checkpoint.

    Raises:
        CheckpointError: The settings ask for another way of packing.
    """

    marker = "qweight"
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, settings: QuantizationFields) -> None:
        settings.check_keys(_KEYS, _WITHOUT_EFFECT)
        self._bits = settings.one_of("bits", (4, 8))
        settings.one_of("pack_dtype", (None, "int32"))
        settings.one_of("is_marlin_format", (None, False))
        settings.one_of("dynamic", (None, {}))
        settings.one_of("adapter", (None, {}))
        self._is_ordered = settings.one_of("desc_act", (None, False, True)) is not True
        formats = [
            settings.one_of(key, (None, "gptq", "gptq_v2"))
            for key in ("checkpoint_format", "format")
        ]
        self._stores_less_one = "gptq_v2" not in formats
        self._group_size = settings.group_size()

    def shape(self, stored: StoredTensors, base: str) -> Shape:
        """`[out, in]`, after a look at the shapes of all parts."""
        per_word = 32 // self._bits
        words, outputs = packed_words.entry(stored, f"{base}.qweight", ("int32",), 2).shape
        packed_words.entry(stored, f"{base}.qzeros", ("int32",), 2)
        packed_words.entry(stored, f"{base}.scales", packed_words.SCALE_DTYPES, 2)
        width = words * per_word
        groups = packed_words.num_groups(width, self._group_size)
        packed_words.check_shape(stored, f"{base}.scales", (groups, outputs))
        packed_words.check_shape(stored, f"{base}.qzeros", (groups, outputs // per_word))
        if outputs % per_word:
            raise CheckpointError(
                f"{stored.where}: {base} has {outputs} outputs, which do not fill words of "
                f"{per_word} zero points; quantise the model with another tool, or not"
            )
        if f"{base}.g_idx" in stored.files or not self._is_ordered:
            packed_words.entry(stored, f"{base}.g_idx", ("int32",), 1)
            packed_words.check_shape(stored, f"{base}.g_idx", (width,))
        return outputs, width

    def weight(self, stored: StoredTensors, base: str) -> np.ndarray:
        """The weight `[out, in]` in float32; exact where scales have 16 bits.

        Raises:
            CheckpointError: Groups that are not there, or zero points that readers of the format
                do not agree on.
        """
        outputs, width = self.shape(stored, base)
        scales = stored.read(f"{base}.scales").astype(np.float32)
        zeros = self._zeros(stored, base)
        groups = self._groups(stored, base, width, len(scales))
        weight = np.empty((width, outputs), np.float32)
        per_word = 32 // self._bits
        words = stored.read(f"{base}.qweight")
        for begin in range(0, len(words), _ROWS_OF_WORDS):
            of_rows = words[begin : begin + _ROWS_OF_WORDS]
            numbers = packed_words.unpacked(of_rows, self._bits).swapaxes(1, 2)
            rows = slice(begin * per_word, (begin + len(of_rows)) * per_word)
            np.subtract(numbers.reshape(-1, outputs), zeros[groups[rows]], out=weight[rows])
            weight[rows] *= scales[groups[rows]]
        return weight.T

    def _zeros(self, stored: StoredTensors, base: str) -> np.ndarray:
        words = stored.read(f"{base}.qzeros")
        zeros = packed_words.unpacked(words, self._bits).reshape(len(words), -1)
        if not self._stores_less_one:
            return zeros.astype(np.float32)
        most = 2**self._bits - 1
        if (zeros == most).any():
            raise CheckpointError(
                f"{stored.where}: {base}.qzeros holds {most}, which some readers of the format "
                f"'gptq' take for a zero point of 0 and others for {most + 1}; save the model with "
                "GPTQModel as 'gptq_v2', which has no such doubt"
            )
        return zeros.astype(np.float32) + 1.0

    def _groups(self, stored: StoredTensors, base: str, width: int, count: int) -> np.ndarray:
        """The group of every input."""
        name = f"{base}.g_idx"
        if name not in stored.files:
            return np.arange(width) // (width if self._group_size == -1 else self._group_size)
        groups = stored.read(name)
        if groups.min() < 0 or groups.max() >= count:
            raise CheckpointError(
                f"{stored.where}: tensor {name} names groups from {groups.min()} to "
                f"{groups.max()}; there are {count}"
            )
        return groups
