"""XLA's foreign function interface, answered by functions that numba compiles.

The layouts are those of `xla/ffi/api/c_api.h` in 64-bit words; they are the same in all versions of
JAX that the project takes (interface 0.3 to 0.5), and such structs only grow at their ends.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numba
from jaxtyping import Array
from numba import types

from pallas_kernels.llvm.compiler import c_function, compiled, outlined
from pallas_kernels.llvm.instructions import (
    add_to_word,
    allocate,
    call,
    floats,
    free,
    ints,
    pause,
    set_word,
    word,
)

_WORD = 8

# XLA_FFI_CallFrame: its extension, interface and context, the number of operands, and the arrays of
# operands and results.
_EXTENSION, _API, _CONTEXT, _NUM_OPERANDS, _OPERANDS, _RESULTS = (
    _WORD * at for at in (1, 2, 3, 7, 9, 14)
)
# XLA_FFI_Buffer.
_DATA, _DIMS = _WORD * 3, _WORD * 5
# XLA_FFI_Api: its version and two of its functions.
_VERSION, _SCHEDULE, _NUM_THREADS = _WORD * 4, _WORD * 17, _WORD * 18
# XLA_FFI_Metadata_Extension, and XLA_FFI_Metadata behind it.
_METADATA, _METADATA_VERSION = _WORD * 3, _WORD * 3
_ASKS_METADATA = 1

# What the threads of one call share: the next item, how many are done, how many there are, the
# threads that work, those that still hold this, the frame; then the arguments of a call to the
# interface.
_NEXT, _DONE, _ITEMS, _WORKERS, _HOLDERS, _FRAME, _CALL = (_WORD * at for at in range(7))
_SHARED_BYTES = _WORD * 12

# Every call has two results: what it is for, and memory for each thread to work in.
_RESULT, _SCRATCH = range(2)


def ffi_call(
    name: str,
    result: jax.ShapeDtypeStruct,
    *operands: Array,
    scratch: int = 0,
    aliases: dict[int, int] | None = None,
) -> Array:
    """Calls a target that was registered, from a JAX program.

    Args:
        name: The target.
        result: What it gives.
        operands: What it is given.
        scratch: Float32 numbers that a thread needs for itself. They are XLA's: memory that is
            asked of the system and given back in each call costs more than some of the work.
        aliases: Operands that are written onto, and result 0.
    """
    memory = jax.ShapeDtypeStruct((os.cpu_count() or 1, scratch), jnp.float32)
    call = jax.ffi.ffi_call(name, (result, memory), input_output_aliases=aliases)
    return call(*operands)[0]


@compiled
@no_type_check
def num_operands(frame):
    """How many operands the call has."""
    return word(frame + _NUM_OPERANDS)


@compiled
@no_type_check
def operand(frame, index):
    """Where the data of an operand lie."""
    return word(word(word(frame + _OPERANDS) + _WORD * index) + _DATA)


@compiled
@no_type_check
def result(frame):
    """Where the data of the result go."""
    return word(word(word(frame + _RESULTS) + _WORD * _RESULT) + _DATA)


@compiled
@no_type_check
def dim(frame, index, axis):
    """Length of an axis of an operand."""
    return word(word(word(word(frame + _OPERANDS) + _WORD * index) + _DIMS) + _WORD * axis)


@compiled
@no_type_check
def result_dim(frame, axis):
    """Length of an axis of the result."""
    return word(word(word(word(frame + _RESULTS) + _WORD * _RESULT) + _DIMS) + _WORD * axis)


@compiled
@no_type_check
def _scratch_dim(frame, axis):
    """Threads that there is memory for, or float32 numbers of each."""
    return word(word(word(word(frame + _RESULTS) + _WORD * _SCRATCH) + _DIMS) + _WORD * axis)


@compiled
@no_type_check
def _scratch(frame, worker):
    """A thread's memory."""
    data = word(word(word(frame + _RESULTS) + _WORD * _SCRATCH) + _DATA)
    return data + 4 * worker * _scratch_dim(frame, 1)


@compiled
@no_type_check
def integer(frame, index):
    """An operand that is one int32."""
    return numba.intp(ints(operand(frame, index))[0])


@compiled
@no_type_check
def number(frame, index):
    """An operand that is one float32."""
    return floats(operand(frame, index))[0]


def register(name: str, *, count: Callable[..., int], work: Callable[..., None]) -> None:
    """Compiles functions and makes them callable from JAX programs, as target `name` on CPUs.

    Args:
        name: For `jax.ffi.ffi_call`.
        count: Given the call's frame, how many items of work there are.
        work: Does an item, given the frame, the item's index, and the address of the thread's
            memory. XLA's threads share the items.
    """

    count = compiled(count)
    work = outlined(types.void, types.intp, types.intp, types.intp)(work)

    @c_function(types.intp, types.intp)
    @no_type_check
    def take_items(shared):
        frame, items = word(shared + _FRAME), word(shared + _ITEMS)
        item = add_to_word(shared + _NEXT, 1)
        if item < items:
            scratch = _scratch(frame, add_to_word(shared + _WORKERS, 1))
            while item < items:
                work(frame, item, scratch)
                add_to_word(shared + _DONE, 1)
                item = add_to_word(shared + _NEXT, 1)
        # A thread may come when all is done and the frame is gone, so what is shared stays for it.
        if add_to_word(shared + _HOLDERS, -1) == 1:
            free(shared)
        return 0

    helper = take_items.address

    @c_function(types.intp, types.intp)
    @no_type_check
    def handle(frame):
        api = word(frame + _API)
        extension = word(frame + _EXTENSION)
        if extension and ints(extension + _WORD)[0] == _ASKS_METADATA:
            # XLA asks which version of the interface this is made for: its own.
            metadata = word(extension + _METADATA)
            set_word(metadata + _METADATA_VERSION, word(api + _VERSION))
            return 0
        items = count(frame)
        if items == 0:
            return 0
        shared = allocate(_SHARED_BYTES)
        arguments = shared + _CALL
        set_word(arguments, 4 * _WORD)
        set_word(arguments + _WORD, 0)
        set_word(arguments + 2 * _WORD, word(frame + _CONTEXT))
        set_word(arguments + 3 * _WORD, shared + _DONE)
        call(word(api + _NUM_THREADS), arguments)
        helpers = min(word(shared + _DONE), items, _scratch_dim(frame, 0)) - 1
        set_word(shared + _NEXT, 0)
        set_word(shared + _DONE, 0)
        set_word(shared + _ITEMS, items)
        set_word(shared + _WORKERS, 0)
        set_word(shared + _HOLDERS, helpers + 2)
        set_word(shared + _FRAME, frame)
        set_word(arguments, 5 * _WORD)
        set_word(arguments + 3 * _WORD, helper)
        set_word(arguments + 4 * _WORD, shared)
        for _ in range(helpers):
            call(word(api + _SCHEDULE), arguments)
        call(helper, shared)
        # Threads that took an item are about to finish it. Those that never came are not waited
        # for: they may themselves be waiting behind this one.
        while add_to_word(shared + _DONE, 0) < items:
            pause()
        if add_to_word(shared + _HOLDERS, -1) == 1:
            free(shared)
        return 0

    jax.ffi.register_ffi_target(name, _capsule(handle), platform="cpu", api_version=1)


def _capsule(handle: Any) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return new(handle.address, None, None)
