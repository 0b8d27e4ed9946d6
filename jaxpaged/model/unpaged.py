"""The decoder without a pool: one whole sequence, every token attending to all that it may see.

What the paged engine has to equal, with the same weights and linear maps. Its memory grows with the
square of the length: for checks of single sequences.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.model.llama import Llama
from jaxpaged.shapes import AnyArray


def logits(
    graph: nnx.GraphDef,
    weights: nnx.State,
    token_ids: Int[AnyArray, " T"],
    rows: Int[AnyArray, " R"],
    adapter: Int[AnyArray, ""] | None = None,
) -> Float[Array, "R V"]:
    """Logits (float32) behind some tokens of a sequence.

    Args:
        graph: Of the decoder.
        weights: Of the decoder.
        token_ids: The sequence; what follows its end changes nothing before it.
        rows: Places of the tokens.
        adapter: The number of the sequence's adapter, 0 for none; None in a model without.
    """
    model: Llama = nnx.merge(graph, weights)
    ids, places = jnp.asarray(token_ids), jnp.asarray(rows)
    config = model.config

    def attend_all(carried, q, k, v, *, layer, window):
        return attend(q, k, v, window=window, scale=config.score_scale, cap=config.score_cap), None

    stream, _ = model.stream(
        ids,
        jnp.arange(ids.shape[0]),
        attend=attend_all,
        carried=None,
        num_tokens=jnp.int32(ids.shape[0]),
        adapters=None if adapter is None else jnp.full(ids.shape, adapter, jnp.int32),
    )
    return model.logits(stream[places], jnp.int32(places.shape[0]))


def attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    *,
    window: Int[Array, ""],
    scale: float,
    cap: float | None,
) -> Float[Array, "T H D"]:
    """Causal grouped-query attention with the softmax written out, in float32."""
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k, precision="highest") * scale
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    positions = jnp.arange(num_tokens)
    behind = positions[:, None] - positions[None, :]
    is_seen = (behind >= 0) & (behind < window)
    scores = jnp.where(is_seen[None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest").astype(q.dtype)
