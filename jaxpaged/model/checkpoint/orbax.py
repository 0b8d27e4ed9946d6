"""A model in a folder that `jaxpaged convert` wrote: an index, tokenizer files, Orbax arrays.

jaxpaged-checkpoint.json    the index: configuration, arrays, where they came from
tokenizer.json ...          as in a folder of Hugging Face layout
weights/NAME.000            Orbax checkpoints: the pieces of each array of the decoder
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.chat_templates import ChatTemplates
from jaxpaged.model.checkpoint import folder_tokenizer, members, orbax_arrays
from jaxpaged.model.checkpoint.folder_tokenizer import build_tokenizer
from jaxpaged.model.checkpoint.orbax_index import (
    WEIGHTS,
    StoredArray,
    piece_name,
    read_index,
)
from jaxpaged.model.checkpoint.tensors import Shape
from jaxpaged.model.tokenizer import Tokenizer

_LAYERS = "layers."
_EXPERTS = ".experts."

_MAPS = ("kernel", "kernels")


class _Place(NamedTuple):
    """Where a tensor lies."""

    array: str
    lead: tuple[int, ...]
    is_transposed: bool


class OrbaxCheckpoint:
    """An opened folder: the index is read and compared with the files, arrays are not read.

    Raises:
        CheckpointError: The index, or a file that it lists, is missing or damaged.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._index = read_index(path)
        self.config = self._index.config
        # The last piece that a tensor was cut out of: there may be several layers in one.
        self._last: tuple[pathlib.Path, np.ndarray] | None = None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder's tokenizer files."""
        return build_tokenizer(
            self.path, self.config.vocab_size, max_len=self.config.max_position_embeddings
        )

    def chat_templates(self) -> ChatTemplates:
        """The chat templates, as the tokenizer has them."""
        return folder_tokenizer.chat_templates(self.path)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 by part of the model; of the weights it is that of all values, when written.

        Raises:
            CheckpointError: There is no tokenizer.
        """
        return {
            **self._index.fingerprint(),
            "generation_config": members.digest(self.path, "generation_config.json"),
            **folder_tokenizer.digests(self.path),
        }

    def weight_files(self) -> list[pathlib.Path]:
        """All files of the arrays, by name."""
        return [self.path / WEIGHTS / name for name in sorted(self._index.files)]

    def shapes(self) -> dict[str, Shape]:
        """Name to shape of every tensor that the arrays hold.

        Raises:
            CheckpointError: An array's shape is not one of this model.
        """
        shapes = {}
        for name, place in self._places.items():
            shape = self._index.arrays[place.array].shape[len(place.lead) :]
            shapes[name] = shape[::-1] if place.is_transposed else shape
        return shapes

    def stored_dtype(self, name: str) -> np.dtype | None:
        """The dtype of a tensor."""
        return self._index.arrays[self._place(name).array].numpy_dtype

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as Hugging Face lays it out, in its stored dtype.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be read.
        """
        place = self._place(name)
        array = self._array(place.array)
        if not place.lead:
            whole = np.empty(array.shape, array.numpy_dtype)
            for part, values in self.pieces(place.array):
                whole[part] = values
            return whole.T if place.is_transposed else whole
        number, row = divmod(place.lead[0], array.rows)
        values = self._held_piece(place.array, number)[row, *place.lead[1:]]
        return values.T if place.is_transposed else values

    def pieces(self, name: str) -> Iterator[tuple[slice, np.ndarray]]:
        """An array as the decoder has it, cut along its first axis: each part and its values.

        Raises:
            CheckpointError: There is no such array, or it cannot be read.
        """
        for number, part in enumerate(self._array(name).pieces):
            yield part, self._read(name, number)

    @functools.cached_property
    def _places(self) -> dict[str, _Place]:
        return {
            tensor: place
            for name, array in self._index.arrays.items()
            for tensor, place in self._tensors_in(name, array)
        }

    def _tensors_in(self, name: str, array: StoredArray) -> Iterator[tuple[str, _Place]]:
        """The Hugging Face names of the tensors in an array."""
        stem, _, leaf = name.rpartition(".")
        # An embedding or a head stands for itself.
        stem = stem or leaf
        end = "bias" if leaf == "bias" else "weight"
        place = _Place(name, (), leaf in _MAPS)
        if not stem.startswith(_LAYERS):
            prefix = "" if stem == "lm_head" else "model."
            yield f"{prefix}{stem}.{end}", place
            return
        experts = self.config.experts
        counts = [self.config.num_layers]
        counts += [experts.count] if experts is not None and leaf == "kernels" else []
        if list(array.shape[: len(counts)]) != counts:
            raise CheckpointError(
                f"{self.path}: array {name} has shape {list(array.shape)}; the configuration asks "
                f"for {counts} in front"
            )
        inside = stem.removeprefix(_LAYERS)
        for lead in np.ndindex(*counts):
            tensor = inside.replace(_EXPERTS, f"{_EXPERTS}{lead[-1]}.") if lead[1:] else inside
            yield f"model.layers.{lead[0]}.{tensor}.{end}", place._replace(lead=lead)

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return place

    def _array(self, name: str) -> StoredArray:
        array = self._index.arrays.get(name)
        if array is None:
            raise CheckpointError(f"{self.path}: array {name} is missing")
        return array

    def _held_piece(self, name: str, number: int) -> np.ndarray:
        path = self._piece(name, number)
        if self._last is None or self._last[0] != path:
            # The old one goes before there is a new one.
            self._last = None
            self._last = path, self._read(name, number)
        return self._last[1]

    def _read(self, name: str, number: int) -> np.ndarray:
        array = self._array(name)
        shape = array.piece_shape(array.pieces[number])
        values = orbax_arrays.restore(self._piece(name, number), shape=shape)
        if values.dtype != array.numpy_dtype:
            raise CheckpointError(
                f"{self._piece(name, number)} is {values.dtype}; its index says {array.dtype}"
            )
        return values

    def _piece(self, name: str, number: int) -> pathlib.Path:
        return self.path / WEIGHTS / piece_name(name, number)
