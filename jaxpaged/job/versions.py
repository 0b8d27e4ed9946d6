"""The versions of what a job's result depends on, looked up without importing any of it."""

import importlib.metadata
import platform

from jaxpaged._version import VERSION

_DISTRIBUTIONS = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "pyarrow",
    "tokenizers",
    "orbax-checkpoint",
    "gguf",
    "pydantic",
)


def installed() -> dict[str, str]:
    """Version by name; "not installed" for a package that is missing."""
    return {
        "jaxpaged": VERSION,
        "python": platform.python_version(),
        **{name: version_of(name) or "not installed" for name in _DISTRIBUTIONS},
    }


def version_of(name: str) -> str | None:
    """The version of an installed distribution; None for one that is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
