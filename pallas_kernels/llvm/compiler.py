"""How functions are compiled: to be built into those that use them, or once for all of them."""

import inspect
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types

from pallas_kernels.llvm.instructions import FLOAT, WORD, Builder, at, instruction

# A product and the sum behind it are one instruction; nothing else is reordered, so results do not
# depend on which loops LLVM finds worth a vector.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}

# numba's stubs know some of their options only.
_njit: Any = numba.njit
_cfunc: Any = numba.cfunc

_KINDS = {types.void: ir.VoidType(), types.intp: WORD, types.float32: FLOAT}

_KEPT: list[Any] = []
"""Functions that are known by their addresses: they must not go away."""


def compiled(function: Callable[..., Any]) -> Any:
    """The function, to be built into those that use it."""
    return _njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)


def c_function(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """A function of C's kind, compiled at once; its address is what other code needs to call it."""

    def wrap(function: Callable[..., Any]) -> Any:
        made = _cfunc(result(*arguments), nopython=True, **_OPTIONS)(function)
        _KEPT.append(made)
        return made

    return wrap


def outlined(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """The function compiled once, and called by its address: for large ones with many users."""

    def wrap(function: Callable[..., Any]) -> Any:
        address = c_function(result, *arguments)(function).address
        kind = ir.FunctionType(_KINDS[result], [_KINDS[argument] for argument in arguments])

        def call(builder: Builder, *values: Any) -> Any:
            return builder.call(at(builder, WORD(address), kind), values)

        names = list(inspect.signature(function).parameters)
        return instruction(result, *arguments, names=names)(call)

    return wrap
