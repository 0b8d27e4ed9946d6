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
    "safetensors",
    "gguf",
    "pydantic",
)


def installed() -> dict[str, str]:
    """Version by name; "not installed" for a package that is missing."""
    return {
        "jaxpaged": VERSION,
        "python": platform.python_version(),
        **{name: _version(name) for name in _DISTRIBUTIONS},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
