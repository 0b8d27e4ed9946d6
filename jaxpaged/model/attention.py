"""Self-attention of one layer: what is projected for it, and attention through the pool only.

A step first writes the keys and values of its tokens and then attends through the block tables,
to its own tokens too. So a token's keys and values are the same whether they came from one prefill,
from chunks, from a block that is shared, or were computed again.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxpaged.cache import kv_pool
from jaxpaged.cache.kv_pool import KVPool
from jaxpaged.model import layers
from jaxpaged.model.config import ModelConfig
from jaxpaged.shapes import AnyArray
from pallas_kernels import Implementation, PrefillTiles, WeightDType

# Mosaic GPU has decode attention only; the reason that goes with the choice says so.
_PREFILL: dict[Implementation, Implementation] = {
    "mosaic": "triton",
    "mosaic_interpreted": "triton_interpreted",
}


class AttentionBatch(NamedTuple):
    """What attention needs to know of a step, the same for every layer.

    The flat token axis holds the decode queries first, then the prefill segments, then padding.
    """

    slot_mapping: Int[Array, " T"]
    """Slot each token's key and value are written to; padding is out of range."""
    block_tables: Int[Array, "B W"]
    """Pool block of each logical block, per lane."""
    token_lanes: Int[AnyArray, " Q"]
    """Lane of each decode query; there is room for the most that a step has."""
    context_lens: Int[Array, " Q"]
    """Tokens that each decode query attends to, itself included."""
    num_decodes: Int[AnyArray, ""]
    """Decode queries; they are the first ones."""
    num_tokens: Int[AnyArray, ""]
    """Tokens of the step; those behind them are padding."""
    tiles: PrefillTiles | None
    """The prefill segments; None in a step without any."""


class Attention(nnx.Module):
    """What grouped-query attention (arXiv:2305.13245) is given, and what is made of its result."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        implementation: Implementation,
        weight_dtype: WeightDType | None = None,
    ) -> None:
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        shared = {"lead": lead, "dtype": dtype}
        linear = functools.partial(layers.linear_kind(implementation, weight_dtype), **shared)
        bias = config.attention_bias or config.qkv_bias
        self.q_proj = linear(config.hidden_size, heads, bias=bias)
        self.k_proj = linear(config.hidden_size, kv_heads, bias=bias)
        self.v_proj = linear(config.hidden_size, kv_heads, bias=bias)
        self.o_proj = linear(heads, config.hidden_size, bias=config.attention_bias)
        norm = functools.partial(
            layers.RMSNorm, eps=config.rms_norm_eps, how=config.norm_scale, **shared
        )
        is_of_head = config.query_key_norm == "head"
        has_norms = config.query_key_norm != "none"
        self.q_norm = norm(config.head_dim if is_of_head else heads) if has_norms else None
        self.k_norm = norm(config.head_dim if is_of_head else kv_heads) if has_norms else None
        self.head_dim = config.head_dim

    def project(
        self,
        x: Float[Array, "T M"],
        place: layers.Place,
        rotary: tuple[Float[Array, "T R2"], Float[Array, "T R2"]],
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
        """Queries and keys, normed if the model does and both rotated, and values."""
        heads = (x.shape[0], -1, self.head_dim)
        q = layers.rotate(_normed(self.q_proj(x, place).reshape(heads), self.q_norm), rotary)
        k = layers.rotate(_normed(self.k_proj(x, place).reshape(heads), self.k_norm), rotary)
        return q, k, self.v_proj(x, place).reshape(heads)


def _normed(x: Float[Array, "T X D"], norm: layers.RMSNorm | None) -> Float[Array, "T X D"]:
    """Heads, normed each or all of a token together, as wide as the norm is."""
    return x if norm is None else norm(x.reshape(-1, norm.width)).reshape(x.shape)


class Scores(NamedTuple):
    """How a model's scores are made, and who computes attention."""

    scale: float
    """What the products of queries and keys are multiplied by."""
    soft_cap: float | None
    implementation: Implementation


def write_and_attend(
    pool: KVPool,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    *,
    layer: Int[Array, ""],
    window: Int[Array, ""],
    batch: AttentionBatch,
    scores: Scores,
) -> tuple[Float[Array, "T H D"], KVPool]:
    """What the queries attend to, and the pool with the step's keys and values in it."""
    pool = kv_pool.write(pool, layer, batch.slot_mapping, k, v)
    return attend(pool, q, layer=layer, window=window, batch=batch, scores=scores), pool


def attend(
    pool: KVPool,
    q: Float[Array, "T H D"],
    *,
    layer: Int[Array, ""],
    window: Int[Array, ""],
    batch: AttentionBatch,
    scores: Scores,
) -> Float[Array, "T H D"]:
    """Attention of the decode queries and of the prefill segments, each by its own function."""
    implementation = scores.implementation
    shared = {
        "layer": layer,
        "block_tables": batch.block_tables,
        "window": window,
        "scale": scores.scale,
        "soft_cap": scores.soft_cap,
    }
    most = batch.token_lanes.shape[0]
    decoded = pallas_kernels.decode_attention(
        q[:most],
        pool.k,
        pool.v,
        token_lanes=batch.token_lanes,
        context_lens=batch.context_lens,
        num_queries=batch.num_decodes,
        implementation=implementation,
        **shared,
    )
    decoded = jnp.pad(decoded, ((0, q.shape[0] - most), (0, 0), (0, 0)))
    if batch.tiles is None:
        return decoded
    prefill = _PREFILL.get(implementation, implementation)
    return pallas_kernels.prefill_attention(
        q,
        pool.k,
        pool.v,
        tiles=batch.tiles,
        onto=decoded,
        implementation=prefill,
        **shared,
    )
