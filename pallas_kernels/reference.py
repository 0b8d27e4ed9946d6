"""The dull definition of paged attention: gather everything, then attend densely."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def paged_attention_ref(
    q: Float[Array, "T H D"],
    k_pool: Shaped[Array, "L N S K D"],
    v_pool: Shaped[Array, "L N S K D"],
    *,
    layer: int,
    block_tables: Int[Array, "B W"],
    token_lanes: Int[Array, " T"],
    context_lens: Int[Array, " T"],
    scale: float,
) -> Float[Array, "T H D"]:
    """Softmax attention of every query over the first `context_lens` tokens of its lane.

    Memory is `T * W * S` keys, so this is for tests; softmax and products are in float32.

    Args:
        q: Rotated queries.
        k_pool: Keys of all blocks and layers.
        v_pool: Values.
        layer: Which layer's blocks to read.
        block_tables: Pool block of each logical block, per lane.
        token_lanes: The lane of each query.
        context_lens: Tokens each query attends to, itself included; at least 1.
        scale: Factor on the scores.
    """
    num_kv_heads, width = k_pool.shape[3], k_pool.shape[4]
    tables = block_tables[token_lanes]
    k = k_pool[layer][tables].reshape(q.shape[0], -1, num_kv_heads, width).astype(jnp.float32)
    v = v_pool[layer][tables].reshape(q.shape[0], -1, num_kv_heads, width).astype(jnp.float32)
    grouped = q.reshape(q.shape[0], num_kv_heads, -1, width).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgd,tckd->tkgc", grouped, k, precision=exact) * scale
    seen = jnp.arange(k.shape[1])[None, :] < context_lens[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -jnp.inf), axis=-1)
    v = jnp.where(seen[:, :, None, None], v, 0)
    attended = jnp.einsum("tkgc,tckd->tkgd", weights, v, precision=exact)
    return attended.reshape(q.shape).astype(q.dtype)
