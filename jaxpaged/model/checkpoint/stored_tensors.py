"""The tensors that a folder's weight files hold, as they lie there.

Knows neither what a model needs nor how weights are quantised.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint.safetensors_file import SafetensorsFile, TensorEntry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensors:
    """Name to tensor, over all files.

    Attributes:
        files: The file of every tensor.
        where: Names the folder in errors.
    """

    files: Mapping[str, SafetensorsFile]
    where: str

    def entry(self, name: str) -> TensorEntry:
        """What is said of the tensor.

        Raises:
            CheckpointError: There is no such tensor.
        """
        return self._file(name).entries[name]

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be read.
        """
        return self._file(name).tensor(name)

    def _file(self, name: str) -> SafetensorsFile:
        file = self.files.get(name)
        if file is None:
            raise CheckpointError(f"{self.where}: tensor {name} is missing")
        return file
