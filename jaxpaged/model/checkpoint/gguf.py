"""A model in a `.gguf` file of llama.cpp: names, row order and quantisation undone.

Knows the `gguf` package, for its table of quantisation types and for dequantising.
"""

import enum
import functools
import hashlib
import importlib
import json
import math
import pathlib
from types import ModuleType

import ml_dtypes
import numpy as np

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.model.chat_templates import ChatTemplates
from jaxpaged.model.checkpoint.gguf_config import build_config
from jaxpaged.model.checkpoint.gguf_header import GgufHeader, StoredTensor, read_header
from jaxpaged.model.checkpoint.gguf_metadata import Metadata
from jaxpaged.model.checkpoint.gguf_tokenizer import (
    CHAT_TEMPLATE,
    build_tokenizer,
    chat_templates,
)
from jaxpaged.model.checkpoint.tensors import Shape
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.tokenizer import Tokenizer

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# 4 MiB in float32, of which the package makes four while it works. Larger pieces are not faster.
_PIECE_ELEMENTS = 2**20

_PLAIN: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Read into the configuration's rope scaling.
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """An opened `.gguf` file: header read and checked, data mapped when a tensor is asked for.

    Raises:
        CheckpointError: The file is damaged, or not a supported model.
        ConfigError: The `gguf` package is not installed.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._gguf = _import_gguf()
        self._header = read_header(path)
        _check_extents(self._header, self._gguf, path)
        rope_factors = None
        if _ROPE_FACTORS in self._header.tensors:
            rope_factors = self._read(self._header.tensors[_ROPE_FACTORS])
        self.config: ModelConfig = build_config(self._header, rope_factors, str(path))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer rebuilt from the metadata."""
        return build_tokenizer(Metadata(values=self._header.metadata, where=str(self.path)))

    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the metadata."""
        return chat_templates(Metadata(values=self._header.metadata, where=str(self.path)))

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 by part of the model; the file's size and tensor table stand for the weights."""
        metadata = self._header.metadata
        is_tokenizer = {key: key.startswith("tokenizer.") for key in metadata}
        template = metadata.get(CHAT_TEMPLATE, "")
        return {
            "config": _digest({k: v for k, v in metadata.items() if not is_tokenizer[k]}),
            "generation_config": _digest({}),
            "tokenizer": _digest(
                {k: v for k, v in metadata.items() if is_tokenizer[k] and k != CHAT_TEMPLATE}
            ),
            "chat_template": _digest(template),
            "weights": _digest(
                [
                    self._header.size,
                    sorted(
                        (name, tensor.shape, tensor.ggml_type, tensor.offset)
                        for name, tensor in self._header.tensors.items()
                    ),
                ]
            ),
        }

    def weight_files(self) -> list[pathlib.Path]:
        """The file itself."""
        return [self.path]

    def shapes(self) -> dict[str, Shape]:
        """Name to shape of every tensor, by Hugging Face names."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32, rows in Hugging Face order.

        Raises:
            CheckpointError: There is no such tensor, or its quantisation is not supported.
        """
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        values = self._read(stored)
        # llama.cpp rotates neighbours in a Llama, and halves of a head in the others.
        if self._header.metadata.get("general.architecture") != "llama":
            return values
        if ".q_proj." in name:
            return self._unpermuted(values, name, self.config.num_heads)
        if ".k_proj." in name:
            return self._unpermuted(values, name, self.config.num_kv_heads)
        return values

    def stored_dtype(self, name: str) -> np.dtype | None:
        """The dtype of a tensor that is not quantised."""
        kind = self._gguf.GGMLQuantizationType(self._tensors[name].ggml_type)
        return _PLAIN.get(kind.name)

    @functools.cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return {
            _hf_name(name): tensor
            for name, tensor in self._header.tensors.items()
            if name != _ROPE_FACTORS
        }

    def _read(self, stored: StoredTensor) -> np.ndarray:
        """The tensor in float32, dequantised piece by piece: the package makes copies."""
        kind = self._gguf.GGMLQuantizationType(stored.ggml_type)
        block_elements, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        values = np.empty(math.prod(stored.shape) // block_elements * block_elements, np.float32)
        piece = _PIECE_ELEMENTS // block_elements * block_elements
        try:
            with self.path.open("rb") as file:
                file.seek(stored.offset)
                for begin in range(0, values.size, piece):
                    of_piece = values[begin : begin + piece]
                    num_bytes = of_piece.size // block_elements * block_bytes
                    blocks = np.fromfile(file, np.uint8, num_bytes)
                    if blocks.size != num_bytes:
                        raise CheckpointError(f"{self.path}: the file has become shorter")
                    of_piece[:] = self._dequantised(blocks, kind)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from None
        return values.reshape(stored.shape)

    def _dequantised(self, blocks: np.ndarray, kind: enum.IntEnum) -> np.ndarray:
        try:
            # Damaged scales are infinite or not a number; so are values then, and it shows.
            with np.errstate(all="ignore"):
                return self._gguf.quants.dequantize(blocks, kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: quantisation {kind.name} is not supported by the gguf package; "
                "convert the model to another one, for instance Q8_0 or F16"
            ) from None

    def _unpermuted(self, values: np.ndarray, name: str, num_heads: int) -> np.ndarray:
        if values.shape[0] % (2 * num_heads):
            raise CheckpointError(
                f"{self.path}: tensor {name} has {values.shape[0]} rows, which do not divide into "
                f"{num_heads} heads"
            )
        return _unpermute(values, num_heads)


def _import_gguf() -> ModuleType:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConfigError(
            "reading a .gguf file needs the gguf package; install it with: "
            "pip install 'jaxpaged[gguf]'"
        ) from None


def _num_bytes(tensor: StoredTensor, gguf: ModuleType) -> int:
    kind = gguf.GGMLQuantizationType(tensor.ggml_type)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(tensor.shape) // block_elements * block_bytes


def _check_extents(header: GgufHeader, gguf: ModuleType, path: pathlib.Path) -> None:
    """Every tensor's bytes lie inside the file, on nobody else's."""
    known = {kind.value for kind in gguf.GGML_QUANT_SIZES}
    end_of_last, last = 0, ""
    for name, tensor in sorted(header.tensors.items(), key=lambda item: item[1].offset):
        if tensor.ggml_type not in known:
            raise CheckpointError(
                f"{path}: tensor {name} has quantisation type {tensor.ggml_type}, which this gguf "
                "package does not know; a newer one may: pip install -U gguf"
            )
        block_elements, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.ggml_type)]
        if not tensor.shape or 0 in tensor.shape or tensor.shape[-1] % block_elements:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, which does not divide "
                f"into quantisation blocks of {block_elements}"
            )
        if tensor.offset < end_of_last:
            raise CheckpointError(f"{path}: tensors {last} and {name} overlap")
        end_of_last, last = tensor.offset + _num_bytes(tensor, gguf), name
        if end_of_last > header.size:
            raise CheckpointError(
                f"{path}: tensor {name} ends at byte {end_of_last}, but the file has only "
                f"{header.size}; it is cut short: download it again"
            )


def _hf_name(name: str) -> str:
    """The Hugging Face name; one without an equivalent stays, and is then refused as unused."""
    parts = name.split(".")
    stem = _NAMES.get(parts[-2]) if len(parts) > 1 else None
    if len(parts) == 2 and stem:
        return f"{stem}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and stem:
        return f"model.layers.{parts[1]}.{stem}.{parts[3]}"
    return name


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head from llama.cpp's order (pairs that rotate together are neighbours) to
    Hugging Face's (they are half a head apart)."""
    half = values.shape[0] // num_heads // 2
    pairs = values.reshape(num_heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _digest(value: object) -> str:
    # NaN and infinities in metadata are hashed as Python writes them: this JSON is never read.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
