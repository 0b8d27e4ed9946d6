"""The decoder without a pool: one whole sequence, every token attending to all that it may see.

What the paged engine has to equal, with the same weights and linear maps. Its memory grows with the
square of the length: for checks of single sequences.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.model import layers
from jaxpaged.model.llama import ALL_KEYS, DecoderLayer, Llama
from jaxpaged.shapes import AnyArray


def logits(
    graph: nnx.GraphDef,
    weights: nnx.State,
    token_ids: Int[AnyArray, " T"],
    rows: Int[AnyArray, " R"],
) -> Float[Array, "R V"]:
    """Logits (float32) behind some tokens of a sequence.

    Args:
        graph: Of the decoder.
        weights: Of the decoder.
        token_ids: The sequence; what follows its end changes nothing before it.
        rows: Places of the tokens.
    """
    model: Llama = nnx.merge(graph, weights)
    ids = jnp.asarray(token_ids)
    num_tokens = jnp.int32(ids.shape[0])
    x = model.embed_tokens[...][ids]
    rotary = layers.rotary_tables(jnp.arange(ids.shape[0]), model.config)
    windows = jnp.asarray([window or ALL_KEYS for window in model.config.windows], jnp.int32)
    if not isinstance(model.layers, DecoderLayer):
        for index, layer in enumerate(model.layers):
            place = layers.Place(jnp.int32(index), num_tokens)
            x = _layer(layer, x, place, window=windows[index], rotary=rotary)
        return _behind(model, x, rows)
    layer_graph, panels, stacked = nnx.split(model.layers, layers.Panels, ...)

    def body(carry, parts):
        x, index = carry
        layer = nnx.merge(layer_graph, panels, parts)
        place = layers.Place(index, num_tokens)
        return (_layer(layer, x, place, window=windows[index], rotary=rotary), index + 1), None

    (x, _), _ = jax.lax.scan(body, (x, jnp.int32(0)), stacked)
    return _behind(model, x, rows)


def _behind(
    model: Llama, stream: Float[Array, "T M"], rows: Int[AnyArray, " R"]
) -> Float[Array, "R V"]:
    places = jnp.asarray(rows)
    return model.logits(stream[places], jnp.int32(places.shape[0]))


def _layer(
    layer: DecoderLayer,
    x: Float[Array, "T M"],
    place: layers.Place,
    *,
    window: Int[Array, ""],
    rotary: tuple[Float[Array, "T D2"], Float[Array, "T D2"]],
) -> Float[Array, "T M"]:
    attention = layer.self_attn
    q, k, v = attention.project(layer.input_layernorm(x), place, rotary)
    attended = attend(q, k, v, window=window).reshape(x.shape[0], -1)
    x = attention.o_proj(attended, place, added=x)
    return layer.mlp(layer.post_attention_layernorm(x), place, stream=x)


def attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    *,
    window: Int[Array, ""],
) -> Float[Array, "T H D"]:
    """Causal grouped-query attention with the softmax written out, in float32."""
    num_tokens, num_heads, width = q.shape
    group = num_heads // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k, precision="highest")
    positions = jnp.arange(num_tokens)
    behind = positions[:, None] - positions[None, :]
    is_seen = (behind >= 0) & (behind < window)
    scores = jnp.where(is_seen[None], scores * width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest").astype(q.dtype)
