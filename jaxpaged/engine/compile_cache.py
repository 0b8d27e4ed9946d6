"""Compiled programs kept between runs, in the user's cache folder."""

import os
import pathlib

import jax
import platformdirs


def folder() -> pathlib.Path:
    """Where programs are kept unless JAX was told otherwise."""
    return platformdirs.user_cache_path("jaxpaged") / "compiled"


def enable() -> None:
    """Keeps compiled programs in `folder`; a folder that JAX was given already stays.

    Where the folder cannot be written, nothing is kept.

    JAX's own thresholds leave out what compiles within a second, as most of our programs do on a
    small model; those are kept too.
    """
    known = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if known is not None:
        return
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder(), os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
