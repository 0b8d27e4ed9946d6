"""Instructions of LLVM that functions compiled by numba have no words for.

Memory by its address (what XLA hands a kernel are addresses), counters that threads share, calls
of functions by their address, and the bits of a float. Each is an instruction or two.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

Builder = ir.IRBuilder
Value = Any
"""A value of LLVM's; its package says of many that they may be None."""

WORD = ir.IntType(64)
"""An address; XLA is made for 64-bit machines only."""
FLOAT = ir.FloatType()


def instruction(
    result: types.Type, *arguments: types.Type, names: Sequence[str] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Makes what a function emits, given a builder and values, callable from compiled functions.

    Args:
        result: What it returns.
        arguments: The kinds of its arguments.
        names: Their names; None takes those of the function.
    """

    def wrap(emit: Callable[..., Any]) -> Any:
        def emit_here(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        def declare(typing_context: Any, *given: Any) -> tuple[Any, Any]:
            return result(*arguments), emit_here

        # numba asks for the names of the arguments.
        own = names or list(inspect.signature(emit).parameters)[1:]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in ("typing_context", *own)]
        signature = inspect.Signature(parameters)
        declare.__signature__ = signature
        declare.__name__ = emit.__name__
        declare.__doc__ = emit.__doc__
        return intrinsic(declare)

    return wrap


def at(builder: Builder, address: Value, to: ir.Type) -> Value:
    """The address as a pointer."""
    return builder.inttoptr(address, to.as_pointer())


@instruction(types.intp, types.intp)
def word(builder: Builder, address: Value) -> Value:
    """The 64-bit word at an address."""
    return builder.load(at(builder, address, WORD))


@instruction(types.void, types.intp, types.intp)
def set_word(builder: Builder, address: Value, value: Value) -> None:
    """Writes a 64-bit word."""
    builder.store(value, at(builder, address, WORD))


@instruction(types.intp, types.intp, types.intp)
def add_to_word(builder: Builder, address: Value, value: Value) -> Value:
    """Adds to a word that other threads add to as well; what it was before."""
    return builder.atomic_rmw("add", at(builder, address, WORD), value, "seq_cst")


@instruction(types.intp, types.intp, types.intp)
def call(builder: Builder, function: Value, argument: Value) -> Value:
    """Calls a C function that takes a word and returns one."""
    return builder.call(at(builder, function, ir.FunctionType(WORD, [WORD])), [argument])


@instruction(types.intp, types.intp)
def allocate(builder: Builder, num_bytes: Value) -> Value:
    """As C's `malloc`."""
    return builder.call(_c_function(builder, "malloc", WORD), [num_bytes])


@instruction(types.void, types.intp)
def free(builder: Builder, address: Value) -> None:
    """As C's `free`."""
    builder.call(_c_function(builder, "free", ir.VoidType()), [address])


@instruction(types.void)
def pause(builder: Builder) -> None:
    """A moment's wait for another thread."""
    builder.fence("seq_cst")


@instruction(types.void, types.intp)
def prefetch(builder: Builder, address: Value) -> None:
    """Asks for the cache line at an address, which will be read once."""
    number = ir.IntType(32)
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), number(0), number(2), number(1)])


@instruction(types.CPointer(types.float32), types.intp)
def floats(builder: Builder, address: Value) -> Value:
    """The address as one of float32 numbers."""
    return at(builder, address, FLOAT)


@instruction(types.CPointer(types.int32), types.intp)
def ints(builder: Builder, address: Value) -> Value:
    """The address as one of int32 numbers."""
    return at(builder, address, ir.IntType(32))


@instruction(types.float32, types.int32)
def float_of_bits(builder: Builder, bits: Value) -> Value:
    """The float32 number of these bits."""
    return builder.bitcast(bits, FLOAT)


def _c_function(builder: Builder, name: str, result: ir.Type) -> ir.Function:
    kind = ir.FunctionType(result, [WORD])
    return cgutils.get_or_insert_function(builder.module, kind, name)
