"""The dull definitions: paged attention gathers and decodes everything, then attends densely."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import kv_format
from pallas_kernels.kv_format import KVRows
from pallas_kernels.partials import PARTITION_TOKENS, Partials


def paged_attention_ref(
    q: Float[Array, "T H D"],
    k: KVRows,
    v: KVRows,
    *,
    layer: int,
    block_tables: Int[Array | np.ndarray, "B W"],
    token_lanes: Int[Array | np.ndarray, " T"],
    context_lens: Int[Array | np.ndarray, " T"],
    window: int | Int[Array, ""],
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "T H D"]:
    """Softmax attention of every query over the last `window` tokens of its context.

    Memory is `T * W * S` keys, so this is for tests; softmax and products are in float32.

    Args:
        q: Rotated queries.
        k: Keys of all blocks and layers.
        v: Values.
        layer: Which layer's blocks to read.
        block_tables: Pool block of each logical block, per lane.
        token_lanes: The lane of each query.
        context_lens: Tokens of the lane up to each query, itself included; at least 1.
        window: How many of them the query attends to, itself included.
        scale: Factor on the scores.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`, as in Gemma 2.
    """
    tables = jnp.asarray(block_tables)[jnp.asarray(token_lanes)]
    keys, values = (_contexts(rows, layer, tables) for rows in (k, v))
    grouped = q.reshape(q.shape[0], keys.shape[2], -1, q.shape[2]).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,tckd->tkgc", grouped, keys, precision=exact) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    positions = jnp.arange(keys.shape[1])[None, :]
    ends = jnp.asarray(context_lens)[:, None]
    seen = (positions < ends) & (positions >= ends - window)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -jnp.inf), axis=-1)
    values = jnp.where(seen[:, :, None, None], values, 0)
    attended = jnp.einsum("tkgc,tckd->tkgd", weights, values, precision=exact)
    return attended.reshape(q.shape).astype(q.dtype)


def combine_ref(
    partials: Partials,
    starts: Int[Array | np.ndarray, " T"],
    ends: Int[Array | np.ndarray, " T"],
    *,
    dtype: jnp.dtype,
) -> Float[Array, "T K G D"]:
    """The attention to all keys, from that to each partition alone and its log-sum-exp.

    Args:
        partials: Of each partition.
        starts: The first key of each query.
        ends: The key behind its last one.
        dtype: Of the result.
    """
    first = jnp.arange(partials.peak.shape[2])[None, :] * PARTITION_TOKENS
    starts, ends = (jnp.asarray(edge)[:, None] for edge in (starts, ends))
    is_live = (first < ends) & (first + PARTITION_TOKENS > starts) & (starts < ends)
    # A partition whose weights are all zero has no attention of its own, and no share.
    counts = is_live[:, None, :, None] & (partials.total > 0)
    log_sums = jnp.where(counts, partials.peak + jnp.log(partials.total), -jnp.inf)
    shares = jnp.where(counts, jax.nn.softmax(log_sums, axis=2), 0)
    alone = partials.weighted / partials.total[..., None]
    merged = jnp.sum(jnp.where(counts[..., None], shares[..., None] * alone, 0), axis=2)
    return merged.astype(dtype)


def _contexts(rows: KVRows, layer: int, tables: Int[Array, "T W"]) -> Float[Array, "T C K D"]:
    values = rows.values[layer][tables]
    scales = None if rows.scales is None else rows.scales[layer][tables]
    decoded = kv_format.decode(values, scales)
    return decoded.reshape(tables.shape[0], -1, *decoded.shape[3:])
