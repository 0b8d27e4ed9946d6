"""A model's files, whatever their format, behind one interface.

Knows the formats' modules; they know nothing of each other. Nothing here loads JAX.
"""

import pathlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.chat_templates import ChatTemplates
from jaxpaged.model.checkpoint.tensors import Shape
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.tokenizer import Tokenizer


@runtime_checkable
class Checkpoint(Protocol):
    """An opened model: configuration and headers are read and checked, weights are not."""

    @property
    def path(self) -> pathlib.Path:
        """The folder or file."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with its chat template and end-of-sequence tokens."""
        ...

    def chat_templates(self) -> ChatTemplates:
        """The model's chat templates, without the tokenizer."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 by part of the model (config, generation_config, tokenizer, chat_template,
        weights); of the weights only names, headers and sizes count, so that it is cheap."""
        ...

    def weight_files(self) -> list[pathlib.Path]:
        """The files whose bytes are the weights, in a fixed order."""
        ...

    def shapes(self) -> dict[str, Shape]:
        """Name to shape of every tensor, by Hugging Face names, without reading data."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as Hugging Face lays it out ([out, in]), in its stored dtype; quantised
        ones are float32, 8-bit floats without a scale bfloat16."""
        ...

    def stored_dtype(self, name: str) -> np.dtype | None:
        """The dtype that a tensor is stored in; None of a quantised one."""
        ...


@runtime_checkable
class StackedCheckpoint(Checkpoint, Protocol):
    """One that holds the arrays of a decoder with stacked layers, as the decoder has them."""

    def pieces(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """An array by its place in the module tree, cut along its first axis: each part and its
        values, in the stored dtype."""
        ...


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """The checkpoint in a folder of Hugging Face layout, in one that `jaxpaged convert` wrote, or
    in a `.gguf` file.

    Raises:
        CheckpointError: The files are missing, damaged or not of a supported model.
        ConfigError: A package that the format needs is not installed.
    """
    # Imported here: a job on one format does not load the others' packages, an engine that is given
    # its weights none of them.
    from jaxpaged.model.checkpoint.orbax_index import MARKER

    if (path / MARKER).exists():
        from jaxpaged.model.checkpoint.orbax import OrbaxCheckpoint

        return OrbaxCheckpoint(path)
    if path.is_dir():
        from jaxpaged.model.checkpoint.folder import FolderCheckpoint

        return FolderCheckpoint(path)
    if path.suffix.lower() == ".gguf":
        from jaxpaged.model.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    raise CheckpointError(f"{path}: neither a folder in Hugging Face layout nor a .gguf file")
