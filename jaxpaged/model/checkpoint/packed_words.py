"""Small whole numbers without sign, packed into words of 32 bits from the lowest bits up.

And what checkpoints that pack weights so have in common: words, zero points and scales, by group.
"""

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.model.checkpoint.safetensors_file import TensorEntry
from jaxpaged.model.checkpoint.stored_tensors import StoredTensors
from jaxpaged.model.checkpoint.tensors import Shape

SCALE_DTYPES = ("float16", "bfloat16", "float32")


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of every word in a new last axis; of 4 or 8 bits."""
    octets = words.view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*words.shape, 8)


def entry(stored: StoredTensors, name: str, dtypes: tuple[str, ...], rank: int) -> TensorEntry:
    """What is said of a part of a quantised weight.

    Raises:
        CheckpointError: It is missing, or of another dtype or rank.
    """
    found = stored.entry(name)
    if found.dtype.name not in dtypes or len(found.shape) != rank or 0 in found.shape:
        raise CheckpointError(
            f"{stored.where}: tensor {name} is {found.dtype.name} of shape {list(found.shape)}; "
            f"expected {' or '.join(dtypes)} with {rank} axes, as quantised weights have it"
        )
    return found


def check_shape(stored: StoredTensors, name: str, expected: Shape) -> None:
    """Makes sure that a part has the shape that goes with the packed weight.

    Raises:
        CheckpointError: It has another one.
    """
    shape = stored.entry(name).shape
    if shape != expected:
        raise CheckpointError(
            f"{stored.where}: tensor {name} has shape {list(shape)}; {list(expected)} goes with "
            "the packed weight and the bits and group_size of quantization_config"
        )


def num_groups(width: int, group_size: int) -> int:
    """Into how many groups the inputs of a weight fall; a size of -1 is all of them."""
    return 1 if group_size == -1 else -(-width // group_size)
