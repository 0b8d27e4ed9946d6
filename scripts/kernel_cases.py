"""What the compile gate compiles: every configuration of the GPU kernels that is vouched for.

And kernels that are bad on purpose, to try the gate on. This file knows the kernels' arguments and
nothing of what the compilers print.
"""

import dataclasses
import functools
import signal
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from gpu_compiler import Program, ShapeOf
from gpu_targets import H100, Target
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from kernel_configurations import (
    CONFIGURATIONS,
    HOPPER_CONFIGURATIONS,
    LINEAR_CONFIGURATIONS,
    Configuration,
    LinearConfiguration,
)

from pallas_kernels import (
    KVRows,
    PrefillTiles,
    kv_format,
    triton,
    triton_linear,
    weight_format,
)

TRITON_KERNELS = ("paged_decode", "paged_combine", "paged_prefill")
LINEAR_KERNELS = ("packed_linear",)

HAS_MOSAIC = jax.__version_info__ >= (0, 12)
"""This JAX has what `pallas_kernels.mosaic` needs."""
MOSAIC_KERNELS = ("paged_decode_hopper", "paged_combine")

# Sizes that no kernel's code depends on.
LANES = 64
PREFILL_TOKENS = 512
TABLE_WIDTH = 256
LINEAR_WIDTHS = (4096, 4096)
NUM_BLOCKS = 1000
LAYERS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Kernels that are compiled together.

    Attributes:
        name: Tells it from all others.
        kv_dtype: How keys and values, or weights, are stored; with `head_dim` it finds the budget.
        head_dim: Numbers of a head; of a linear map the rows that it is given.
        kernels: Names of those that must come out.
        programs: Makes what is to be compiled.
        cards: Names of those that it is for; None if it is for all.
    """

    name: str
    kv_dtype: str
    head_dim: int
    kernels: tuple[str, ...]
    programs: Callable[[ShapeOf], list[Program]]
    cards: tuple[str, ...] | None = None

    def is_for(self, target: Target) -> bool:
        """The card is one of those that must be served."""
        return self.cards is None or target.name in self.cards


def _program(
    function: Callable[..., Any],
    configuration: Configuration,
    shape: ShapeOf,
    num_tokens: int,
    named: dict[str, Any],
) -> Program:
    """Attention by a function, for so many queries; what only one kind of it takes is given."""
    head_dim = configuration.head_dim
    # A GPU keeps 16-bit floats as what they are.
    stored, width, has_scales = kv_format.storage(configuration.kv_dtype, head_dim, as_bits=False)
    rows = (LAYERS, NUM_BLOCKS, configuration.block_size, configuration.num_kv_heads)
    pool = KVRows(shape((*rows, width), stored), shape(rows, jnp.float32) if has_scales else None)
    dtype = jnp.dtype(configuration.query_dtype)
    q = shape((num_tokens, configuration.num_heads, head_dim), dtype)
    named = named | {
        "layer": shape((), jnp.int32),
        "block_tables": shape((LANES, TABLE_WIDTH), jnp.int32),
        "window": shape((), jnp.int32),
    }
    return Program(functools.partial(function, scale=head_dim**-0.5), (q, pool, pool), named)


def decode_program(
    function: Callable[..., Any], configuration: Configuration, shape: ShapeOf
) -> Program:
    """Decode attention by one of the backends."""
    lanes, scalar = shape((LANES,), jnp.int32), shape((), jnp.int32)
    named = {"token_lanes": lanes, "context_lens": lanes, "num_queries": scalar}
    return _program(function, configuration, shape, LANES, named)


def prefill_program(
    function: Callable[..., Any], configuration: Configuration, shape: ShapeOf
) -> Program:
    """Prefill attention by one of the backends."""
    tiles, scalar = shape((LANES,), jnp.int32), shape((), jnp.int32)
    results = (PREFILL_TOKENS, configuration.num_heads, configuration.head_dim)
    named = {
        "tiles": PrefillTiles(tiles, tiles, tiles, tiles, scalar),
        "onto": shape(results, jnp.dtype(configuration.query_dtype)),
    }
    return _program(function, configuration, shape, PREFILL_TOKENS, named)


def triton_case(configuration: Configuration) -> Case:
    """Decode and prefill attention by the Triton backend."""
    return Case(
        name=configuration.name,
        kv_dtype=configuration.kv_dtype,
        head_dim=configuration.head_dim,
        kernels=TRITON_KERNELS,
        programs=lambda shape: [
            decode_program(triton.decode_attention, configuration, shape),
            prefill_program(triton.prefill_attention, configuration, shape),
        ],
    )


def linear_case(configuration: LinearConfiguration) -> Case:
    """A linear map by packed weights."""

    def programs(shape: ShapeOf) -> list[Program]:
        in_width, out_width = LINEAR_WIDTHS
        x = shape((configuration.num_rows, in_width), jnp.dtype(configuration.dtype))
        zeros = functools.partial(weight_format.zeros, (), in_width, out_width)
        packed = jax.eval_shape(lambda: zeros(configuration.weight_dtype))
        packed = jax.tree.map(lambda part: shape(part.shape, part.dtype), packed)
        return [Program(triton_linear.packed_linear, (x, packed))]

    return Case(
        name=configuration.name,
        kv_dtype=configuration.weight_dtype,
        head_dim=configuration.num_rows,
        kernels=LINEAR_KERNELS,
        programs=programs,
    )


def mosaic_case(configuration: Configuration) -> Case:
    """Decode attention by Mosaic GPU; it is for Hopper alone."""

    def programs(shape: ShapeOf) -> list[Program]:
        # It cannot be imported with a JAX that has no such cases.
        from pallas_kernels import mosaic

        return [decode_program(mosaic.decode_attention, configuration, shape)]

    return Case(
        name=f"mosaic/{configuration.name}",
        kv_dtype=configuration.kv_dtype,
        head_dim=configuration.head_dim,
        kernels=MOSAIC_KERNELS,
        programs=programs,
        cards=(H100.name,),
    )


def by_name(cases: Iterable[Case]) -> dict[str, Case]:
    """The cases, each under its name."""
    return {case.name: case for case in cases}


TRITON_CASES = by_name(map(triton_case, CONFIGURATIONS))
MOSAIC_CASES = by_name(map(mosaic_case, HOPPER_CONFIGURATIONS))
LINEAR_CASES = by_name(map(linear_case, LINEAR_CONFIGURATIONS))
CASES = TRITON_CASES | LINEAR_CASES | (MOSAIC_CASES if HAS_MOSAIC else {})
"""Every configuration of the kernels that is vouched for, as far as this JAX has it."""


def faulty_case(
    name: str, body: Callable[..., None], *, size: tuple[int, int] = (16, 16), kernel: str = ""
) -> Case:
    """A kernel that a gate must not let through, on a matrix of that size.

    Args:
        name: Of the fault; the case is `fault/NAME`.
        body: The kernel.
        size: Rows and columns.
        kernel: Name of the kernel that must come out, if it is not the fault's.
    """

    def programs(shape: ShapeOf) -> list[Program]:
        call = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(size, jnp.float32),
            name=name,
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        )
        return [Program(call, (shape(size, jnp.float32),))]

    return Case(
        name=f"fault/{name}",
        kv_dtype="float32",
        head_dim=size[1],
        kernels=(kernel or name,),
        programs=programs,
    )


def _copy(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    out_ref[...] = x_ref[...] * 2


def _keep(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    x = x_ref[...]
    # All of x is needed again when its sums are known.
    out_ref[...] = x / (jnp.sum(x, axis=0)[None, :] + jnp.sum(x, axis=1)[:, None])


def _multiply(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    out_ref[...] = jax.lax.dot(x_ref[...], x_ref[...])


def _die(x_ref: Any, out_ref: Any) -> None:  # noqa: ANN401
    signal.raise_signal(signal.SIGKILL)


FAULTS = by_name(
    [
        faulty_case("spill", _keep, size=(128, 128)),
        faulty_case("shared_memory", _multiply, size=(256, 256)),
        faulty_case("width", _copy, size=(16, 96)),
        faulty_case("budget", _copy),
        faulty_case("missing", _copy, kernel="another"),
    ]
)
"""What the gate is tried on."""
DEADLY_FAULTS = by_name([faulty_case("abort", _die)])
"""The same; these end the process in which they are compiled."""
if HAS_MOSAIC:
    # For a card that lacks Hopper's instructions.
    DEADLY_FAULTS["fault/card"] = dataclasses.replace(
        mosaic_case(Configuration(head_dim=64)), name="fault/card", cards=None
    )
