"""A folder's tensors as a model asks for them, whether they are stored so or quantised."""

import functools

import ml_dtypes
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint.quantization import WeightFormat
from jaxpaged.model.checkpoint.stored_tensors import StoredTensors
from jaxpaged.model.checkpoint.tensors import Shape


class FolderWeights:
    """Tensors by their Hugging Face names.

    Args:
        stored: What the files hold.
        weight_format: Of quantised weights, or None where there are none.
        asked: Names of the tensors that the model is made of.
    """

    def __init__(
        self,
        stored: StoredTensors,
        weight_format: WeightFormat | None,
        asked: frozenset[str],
    ) -> None:
        self._stored = stored
        self._format = weight_format
        self._asked = asked

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """Name to shape of every tensor.

        Raises:
            CheckpointError: Parts of a quantised weight do not go together, or whole numbers belong
                to none.
        """
        shapes = {}
        for name, file in self._stored.files.items():
            base, _, leaf = name.rpartition(".")
            if self._is_part(base, leaf) or self._is_empty_bias(name, base, leaf):
                continue
            if file.entries[name].dtype == np.int32:
                raise CheckpointError(self._unused_words(name))
            shapes[name] = file.entries[name].shape
        for base in sorted(self._quantized):
            if f"{base}.weight" in shapes:
                raise CheckpointError(
                    f"{self._stored.where}: {base} has a weight beside a quantised one; only one "
                    "of them can count"
                )
            assert self._format is not None
            shapes[f"{base}.weight"] = self._format.shape(self._stored, base)
        return shapes

    def tensor(self, name: str) -> np.ndarray:
        """One tensor; quantised ones in float32, 8-bit floats in bfloat16, which holds them.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be read.
        """
        base, _, leaf = name.rpartition(".")
        if self._format is not None and leaf == "weight" and base in self._quantized:
            # Damaged scales are infinite or not a number; so is the weight then, and it shows.
            with np.errstate(all="ignore"):
                return self._format.weight(self._stored, base)
        tensor = self._stored.read(name)
        return tensor.astype(ml_dtypes.bfloat16) if tensor.dtype.itemsize == 1 else tensor

    @functools.cached_property
    def _quantized(self) -> frozenset[str]:
        """The maps whose weights are quantised."""
        if self._format is None:
            return frozenset()
        marked = (name.rpartition(".") for name in self._stored.files)
        return frozenset(
            base
            for base, _, leaf in marked
            if leaf == self._format.marker and self._is_quantized(f"{base}.{leaf}")
        )

    def _is_quantized(self, name: str) -> bool:
        # A format whose numbers lie under the plain name has 8-bit floats there, or it is plain.
        return not name.endswith(".weight") or self._stored.entry(name).dtype.itemsize == 1

    def _is_part(self, base: str, leaf: str) -> bool:
        return self._format is not None and base in self._quantized and leaf in self._format.parts

    def _is_empty_bias(self, name: str, base: str, leaf: str) -> bool:
        """Whether it is a bias of zeros, which AutoGPTQ adds to maps that have none."""
        is_spare = leaf == "bias" and base in self._quantized and name not in self._asked
        return is_spare and not self._stored.read(name).any()

    def _unused_words(self, name: str) -> str:
        message = f"{self._stored.where}: tensor {name} holds whole numbers"
        if self._format is None:
            return (
                f"{message}, and config.json has no quantization_config that says how weights are "
                "packed into them; download the model's own config.json, or a version that is not "
                "quantised"
            )
        return f"{message} that belong to no quantised weight; download the file again"
