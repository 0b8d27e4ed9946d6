"""Where an output lies that a command was given, and how it is reached."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpaged.storage.options import StorageOptions
    from jaxpaged.storage.store import Store


def locate(out: str, settings: tuple[str, ...]) -> "tuple[str, StorageOptions | None]":
    """An output's absolute path or URL, and how it is reached if that is said."""
    import pathlib

    from jaxpaged.job.spec import parse_storage
    from jaxpaged.storage import access

    place = out if access.split(out) else str(pathlib.Path(out).resolve())
    return place, parse_storage(settings) if settings else None


def store(out: str, settings: tuple[str, ...]) -> "Store":
    """The opened store of an output."""
    from jaxpaged.job.output.output_view import PRIVATE
    from jaxpaged.storage import access
    from jaxpaged.storage.options import StorageOptions

    place, storage = locate(out, settings)
    return access.open_store(place, storage or StorageOptions(), private=PRIVATE)
