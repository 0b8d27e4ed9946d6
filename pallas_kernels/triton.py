"""Paged attention as Pallas kernels for NVIDIA GPUs, by Pallas's Triton backend.

Decode attention is split over the sequence's own length in partitions of a fixed size: one program
per query, key/value head and partition leaves a partial result, a second kernel merges those of a
query in their order. Neither the batch nor the block size has a part in how numbers are summed up.

Every load of a key or value is masked by what the query sees: no slot outside the context is read,
whatever its block table says. Key/value tiles are aligned to absolute positions.

Upstream this backend is deprecated since JAX 0.11; all that knows of it is in this file.
"""

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_format import NIBBLES, KVRows
from pallas_kernels.partials import PARTITION_TOKENS, Partials
from pallas_kernels.xla import TILE_QUERIES

if TYPE_CHECKING:
    from pallas_kernels.api import PrefillTiles

# Said whenever one of these kernels is compiled; the module's docstring says it once.
warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)

AnyArray = Array | np.ndarray

WIDEST_HEAD = 256
"""Numbers of the widest head."""
LEAST_ROWS = 16
"""Rows of the smallest product that tensor cores do: the query group is padded to it."""

# Far below any score, yet finite: exp(MASKED - MASKED) must be 1, not NaN.
MASKED = -1e30

_LOG2E = 1.4426950408889634

# Storage dtypes that hold the bits of floats; fp8, in uint8, is decoded by hand.
_FLOAT_BITS = {"uint16": jnp.bfloat16.dtype, "int16": jnp.float16.dtype}


MOST_NEAR_NUMBERS = 2**31
"""Numbers of the largest array whose places all fit into 32 bits with a sign."""
LEAST_FAR_BYTES = 2**32
"""Pallas counts places in 64 bits in arrays larger than this."""


def is_compiled(query_dtype: str, kv_dtype: str) -> bool:
    """Whether the kernels were compiled without a spilled register for these formats.

    Others are computed right, and slowly.

    Args:
        query_dtype: Of queries.
        kv_dtype: How keys and values are stored.
    """
    return (query_dtype == "float32") == (kv_dtype == "float32")


def is_addressable(num_numbers: int, itemsize: int) -> bool:
    """Whether the kernels find every number of an array on a GPU.

    Pallas counts places of arrays of up to 4 GiB in 32 bits, and the code made of it takes them
    for signed: numbers of a byte each, 2 to 4 GiB of them, are beyond it.
    """
    return num_numbers <= MOST_NEAR_NUMBERS or num_numbers * itemsize > LEAST_FAR_BYTES


class Tiling(NamedTuple):
    """How much of the work a program holds at a time."""

    decode_keys: int
    """Keys of a tile of decode attention."""
    queries: int
    """Query tokens of a program of prefill attention."""
    keys: int
    """Keys of a tile of prefill attention."""
    num_warps: int
    """Of a program of prefill attention."""


def tiling(head_dim: int, stored: str, *, exact: bool) -> Tiling:
    """Tiles that fit into registers, by what the compiler said of others.

    Args:
        head_dim: Numbers of a head.
        stored: Storage dtype of keys and values.
        exact: Products are done in float32, without tensor cores.

    Raises:
        ValueError: Heads are wider than any that the kernels were compiled for.
    """
    if head_dim > WIDEST_HEAD:
        raise ValueError(
            f"the kernels serve heads of up to {WIDEST_HEAD} numbers, and these have {head_dim}; "
            "use xla"
        )
    name = "float32" if exact else _FLOAT_BITS[stored].name if stored in _FLOAT_BITS else stored
    return _TILINGS[name][(head_dim > 64) + (head_dim > 128)]


# By the storage dtype, and heads of up to 64, up to 128 and up to 256 numbers. All compile for
# sm_80, sm_89 and sm_90a without a spilled register; larger ones do not.
_TILINGS = {
    "float32": (Tiling(32, 16, 32, 4), Tiling(32, 16, 32, 4), Tiling(16, 16, 16, 4)),
    "bfloat16": (Tiling(64, 64, 32, 8), Tiling(64, 32, 32, 4), Tiling(32, 32, 32, 8)),
    "float16": (Tiling(64, 64, 32, 8), Tiling(32, 64, 32, 8), Tiling(32, 32, 16, 8)),
    "int8": (Tiling(64, 64, 32, 8), Tiling(32, 64, 32, 4), Tiling(32, 32, 16, 8)),
    "uint8": (Tiling(64, 64, 32, 8), Tiling(32, 64, 32, 4), Tiling(32, 32, 16, 8)),
    "uint32": (Tiling(64, 64, 32, 8), Tiling(32, 32, 32, 8), Tiling(32, 16, 16, 4)),
}


def decode_attention(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    *,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    token_lanes: Int[AnyArray, " T"],
    context_lens: Int[AnyArray, " T"],
    num_queries: Int[AnyArray, ""],
    window: Int[AnyArray, ""],
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Decode attention; see `pallas_kernels.api.decode_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k.values.shape[3], k.values.shape[2]
    group = num_heads // num_kv_heads
    ends = jnp.where(jnp.arange(num_tokens) < num_queries, jnp.asarray(context_lens), 0)
    starts = jnp.maximum(ends - jnp.asarray(window), 0)
    num_partitions = pl.cdiv(block_tables.shape[1] * block_size, PARTITION_TOKENS)
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    exact = _is_exact(q, k)
    kernel = functools.partial(
        _decode_kernel,
        block_size=block_size,
        num_keys=tiling(head_dim, k.values.dtype.name, exact=exact).decode_keys,
        scale=scale,
        soft_cap=soft_cap,
        exact=exact,
    )
    parts = (num_tokens, num_kv_heads, num_partitions, group)
    shapes = ((*parts, head_dim), parts, parts)
    partials = call(
        kernel,
        grid=(num_tokens, num_kv_heads, num_partitions),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        name="paged_decode",
        interpret=interpret,
    )(
        jnp.asarray(layer).reshape(1),
        starts,
        ends,
        jnp.asarray(token_lanes),
        jnp.asarray(block_tables),
        grouped,
        *_arrays(k, v),
    )
    return combine(Partials(*partials), starts, ends, q.dtype, interpret=interpret).reshape(q.shape)


def combine(
    partials: Partials,
    starts: Int[Array, " T"],
    ends: Int[Array, " T"],
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> Float[Array, "T K G D"]:
    """The merge of partial results; see `pallas_kernels.api.combine`."""
    num_tokens, num_kv_heads, _, group, head_dim = partials.weighted.shape
    return call(
        _combine_kernel,
        grid=(num_tokens, num_kv_heads),
        outputs=jax.ShapeDtypeStruct((num_tokens, num_kv_heads, group, head_dim), dtype),
        name="paged_combine",
        interpret=interpret,
    )(starts, ends, *partials)


def prefill_attention(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    onto: Float[Array, "T H D"],
    *,
    layer: Int[Array, ""],
    block_tables: Int[AnyArray, "B W"],
    tiles: "PrefillTiles",
    window: Int[AnyArray, ""],
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Prefill attention; see `pallas_kernels.api.prefill_attention`."""
    exact = _is_exact(q, k)
    tile = tiling(q.shape[2], k.values.dtype.name, exact=exact)
    kernel = functools.partial(
        _prefill_kernel,
        block_size=k.values.shape[2],
        group=q.shape[1] // k.values.shape[3],
        num_queries=tile.queries,
        num_keys=tile.keys,
        scale=scale,
        soft_cap=soft_cap,
        exact=exact,
    )
    # What no tile covers stays as it is here: zero.
    return call(
        kernel,
        grid=(tiles.lanes.shape[0], TILE_QUERIES // tile.queries, q.shape[1]),
        outputs=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="paged_prefill",
        interpret=interpret,
        aliases={0: 0},
        num_warps=tile.num_warps,
    )(
        onto,
        jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, window, tiles.used)]),
        *(jnp.asarray(x) for x in (tiles.lanes, tiles.starts, tiles.lens, tiles.positions)),
        jnp.asarray(block_tables),
        q,
        *_arrays(k, v),
    )


class _Softmax(NamedTuple):
    """A softmax-weighted sum over the keys seen so far, for each row of a tile of queries."""

    peak: Any
    total: Any
    weighted: Any


def _decode_kernel(
    layer_ref,
    starts_ref,
    ends_ref,
    lanes_ref,
    tables_ref,
    q_ref,
    *refs,
    block_size: int,
    num_keys: int,
    scale: float,
    soft_cap: float | None,
    exact: bool,
) -> None:
    *kv_refs, weighted_ref, peak_ref, total_ref = refs
    query, head, partition = (pl.program_id(axis) for axis in range(3))
    group, head_dim = q_ref.shape[2:]
    first = partition * PARTITION_TOKENS
    start = jnp.maximum(starts_ref[query], first)
    end = jnp.minimum(ends_ref[query], first + PARTITION_TOKENS)

    @pl.when(start < end)
    def _() -> None:
        rows, is_row = _indices(group, LEAST_ROWS)
        columns, is_column = _columns(head_dim, kv_refs[0])
        is_real = is_row[:, None] & is_column[None, :]
        q = plt.load(q_ref.at[query, head, rows[:, None], columns[None, :]], mask=is_real, other=0)
        load = _tile_loader(kv_refs, tables_ref, layer_ref[0], lanes_ref[query], head, block_size)

        def tile(index, softmax: _Softmax) -> _Softmax:
            keys = index * num_keys + jnp.arange(num_keys)
            seen = (keys >= start) & (keys < end)
            k_tile, k_scales, v_tile, v_scales = load(keys, seen, q.dtype, exact)
            scores = _scores(q, k_tile, k_scales, scale, soft_cap, exact)
            return _accumulate(softmax, scores, seen[None, :], v_tile, v_scales, exact)

        span = (start // num_keys, pl.cdiv(end, num_keys))
        softmax = jax.lax.fori_loop(*span, tile, _start(rows.shape[0], columns.shape[0]))
        place = (query, head, partition)
        at = weighted_ref.at[*place, rows[:, None], columns[None, :]]
        plt.store(at, softmax.weighted, mask=is_real)
        plt.store(peak_ref.at[*place, rows], softmax.peak, mask=is_row)
        plt.store(total_ref.at[*place, rows], softmax.total, mask=is_row)


def _combine_kernel(starts_ref, ends_ref, weighted_ref, peak_ref, total_ref, out_ref) -> None:
    query, head = (pl.program_id(axis) for axis in range(2))
    group, head_dim = weighted_ref.shape[3:]
    rows, is_row = _indices(group)
    columns, is_column = _indices(head_dim)
    is_real = is_row[:, None] & is_column[None, :]

    def merge(partition, softmax: _Softmax) -> _Softmax:
        place = (query, head, partition)
        at = weighted_ref.at[*place, rows[:, None], columns[None, :]]
        weighted = plt.load(at, mask=is_real, other=0)
        part_peak = plt.load(peak_ref.at[*place, rows], mask=is_row, other=MASKED)
        total = plt.load(total_ref.at[*place, rows], mask=is_row, other=0)
        peak = jnp.maximum(softmax.peak, part_peak)
        old, new = _exp(softmax.peak - peak), _exp(part_peak - peak)
        return _Softmax(
            peak,
            softmax.total * old + total * new,
            softmax.weighted * old[:, None] + weighted * new[:, None],
        )

    start, end = starts_ref[query], ends_ref[query]
    span = (start // PARTITION_TOKENS, pl.cdiv(end, PARTITION_TOKENS))
    softmax = jax.lax.fori_loop(*span, merge, _start(rows.shape[0], columns.shape[0]))
    at = out_ref.at[query, head, rows[:, None], columns[None, :]]
    plt.store(at, _finish(softmax).astype(out_ref.dtype), mask=is_real)


def _prefill_kernel(
    _,
    numbers_ref,
    lanes_ref,
    starts_ref,
    lens_ref,
    positions_ref,
    tables_ref,
    q_ref,
    *refs,
    block_size: int,
    group: int,
    num_queries: int,
    num_keys: int,
    scale: float,
    soft_cap: float | None,
    exact: bool,
) -> None:
    *kv_refs, out_ref = refs
    index, part, head = (pl.program_id(axis) for axis in range(3))
    layer, window, used = (numbers_ref[place] for place in range(3))
    skipped = part * num_queries
    length = jnp.minimum(lens_ref[index] - skipped, num_queries)

    @pl.when((index < used) & (length > 0))
    def _() -> None:
        head_dim = q_ref.shape[2]
        position = positions_ref[index] + skipped
        row = jnp.arange(num_queries)
        columns, is_column = _columns(head_dim, kv_refs[0])
        is_real = (row < length)[:, None] & is_column[None, :]
        at = (starts_ref[index] + skipped + row[:, None], head, columns[None, :])
        q = plt.load(q_ref.at[*at], mask=is_real, other=0)
        positions = position + row
        earliest, end = jnp.maximum(position - window + 1, 0), position + length
        load = _tile_loader(kv_refs, tables_ref, layer, lanes_ref[index], head // group, block_size)

        def tile(kv_index, softmax: _Softmax) -> _Softmax:
            keys = kv_index * num_keys + jnp.arange(num_keys)
            is_live = (keys >= earliest) & (keys < end)
            k_tile, k_scales, v_tile, v_scales = load(keys, is_live, q.dtype, exact)
            # A weight of zero does not hide a NaN from the queries before it: so its value is
            # zero, and its score is NaN, which is masked like any other.
            is_sound = jnp.sum(v_tile.astype(jnp.float32) * 0, axis=1) == 0
            if v_scales is not None:
                is_sound &= v_scales * 0 == 0
                v_scales = jnp.where(is_sound, v_scales, 0)
            v_tile = jnp.where(is_sound[:, None], v_tile, 0)
            scores = _scores(q, k_tile, k_scales, scale, soft_cap, exact)
            scores = jnp.where(is_sound[None, :], scores, jnp.nan)
            later = positions[:, None] - keys[None, :]
            seen = (later >= 0) & (later < window) & is_live[None, :]
            return _accumulate(softmax, scores, seen, v_tile, v_scales, exact)

        span = (earliest // num_keys, pl.cdiv(end, num_keys))
        softmax = jax.lax.fori_loop(*span, tile, _start(num_queries, columns.shape[0]))
        plt.store(out_ref.at[*at], _finish(softmax).astype(out_ref.dtype), mask=is_real)


def _tile_loader(
    kv_refs, tables_ref, layer, lane, head, block_size: int
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Loads the keys and values at given positions: as numbers of `dtype`, and their scales."""
    has_scales = len(kv_refs) > 2
    k_ref, v_ref = kv_refs[0], kv_refs[1]
    width = tables_ref.shape[1]

    def load(keys, seen, dtype: jnp.dtype, exact: bool):
        logical = jnp.minimum(keys // block_size, width - 1)
        blocks = plt.load(tables_ref.at[lane, logical], mask=seen, other=0)
        slots = keys % block_size
        loaded: list[Any] = []
        for ref, scales_ref in (
            ((k_ref, kv_refs[2]), (v_ref, kv_refs[3]))
            if has_scales
            else (
                (k_ref, None),
                (v_ref, None),
            )
        ):
            loaded.append(_load_rows(ref, layer, blocks, slots, head, seen, dtype, exact))
            loaded.append(
                None
                if scales_ref is None
                else plt.load(scales_ref.at[layer, blocks, slots, head], mask=seen, other=0)
            )
        return tuple(loaded)

    return load


def _load_rows(ref, layer, blocks, slots, head, seen, dtype, exact: bool):
    """Rows of one head as numbers, without their scales; zeros where nothing is seen."""
    stored = ref.dtype.name
    places, is_place = _indices(ref.shape[-1])
    mask = seen[:, None] & is_place[None, :]
    at = ref.at[layer, blocks[:, None], slots[:, None], head, places[None, :]]
    rows = plt.load(at, mask=mask, other=0)
    if stored in _FLOAT_BITS:
        rows = jax.lax.bitcast_convert_type(rows, _FLOAT_BITS[stored])
    elif stored == "uint32":
        shifts = 4 * jnp.arange(NIBBLES, dtype=jnp.uint32)
        nibbles = (rows[:, None, :] >> shifts[None, :, None]) & jnp.uint32(15)
        numbers = jnp.where(mask[:, None, :], nibbles.astype(jnp.int32) - 8, 0)
        rows = numbers.reshape(seen.shape[0], -1)
    elif stored == "uint8":
        rows = _from_fp8(rows)
    return rows.astype(jnp.float32 if exact or rows.dtype == jnp.float16 else dtype)


def _from_fp8(rows):
    """E4M3 as float16, by its bits: cards before Ada have no such numbers."""
    bits = rows.astype(jnp.uint16)
    magnitude = bits & jnp.uint16(0x7F)
    half = ((bits & jnp.uint16(0x80)) << 8) | (magnitude << 7)
    # The exponents' biases are 7 and 15.
    number = jax.lax.bitcast_convert_type(half, jnp.float16) * jnp.float16(256)
    number = jnp.where(magnitude == 0x7F, jnp.float16(np.nan), number)
    return number.astype(jnp.bfloat16)


def _scores(q, k_tile, k_scales, scale: float, soft_cap: float | None, exact: bool):
    scores = dot(q.astype(k_tile.dtype), k_tile.T, exact) * scale
    if k_scales is not None:
        scores *= k_scales[None, :]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return scores


def _accumulate(softmax: _Softmax, scores, seen, v_tile, v_scales, exact: bool) -> _Softmax:
    """Takes one key/value tile into the running softmax."""
    scores = jnp.where(seen, scores, MASKED)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=1))
    shrink = _exp(softmax.peak - peak)
    weights = jnp.where(seen, _exp(scores - peak[:, None]), 0)
    total = softmax.total * shrink + jnp.sum(weights, axis=1)
    if v_scales is not None:
        weights *= v_scales[None, :]
    seen_now = dot(weights.astype(v_tile.dtype), v_tile, exact)
    return _Softmax(peak, total, softmax.weighted * shrink[:, None] + seen_now)


def _start(num_rows: int, num_columns: int) -> _Softmax:
    return _Softmax(
        jnp.full((num_rows,), MASKED, jnp.float32),
        jnp.zeros((num_rows,), jnp.float32),
        jnp.zeros((num_rows, num_columns), jnp.float32),
    )


def _finish(softmax: _Softmax):
    # Rows that saw no key come out as zero.
    return softmax.weighted / jnp.where(softmax.total > 0, softmax.total, 1.0)[:, None]


def dot(a, b, exact: bool):
    """The product of tiles in float32; with all of its bits if it is to be exact."""
    # Products of float32 are rounded to TF32 otherwise.
    precision = jax.lax.Precision.HIGHEST if exact else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _exp(x):
    return jnp.exp2(x * _LOG2E)


def _indices(size: int, least: int = 1):
    """Indices of an axis, padded to a power of two that is at least `least`, and which are real."""
    index = jnp.arange(_padded(size, least))
    return index, index < size


def _columns(head_dim: int, k_ref):
    """Which number of a head each column of a tile holds, and whether it is real.

    Number `i * X + j` of an int4 row is nibble `i` of word `j`; its words are padded, not its
    numbers.
    """
    if k_ref.dtype != jnp.uint32:
        return _indices(head_dim)
    num_words = head_dim // NIBBLES
    padded = _padded(num_words)
    index = jnp.arange(NIBBLES * padded)
    word = index % padded
    return index // padded * num_words + word, word < num_words


def _padded(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _is_exact(q: Array, k: KVRows) -> bool:
    """Whether products keep all bits of float32, as the reference does."""
    return q.dtype == jnp.float32 or k.values.dtype == jnp.float32


def _arrays(k: KVRows, v: KVRows) -> list[Array]:
    if not is_addressable(k.values.size, k.values.dtype.itemsize):
        raise ValueError(
            f"the kernels cannot find every place of {k.values.size} numbers of a byte each; "
            f"take at most {MOST_NEAR_NUMBERS} or more than {LEAST_FAR_BYTES}"
        )
    scales = [] if k.scales is None or v.scales is None else [k.scales, v.scales]
    return [k.values, v.values, *scales]


def call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    outputs: Any,  # noqa: ANN401
    name: str,
    interpret: bool,
    aliases: dict[int, int] | None = None,
    num_warps: int = 4,
) -> Callable[..., Any]:
    """The kernel as a function of arrays, by this backend or its interpreter."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=outputs,
        name=name,
        interpret=interpret,
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=2),
    )
