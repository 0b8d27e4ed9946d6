"""Self-attention of one layer: project, write to the pool, read only through the pool.

A step first writes the keys and values of its tokens and then attends through the block tables,
to its own tokens too. So a token's keys and values are the same whether they came from one prefill,
from chunks, from a block that is shared, or were computed again.
"""

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
from pallas_kernels import Implementation, PrefillTiles

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
    """Grouped-query attention (arXiv:2305.13245) over the paged pool."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        implementation: Implementation,
    ) -> None:
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        shared = {"bias": config.attention_bias, "lead": lead, "dtype": dtype}
        linear = layers.linear_kind(implementation)
        self.q_proj = linear(config.hidden_size, heads, **shared)
        self.k_proj = linear(config.hidden_size, kv_heads, **shared)
        self.v_proj = linear(config.hidden_size, kv_heads, **shared)
        self.o_proj = linear(heads, config.hidden_size, **shared)
        self.head_dim = config.head_dim
        self.implementation: Implementation = implementation

    def __call__(
        self,
        pool: KVPool,
        x: Float[Array, "T M"],
        *,
        stream: Float[Array, "T M"],
        layer: Int[Array, ""],
        window: Int[Array, ""],
        rotary: tuple[Float[Array, "T D2"], Float[Array, "T D2"]],
        batch: AttentionBatch,
    ) -> tuple[Float[Array, "T M"], KVPool]:
        """The stream with this layer's attention added; the pool with the step's tokens in it."""
        place = layers.Place(layer, batch.num_tokens)
        q, k, v = self.project(x, place, rotary)
        pool = kv_pool.write(pool, layer, batch.slot_mapping, k, v)
        attended = attend(
            pool,
            q,
            layer=layer,
            window=window,
            batch=batch,
            scale=self.head_dim**-0.5,
            implementation=self.implementation,
        )
        return self.o_proj(attended.reshape(x.shape[0], -1), place, added=stream), pool

    def project(
        self,
        x: Float[Array, "T M"],
        place: layers.Place,
        rotary: tuple[Float[Array, "T D2"], Float[Array, "T D2"]],
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
        """Queries and keys, both rotated, and values."""
        heads = (x.shape[0], -1, self.head_dim)
        q = layers.rotate(self.q_proj(x, place).reshape(heads), rotary)
        k = layers.rotate(self.k_proj(x, place).reshape(heads), rotary)
        return q, k, self.v_proj(x, place).reshape(heads)


def attend(
    pool: KVPool,
    q: Float[Array, "T H D"],
    *,
    layer: Int[Array, ""],
    window: Int[Array, ""],
    batch: AttentionBatch,
    scale: float,
    implementation: Implementation,
) -> Float[Array, "T H D"]:
    """Attention of the decode queries and of the prefill segments, each by its own function."""
    shared = {
        "layer": layer,
        "block_tables": batch.block_tables,
        "window": window,
        "scale": scale,
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
