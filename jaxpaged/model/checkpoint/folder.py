"""A model in a folder of Hugging Face layout: configuration, safetensors, tokenizer files.

Files that the layout does not name, or that the shard index does not list, are ignored.
"""

import functools
import hashlib
import pathlib

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.chat_templates import ChatTemplates
from jaxpaged.model.checkpoint import folder_tokenizer, members, quantization
from jaxpaged.model.checkpoint.folder_tokenizer import build_tokenizer
from jaxpaged.model.checkpoint.folder_weights import FolderWeights
from jaxpaged.model.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from jaxpaged.model.checkpoint.stored_tensors import StoredTensors
from jaxpaged.model.checkpoint.tensors import Shape, expected_shapes, is_tensor_name
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.shown import shown
from jaxpaged.model.tokenizer import Tokenizer

_NAMED_AT_MOST = 6

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})


class FolderCheckpoint:
    """An opened folder: the configuration is read; weight files are, when first asked for.

    Raises:
        CheckpointError: The configuration is missing, damaged, or not of a supported model. The
            methods raise it for the files they read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        config_path = members.member(path, "config.json")
        if config_path is None:
            raise CheckpointError(
                f"{path}: config.json is missing; expected a folder in Hugging Face layout"
            )
        content = members.parse_object(members.read_bytes(config_path), config_path)
        where = str(config_path)
        plain = {key: value for key, value in content.items() if key not in quantization.KEYS}
        self.config = ModelConfig.from_hf(plain, where)
        self._weight_format = quantization.read_format(content, where)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `tokenizer.json`, completed by the other tokenizer files."""
        return build_tokenizer(
            self.path, self.config.vocab_size, max_len=self.config.max_position_embeddings
        )

    def chat_templates(self) -> ChatTemplates:
        """The chat templates, as the tokenizer has them."""
        return folder_tokenizer.chat_templates(self.path)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 by part of the model; a part that is not there hashes to a value too.

        Raises:
            CheckpointError: There is no tokenizer, or the weights are not right.
        """
        weights = hashlib.sha256()
        for name, file in sorted(self._files.items()):
            weights.update(f"{name} {file.size} {len(file.header)}\n".encode())
            weights.update(file.header)
        return {
            "config": self._digest("config.json"),
            "generation_config": self._digest("generation_config.json"),
            **folder_tokenizer.digests(self.path),
            "weights": weights.hexdigest(),
        }

    def weight_files(self) -> list[pathlib.Path]:
        """The listed weight files, by name."""
        return [file.path for _, file in sorted(self._files.items())]

    def shapes(self) -> dict[str, Shape]:
        """Name to shape of every tensor in the listed weight files."""
        return self._weights.shapes

    def tensor(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype (float32, float16 or bfloat16).

        Quantised ones are float32, 8-bit floats without a scale bfloat16.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be read.
        """
        return self._weights.tensor(name)

    @functools.cached_property
    def _weights(self) -> FolderWeights:
        return FolderWeights(
            StoredTensors(files=self._tensors, where=str(self.path)),
            self._weight_format,
            frozenset(expected_shapes(self.config)),
        )

    def stored_dtype(self, name: str) -> np.dtype | None:
        """The dtype of a tensor that is not quantised."""
        file = self._tensors.get(name)
        if file is None or file.entries[name].dtype.itemsize == 1:
            return None
        return file.entries[name].dtype

    @functools.cached_property
    def _files(self) -> dict[str, SafetensorsFile]:
        """Weight files by name, headers checked; a missing one is found before any is read."""
        paths = {name: members.member(self.path, name) for name in self._names}
        missing = sorted(name for name, path in paths.items() if path is None)
        if missing:
            raise CheckpointError(f"{self.path}: {_listed(missing)} but missing; download it")
        return {name: open_safetensors(path) for name, path in paths.items() if path is not None}

    @functools.cached_property
    def _tensors(self) -> dict[str, SafetensorsFile]:
        """The file of every tensor; where two shards hold one, the index decides."""
        tensors = {name: file for file in self._files.values() for name in file.entries}
        for tensor, name in (self._weight_map or {}).items():
            if tensor not in self._files[name].entries:
                raise CheckpointError(
                    f"{self.path / name}: tensor {tensor} is missing, which {_INDEX} places there"
                )
            tensors[tensor] = self._files[name]
        return tensors

    @functools.cached_property
    def _weight_map(self) -> dict[str, str] | None:
        """Tensor to file, from the shard index; None for a single file."""
        index = members.member(self.path, _INDEX)
        if members.member(self.path, _SINGLE) is not None:
            return None
        if index is None:
            raise CheckpointError(self._no_weights())
        weight_map = members.parse_object(members.read_bytes(index), index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        for tensor, name in weight_map.items():
            if not is_tensor_name(tensor):
                raise CheckpointError(f"{index}: {shown(tensor)} is not the name of a tensor")
            is_name = isinstance(name, str) and name.isprintable()
            if not is_name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: weight_map places {tensor} in {shown(name)}; expected the plain "
                    "name of a .safetensors file inside the model folder"
                )
        return weight_map

    @property
    def _names(self) -> list[str]:
        return [_SINGLE] if self._weight_map is None else sorted(set(self._weight_map.values()))

    def _no_weights(self) -> str:
        message = f"{self.path}: neither {_SINGLE} nor {_INDEX} is there"
        pickles = sorted(file.name for file in self.path.iterdir() if file.suffix in _PICKLES)
        if not pickles:
            return f"{message}; download the model's safetensors files"
        return (
            f"{message}, only {', '.join(pickles)}. Pickle files can run code when they are opened "
            "and are refused: convert the model to safetensors (load it with transformers where "
            "you trust it, then save_pretrained(folder, safe_serialization=True))"
        )

    def _digest(self, *names: str) -> str:
        return members.digest(self.path, *names)


def _listed(missing: list[str]) -> str:
    if len(missing) == 1:
        return f"{missing[0]} is listed in {_INDEX}"
    more = len(missing) - _NAMED_AT_MOST
    rest = f" and {more} more" if more > 0 else ""
    return f"{', '.join(missing[:_NAMED_AT_MOST])}{rest} are listed in {_INDEX}"
