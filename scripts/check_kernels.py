"""Every configuration of the attention kernels against float64, on the device that is there.

Contexts end at the edges of blocks and partitions, and a slot that no query may read holds NaN, the
first and the last block among them. Each configuration also gets keys and values in each other's
place, and must be far off then: a check that cannot fail checks nothing.

Two pools are large. An array of int8 has exactly 2**31 numbers, and its last offset is the largest
that int32 holds; one of bfloat16 has 5 GiB, and offsets exceed int32 in numbers, and 32 bits in
bytes. Of these only the scales, or the floats, are NaN where nothing may be read.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import float64_attention
import jax
import jax.numpy as jnp
import numpy as np
from attention_shapes import AttentionShape, pools, prefill_tiles, queries
from case_stream import Case, LeftOut
from float64_attention import Attended
from kernel_configurations import CONFIGURATIONS, HOPPER_CONFIGURATIONS, Configuration

import pallas_kernels
from jaxpaged.engine import memory
from pallas_kernels import NO_WINDOW, Implementation, KVRows, kv_format

LAYER = 1
UNUSED = 3
"""Queries behind the last one that is used, in decode and around the segments in prefill."""
SOFT_CAP = 2.0
"""Below many scores, which have unit variance."""
LEAST_CONTROL = 3.0
"""How many times the tolerance swapped keys and values must be off."""
HOPPER = "9.0"
LARGE_BYTES = {"int8": 2**31, "bfloat16": 5 * 2**30}
"""Of one array, by format: 2**31 numbers, and 2.5 * 2**30 of them."""


class Lengths(NamedTuple):
    """What is computed."""

    decode: tuple[int, ...]
    """Context length of each lane."""
    segments: tuple[tuple[int, int], ...]
    """Position and length of each prefill segment, a lane each."""
    windows: tuple[int, ...]


def lengths(block_size: int, *, is_tiny: bool) -> Lengths:
    """Around the edges of blocks, of tiles of 64 and of partitions of 256."""
    size = block_size
    if is_tiny:
        return Lengths((1, size, size + 1, 257), ((0, 1), (size - 1, 2), (0, 66)), (NO_WINDOW, 33))
    return Lengths(
        decode=(1, size - 1, size, size + 1, 63, 64, 65, 255, 256, 257, 511, 512, 700),
        segments=((0, 1), (0, 65), (size - 1, 2), (size, 63), (250, 20), (255, 1), (256, 129)),
        windows=(NO_WINDOW, 1, size + 1, 257),
    )


class Problem(NamedTuple):
    """A call of one of the functions, and what must come out."""

    arguments: dict[str, Any]
    keys: KVRows
    values: KVRows
    expected: list[tuple[slice, Attended]]
    """Of consecutive queries; all others must be zero."""


def shape_of(configuration: Configuration, context_lens: tuple[int, ...]) -> AttentionShape:
    """The configuration with lanes."""
    return AttentionShape(
        num_heads=configuration.num_heads,
        num_kv_heads=configuration.num_kv_heads,
        head_dim=configuration.head_dim,
        block_size=configuration.block_size,
        context_lens=context_lens,
        dtype=configuration.query_dtype,
    )


def filled_pools(
    configuration: Configuration, context_lens: tuple[int, ...], first_live: tuple[int, ...]
) -> tuple[KVRows, KVRows, jax.Array]:
    """Keys, values and block tables; NaN in every slot outside of what may be read."""
    return pools(
        shape_of(configuration, context_lens),
        configuration.kv_dtype,
        first_live=first_live,
        as_bits=jax.default_backend() == "cpu",
    )


@jax.jit
def decoded_layer(rows: KVRows) -> jax.Array:
    """Rows of the layer as float32, `[N, S, K, D]`."""
    scales = None if rows.scales is None else rows.scales[LAYER]
    return kv_format.decode(rows.values[LAYER], scales)


def of_lane(decoded: np.ndarray, tables: np.ndarray, lane: int, length: int) -> np.ndarray:
    """A lane's rows, `[C, K, D]`, of those of all blocks."""
    return decoded[tables[lane]].reshape(-1, *decoded.shape[2:])[:length]


def attend(
    problem: Problem,
    configuration: Configuration,
    lanes: list[tuple[slice, int]],
    window: int,
    cap: float | None,
) -> list[tuple[slice, Attended]]:
    """What consecutive queries of lanes must come to, in float64.

    Args:
        problem: Without what is expected.
        configuration: Its kernels.
        lanes: Places of the queries of each lane, and the position of the first.
        window: Keys that a query sees.
        cap: Of scores.
    """
    q, tables = problem.arguments["q"], np.asarray(problem.arguments["block_tables"])
    q = np.asarray(q).astype(np.float32)
    k, v = (np.asarray(decoded_layer(rows)) for rows in (problem.keys, problem.values))
    expected = []
    for lane, (place, position) in enumerate(lanes):
        positions = position + np.arange(place.stop - place.start)
        attended = float64_attention.attend(
            q[place],
            *(of_lane(rows, tables, lane, int(positions[-1]) + 1) for rows in (k, v)),
            positions=positions,
            window=window,
            scale=configuration.head_dim**-0.5,
            soft_cap=cap,
        )
        expected.append((place, attended))
    return expected


def int32(values: object) -> jax.Array:
    """As block tables and lengths are."""
    return jnp.asarray(values, jnp.int32)


def decode_problem(
    configuration: Configuration, context_lens: tuple[int, ...], window: int, cap: float | None
) -> Problem:
    """A query for each lane, and unused ones."""
    shape, used = shape_of(configuration, context_lens), len(context_lens)
    first_live = tuple(max(0, length - window) for length in context_lens)
    k, v, tables = filled_pools(configuration, context_lens, first_live)
    q = queries(shape, used + UNUSED)
    arguments = {
        "q": q,
        "layer": jnp.int32(LAYER),
        "block_tables": tables,
        "token_lanes": int32([*range(used), *[0] * UNUSED]),
        "context_lens": int32([*context_lens, *[1] * UNUSED]),
        "num_queries": jnp.int32(used),
        "window": jnp.int32(window),
    }
    lanes = [(slice(lane, lane + 1), length - 1) for lane, length in enumerate(context_lens)]
    problem = Problem(arguments, k, v, [])
    return problem._replace(expected=attend(problem, configuration, lanes, window, cap))


def prefill_problem(
    configuration: Configuration,
    segments: tuple[tuple[int, int], ...],
    window: int,
    cap: float | None,
) -> Problem:
    """Segments, one after the other, with unused tokens in front and behind."""
    context_lens = tuple(position + length for position, length in segments)
    shape = shape_of(configuration, context_lens)
    first_live = tuple(max(0, position - window + 1) for position, _ in segments)
    k, v, tables = filled_pools(configuration, context_lens, first_live)
    lens = [length for _, length in segments]
    starts = [UNUSED + sum(lens[:lane]) for lane in range(len(lens))]
    q = queries(shape, max(64, sum(lens) + 2 * UNUSED))
    arguments = {
        "q": q,
        "layer": jnp.int32(LAYER),
        "block_tables": tables,
        "tiles": prefill_tiles(
            list(range(len(lens))), starts, lens, [position for position, _ in segments]
        ),
        "window": jnp.int32(window),
    }
    lanes = [
        (slice(start, start + length), position)
        for start, (position, length) in zip(starts, segments, strict=True)
    ]
    problem = Problem(arguments, k, v, [])
    return problem._replace(expected=attend(problem, configuration, lanes, window, cap))


def worst(problem: Problem, result: jax.Array, query_dtype: str) -> float:
    """The largest error as a share of what is tolerated; infinite where zeros are expected."""
    got = np.asarray(result.astype(jnp.float32))
    is_unused = np.ones(got.shape[0], bool)
    shares = []
    for place, expected in problem.expected:
        is_unused[place] = False
        shares.append(float64_attention.error_share(got[place], expected, query_dtype))
    return math.inf if np.any(got[is_unused]) else max(shares)


Call = Callable[..., jax.Array]


def compiled(
    function: Call,
    problem: Problem,
    configuration: Configuration,
    implementation: Implementation,
    cap: float | None,
) -> Call:
    """A program for all problems of these sizes: `(keys, values, **arguments)`."""
    options: dict[str, Any] = {"scale": configuration.head_dim**-0.5}
    if cap is not None:
        options["soft_cap"] = cap
    bound = functools.partial(function, implementation=implementation, **options)

    def call(k: KVRows, v: KVRows, arguments: dict[str, Any]) -> jax.Array:
        rest = dict(arguments)
        return bound(rest.pop("q"), k, v, **rest)

    lowered = jax.jit(call).lower(problem.keys, problem.values, problem.arguments)
    program = lowered.compile()
    return lambda k, v, arguments: program(k, v, arguments)


class Prepared(NamedTuple):
    """A function of a case, compiled."""

    name: str
    call: Call
    problems: list[tuple[int, Problem]]
    """By window."""


def prepare(
    configuration: Configuration,
    implementation: Implementation,
    wanted: Lengths,
    cap: float | None = None,
) -> list[Prepared]:
    """The functions that the implementation has, with everything they are tried on.

    Raises:
        LeftOut: The public functions do not take a soft cap.
    """
    functions: list[tuple[str, Call, Callable[[int], Problem]]] = [
        (
            "decode",
            pallas_kernels.decode_attention,
            lambda window: decode_problem(configuration, wanted.decode, window, cap),
        )
    ]
    if not implementation.startswith("mosaic"):
        functions.append(
            (
                "prefill",
                pallas_kernels.prefill_attention,
                lambda window: prefill_problem(configuration, wanted.segments, window, cap),
            )
        )
    found = []
    for name, function, problem_of in functions:
        if cap is not None and "soft_cap" not in inspect.signature(function).parameters:
            raise LeftOut(f"{name}_attention takes no soft cap")
        problems = [(window, problem_of(window)) for window in wanted.windows]
        call = compiled(function, problems[0][1], configuration, implementation, cap)
        found.append(Prepared(name, call, problems))
    return found


def compare(configuration: Configuration, prepared: list[Prepared]) -> dict[str, object]:
    """The largest errors of each function as shares of what is tolerated, and what is wrong."""
    dtype = configuration.query_dtype
    found: dict[str, object] = {}
    faults = []
    for function in prepared:
        shares = []
        for window, problem in function.problems:
            result = function.call(problem.keys, problem.values, problem.arguments)
            shares.append(worst(problem, result, dtype))
            if not shares[-1] <= 1:
                seen = "all keys" if window == NO_WINDOW else f"window {window}"
                faults.append(f"{function.name}, {seen}: {shares[-1]:.3g} times the tolerance")
        _, problem = function.problems[0]
        swapped = function.call(problem.values, problem.keys, problem.arguments)
        control = worst(problem, swapped, dtype)
        if not control >= LEAST_CONTROL:
            faults.append(f"{function.name}, keys and values swapped: only {control:.3g} times")
        found[function.name] = round(max(shares), 4) if math.isfinite(max(shares)) else "inf"
        found[f"{function.name} swapped"] = round(control, 1) if math.isfinite(control) else "inf"
    return {**found, "passed": not faults, "faults": faults}


def large_problem(configuration: Configuration, num_bytes: int, context: int) -> Problem:
    """A lane whose blocks lie from the first to the last of a large pool; the values are the keys.

    Raises:
        LeftOut: There is not so much memory.
    """
    available = memory.available_bytes()
    if 1.5 * num_bytes > available:
        raise LeftOut(f"needs {1.5 * num_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} are free")
    small = decode_problem(configuration, (context,), NO_WINDOW, None)
    small = small._replace(values=small.keys)
    lanes = [(slice(0, 1), context - 1)]
    expected = attend(small, configuration, lanes, NO_WINDOW, None)
    row_bytes = math.prod(small.keys.values.shape[2:]) * small.keys.values.dtype.itemsize
    num_blocks = num_bytes // row_bytes
    count = small.keys.values.shape[1]
    # First and last stay poison here, too.
    ids = np.linspace(0, num_blocks - 1, count).astype(np.int32)

    def spread(rows: jax.Array, filler: float) -> jax.Array:
        full = jnp.full((1, num_blocks, *rows.shape[2:]), filler, rows.dtype)
        return jax.jit(lambda x, new: x.at[0, ids].set(new), donate_argnums=0)(full, rows[LAYER])

    values, scales = small.keys
    large = (
        KVRows(spread(values, math.nan), None)
        if scales is None
        else KVRows(spread(values, 1), spread(scales, math.nan))
    )
    arguments = {
        **small.arguments,
        "block_tables": jnp.asarray(ids)[small.arguments["block_tables"]],
        "layer": jnp.int32(0),
    }
    return Problem(arguments, large, large, expected)


def compare_large(configuration: Configuration, implementation: Implementation) -> dict[str, Any]:
    """As `compare`, of decode attention over a pool at, or beyond, the reach of int32.

    Raises:
        LeftOut: As `large_problem`.
    """
    num_bytes = LARGE_BYTES[configuration.kv_dtype]
    problem = large_problem(configuration, num_bytes, 1000)
    call = compiled(
        pallas_kernels.decode_attention, problem, configuration, implementation, cap=None
    )
    share = worst(
        problem, call(problem.keys, problem.values, problem.arguments), configuration.query_dtype
    )
    faults = [] if share <= 1 else [f"decode: {share:.3g} times the tolerance"]
    return {
        "decode": round(share, 4) if math.isfinite(share) else "inf",
        "passed": not faults,
        "faults": faults,
    }


def has_hopper() -> bool:
    """Whether this device and this JAX take the Hopper kernel."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return capability == HOPPER and jax.__version_info__ >= (0, 12)


TINY = tuple(
    Configuration(
        query_dtype=configuration.query_dtype,
        kv_dtype=configuration.kv_dtype,
        head_dim=16,
        num_heads=4,
        num_kv_heads=2,
    )
    for configuration in CONFIGURATIONS
    if configuration.head_dim == 64
    and configuration.num_kv_heads == 8
    and configuration.kv_dtype in ("bfloat16", "int4", "float32")
)


def cases(*, is_tiny: bool) -> Iterator[Case]:
    """All configurations, the ones that models run with first; then soft caps and large pools."""
    on_gpu = jax.default_backend() == "gpu"
    kernels: Implementation = "triton" if on_gpu else "triton_interpreted"
    chosen: dict[Implementation, tuple[Configuration, ...]] = {}
    chosen[kernels] = TINY if is_tiny else CONFIGURATIONS
    if has_hopper():
        chosen["mosaic"] = HOPPER_CONFIGURATIONS[:1] if is_tiny else HOPPER_CONFIGURATIONS
    for implementation, configurations in chosen.items():
        for configuration in configurations:
            yield _case(configuration, implementation, is_tiny=is_tiny)
    for implementation, configurations in chosen.items():
        yield _case(configurations[0], implementation, is_tiny=is_tiny, cap=SOFT_CAP)
    if on_gpu and not is_tiny:
        for implementation, configurations in chosen.items():
            for configuration in filter(is_usual, configurations):
                if configuration.kv_dtype in LARGE_BYTES:
                    yield _large_case(configuration, implementation)
    for configuration in TINY[:1] if is_tiny else filter(is_usual, CONFIGURATIONS):
        yield _case(configuration, "xla", is_tiny=is_tiny)


def is_usual(configuration: Configuration) -> bool:
    """As Llama 8B has it, in any format."""
    found = (configuration.head_dim, configuration.num_heads, configuration.block_size)
    return found == (128, 32, 16)


def _case(
    configuration: Configuration,
    implementation: Implementation,
    *,
    is_tiny: bool,
    cap: float | None = None,
) -> Case:
    wanted = lengths(configuration.block_size, is_tiny=is_tiny)
    return Case(
        name=f"{configuration.name} {implementation}" + ("" if cap is None else " soft cap"),
        prepare=functools.partial(prepare, configuration, implementation, wanted, cap),
        run=functools.partial(compare, configuration),
    )


def _large_case(configuration: Configuration, implementation: Implementation) -> Case:
    return Case(
        name=f"{configuration.name} {implementation} large pool",
        run=lambda _: compare_large(configuration, implementation),
    )
