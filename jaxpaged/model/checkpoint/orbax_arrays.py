"""One array as an Orbax checkpoint of its own, written and read.

The one module that knows Orbax, which is imported, and with it JAX, when an array is read or
written. Orbax holds what it reads or writes several times, which many small checkpoints keep small;
its `CompositeCheckpointHandler` sees their folder as a whole.
"""

import contextlib
import logging
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError, ConfigError, StorageError

_KEY = "array"

# A read holds a few chunks beside the array; larger ones stay with the allocator for good.
_CHUNK_BYTES = 2 * 2**20

# What Orbax and TensorStore raise about files that are not as they should be.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)


def save(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes an array.

    Args:
        path: Of the checkpoint, a folder that must not exist.
        array: Its values.

    Raises:
        StorageError: It cannot be written.
        ConfigError: Orbax is not installed.
    """
    ocp = _import_orbax()
    how = {_KEY: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)}
    try:
        with _quiet(), ocp.Checkpointer(_handler(ocp)) as checkpointer:
            checkpointer.save(
                path.resolve(), args=ocp.args.PyTreeSave({_KEY: array}, save_args=how)
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise StorageError(f"{path}: cannot be written: {_reason(error)}") from None


def restore(path: pathlib.Path, *, shape: tuple[int, ...]) -> np.ndarray:
    """The array that was written, in the dtype it was written in.

    Args:
        path: Of the checkpoint.
        shape: What it must have.

    Raises:
        CheckpointError: It cannot be read, or has another shape.
        ConfigError: Orbax is not installed.
    """
    ocp = _import_orbax()
    how = {_KEY: ocp.RestoreArgs(restore_type=np.ndarray)}
    try:
        with _quiet(), ocp.Checkpointer(_handler(ocp)) as checkpointer:
            # Before any value: memory is taken for the shape that is stored.
            stored = checkpointer.metadata(path.resolve()).item_metadata[_KEY]
            if tuple(stored.shape) != shape:
                raise CheckpointError(
                    f"{path} has shape {list(stored.shape)}; its index says {list(shape)}"
                )
            wanted = ocp.args.PyTreeRestore(restore_args=how)
            return checkpointer.restore(path.resolve(), args=wanted)[_KEY]
    except _DAMAGED as error:
        raise CheckpointError(
            f"{path}: cannot be read: {_reason(error)}; copy the whole folder again, or convert "
            "the model again"
        ) from None


def _handler(ocp: ModuleType) -> Any:  # noqa: ANN401
    # Weights hardly become smaller by being compressed, and take longer to read.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _import_orbax() -> ModuleType:
    try:
        import orbax.checkpoint
    except ImportError:
        raise ConfigError(
            "a checkpoint in Orbax's format needs the orbax-checkpoint package; install it with: "
            "pip install orbax-checkpoint"
        ) from None
    return orbax.checkpoint


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's remarks on every array."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
