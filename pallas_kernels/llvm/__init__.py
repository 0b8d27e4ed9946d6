"""Kernels for the CPU they run on, compiled by LLVM through numba and called from XLA's programs.

From the outside in: `attention` and `linear` are the functions, `softmax` and `tiles` what they are
made of, `ffi` how XLA calls them, `instructions` what numba has no words for.

Importing this package imports none of it: numba is an extra, and takes a moment.
"""

import importlib.util

HEAD_MULTIPLE = 16
"""Heads are so many numbers wide, or a multiple: whole vectors on every machine."""


def unserved(*, dtype: str, kv_dtype: str, head_dim: int | None) -> str | None:
    """Why these kernels do not serve a model, if they do not; without a width, a usual one."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install 'jaxpaged[cpu]'"
    if (dtype, kv_dtype) != ("float32", "float32"):
        return f"the kernels for CPUs are not made for {dtype} weights with a {kv_dtype} pool"
    if head_dim is not None and head_dim % HEAD_MULTIPLE:
        return f"heads are {head_dim} wide, the kernels for CPUs need a multiple of {HEAD_MULTIPLE}"
    return None
