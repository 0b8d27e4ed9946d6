"""The way to a place: a local folder by its path, an object store by its URL.

Knows URLs and the settings of the libraries that reach them, nothing of what lies there. Those
libraries, fsspec among them, are loaded when the first URL is opened.
"""

import pathlib
import re
from typing import TYPE_CHECKING, Any

from jaxpaged.errors import ConfigError
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.local_store import Durability, LocalStore
from jaxpaged.storage.options import StorageOptions, look_up
from jaxpaged.storage.store import Store

if TYPE_CHECKING:
    import fsspec

SCHEMES = ("s3", "gs")
"""Of the URLs that can be opened."""

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# s3fs and the client below it both try again, each this often in all: 2 times 2 by 30 seconds is
# what a server may be silent before whoever asked hears of it.
_S3_TRIES = 2
_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 30}


def split(place: str) -> str | None:
    """The scheme of a URL; None for a local path."""
    return place.split("://", 1)[0] if "://" in place else None


def check_url(url: str) -> str:
    """The URL without "/" at its end.

    Raises:
        ValueError: It is none that can be opened. The message never repeats it, for there may be
            credentials in it.
    """
    scheme, _, path = url.partition("://")
    if scheme not in SCHEMES:
        known = " or ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"expected a local path, or a URL that begins with {known}")
    if "@" in path.split("/")[0] or ":" in path.split("/")[0]:
        raise ValueError(
            "expected a URL without user and password; credentials belong to the section storage, "
            "as ${ENV:NAME}"
        )
    if "?" in path or "#" in path:
        raise ValueError(f"expected a URL without ? and #, such as {scheme}://bucket/folder")
    bucket, *folders = path.rstrip("/").split("/")
    is_plain = all(part not in ("", ".", "..") and part.isprintable() for part in folders)
    if not _BUCKET.fullmatch(bucket) or not is_plain:
        raise ValueError(f"expected a URL such as {scheme}://bucket/folder")
    return url.rstrip("/")


def filesystem(url: str, options: StorageOptions) -> "tuple[fsspec.AbstractFileSystem, str]":
    """The file system that a URL leads to, and the URL's path in it.

    It remembers no listings, and is not remembered itself, so that neither old states nor
    credentials outlive it.

    Raises:
        ConfigError: The URL or a setting is wrong, a variable is not set, or a package is missing.
    """
    try:
        url = check_url(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    scheme, _, path = url.partition("://")
    arguments = _s3_arguments(options) if scheme == "s3" else _gs_arguments(options)
    remote: Any = _make(scheme, arguments)
    if scheme == "s3":
        remote.retries = _S3_TRIES
    return remote, path


def open_store(
    place: str,
    options: StorageOptions,
    *,
    private: str,
    durability: Durability = "machine",
    disk: Disk | None = None,
) -> Store:
    """The store at a place; nothing is made or written yet.

    Args:
        place: A local folder's path, or the URL of a prefix.
        options: How object stores are reached.
        private: The name of the folder in it for what is not meant for readers.
        durability: What a finished step survives, in a local folder; an object store keeps all.
        disk: How local files are touched.

    Raises:
        ConfigError: As `filesystem`.
    """
    if split(place) is None:
        return LocalStore(pathlib.Path(place), private=private, durability=durability, disk=disk)
    remote, path = filesystem(place, options)
    # Loads fsspec, which a job on local files does without.
    from jaxpaged.storage.object_store import ObjectStore

    return ObjectStore(remote, path, url=place.rstrip("/"), private=private)


def _make(scheme: str, arguments: dict[str, Any]) -> "fsspec.AbstractFileSystem":
    package, extra = _PACKAGES[scheme]
    try:
        import fsspec

        # Loaded first, so that an error below is not one of a missing package.
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise ConfigError(
            f"{scheme}:// needs the package {package}; install it: pip install 'jaxpaged[{extra}]'"
        ) from None
    try:
        return fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True, **arguments
        )
    except Exception as error:
        # Its text may hold a token.
        kind = type(error).__name__
    raise ConfigError(
        f"storage.{scheme}: {package} cannot use these credentials ({kind}); correct them"
    )


def _s3_arguments(options: StorageOptions) -> dict[str, Any]:
    s3 = options.s3
    given = {
        "endpoint_url": s3.endpoint_url,
        "profile": s3.profile,
        "key": look_up(s3.key, "storage.s3.key"),
        "secret": look_up(s3.secret, "storage.s3.secret"),
        "token": look_up(s3.token, "storage.s3.token"),
        "client_kwargs": {"region_name": s3.region} if s3.region else None,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    config = {"retries": {"mode": "standard", "total_max_attempts": _S3_TRIES}, **_S3_TIMEOUTS}
    return {"anon": s3.anonymous, "config_kwargs": config, **chosen}


def _gs_arguments(options: StorageOptions) -> dict[str, Any]:
    gs = options.gs
    given = {
        "project": gs.project,
        "endpoint_url": gs.endpoint_url,
        "token": "anon" if gs.anonymous else look_up(gs.token, "storage.gs.token"),
    }
    return {name: value for name, value in given.items() if value is not None}
