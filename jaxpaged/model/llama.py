"""The decoder: one Llama-family model driven by its config, pool in and pool out.

One layer body has two drivers. On the CPU `lax.scan` runs over stacked weights: it compiles once
per step shape, whatever the depth. On a GPU a Python loop runs over a list of layers: there a
scan would copy every layer's weights in front of each matrix product, on every step.
"""

import collections.abc
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxpaged.cache.kv_pool import KVPool
from jaxpaged.model import layers
from jaxpaged.model.attention import Attention, AttentionBatch
from jaxpaged.model.config import ModelConfig
from jaxpaged.shapes import AnyArray
from pallas_kernels import Implementation

LayerLoop = Literal["scan", "unrolled"]

ALL_KEYS = 2**30
"""The window of a layer without one: more keys than any sequence has."""


class MLP(nnx.Module):
    """SwiGLU feed-forward (arXiv:2002.05202)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        implementation: Implementation,
    ) -> None:
        shared = {"bias": config.mlp_bias, "lead": lead, "dtype": dtype}
        linear = layers.linear_kind(implementation)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, **shared)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, **shared)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, **shared)

    def __call__(
        self, x: Float[Array, "T M"], place: layers.Place, *, stream: Float[Array, "T M"]
    ) -> Float[Array, "T M"]:
        """The stream with the MLP's output added."""
        gated = jax.nn.silu(self.gate_proj(x, place)) * self.up_proj(x, place)
        return self.down_proj(gated, place, added=stream)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        attention: Implementation,
    ) -> None:
        norm = {"eps": config.rms_norm_eps, "lead": lead, "dtype": dtype}
        self.input_layernorm = layers.RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, lead=lead, dtype=dtype, implementation=attention)
        self.post_attention_layernorm = layers.RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, lead=lead, dtype=dtype, implementation=attention)

    def __call__(
        self,
        pool: KVPool,
        x: Float[Array, "T M"],
        *,
        layer: Int[Array, ""],
        window: Int[Array, ""],
        rotary: tuple[Float[Array, "T D2"], Float[Array, "T D2"]],
        batch: AttentionBatch,
    ) -> tuple[Float[Array, "T M"], KVPool]:
        """The stream behind this layer, and the pool."""
        x, pool = self.self_attn(
            pool,
            self.input_layernorm(x),
            stream=x,
            layer=layer,
            window=window,
            rotary=rotary,
            batch=batch,
        )
        place = layers.Place(layer, batch.num_tokens)
        return self.mlp(self.post_attention_layernorm(x), place, stream=x), pool


class Llama(nnx.Module):
    """Embedding, decoder layers, final norm, output head.

    Args:
        config: The model's shape.
        dtype: Of weights and activations.
        layer_loop: "scan" stacks the layers' weights, "unrolled" keeps a list.
        attention: Who computes attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        layer_loop: LayerLoop,
        attention: Implementation = "xla",
    ) -> None:
        if attention == "llvm" and layer_loop != "scan":
            raise ValueError("the kernels for CPUs read the panels of all layers; use scan")
        self.config = config
        self.dtype = dtype
        self.attention: Implementation = attention
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(jnp.zeros(vocabulary, dtype))
        layer = functools.partial(DecoderLayer, config, dtype=dtype, attention=attention)
        self.layers = (
            layer(lead=(config.num_layers,))
            if layer_loop == "scan"
            else nnx.List([layer(lead=()) for _ in range(config.num_layers)])
        )
        self.norm = layers.RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, lead=(), dtype=dtype
        )
        # Row per token, as the embedding: a tied head is the embedding itself.
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nnx.Param(jnp.zeros(vocabulary, dtype))

    def __call__(
        self,
        pool: KVPool,
        token_ids: Int[AnyArray, " T"],
        positions: Int[AnyArray, " T"],
        *,
        batch: AttentionBatch,
    ) -> tuple[Float[Array, "T M"], KVPool]:
        """The stream behind the last layer, for every token; the pool with the tokens in it."""
        x = self.embed_tokens[...][token_ids]
        rotary = layers.rotary_tables(positions, self.config)
        windows = jnp.asarray([window or ALL_KEYS for window in self.config.windows], jnp.int32)
        if isinstance(self.layers, DecoderLayer):
            return _scan(self.layers, pool, x, windows=windows, rotary=rotary, batch=batch)
        return _unrolled(self.layers, pool, x, windows=windows, rotary=rotary, batch=batch)

    def logits(
        self, stream: Float[Array, "R M"], num_rows: Int[AnyArray, ""]
    ) -> Float[Array, "R V"]:
        """Logits (float32) of the first rows of the stream behind the last layer.

        Those of the other rows do not matter.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        x = self.norm(stream)
        if self.attention == "llvm":
            return pallas_kernels.head(x, head[...], num_rows=num_rows)
        return jnp.einsum("rm,vm->rv", x, head[...], preferred_element_type=jnp.float32)


def _unrolled(
    layer_list: collections.abc.Iterable[DecoderLayer],
    pool: KVPool,
    x: Float[Array, "T M"],
    *,
    windows: Int[Array, " L"],
    rotary: tuple[Float[Array, "T D2"], Float[Array, "T D2"]],
    batch: AttentionBatch,
) -> tuple[Float[Array, "T M"], KVPool]:
    for index, layer in enumerate(layer_list):
        x, pool = layer(
            pool, x, layer=jnp.int32(index), window=windows[index], rotary=rotary, batch=batch
        )
    return x, pool


def _scan(
    stacked_layers: DecoderLayer,
    pool: KVPool,
    x: Float[Array, "T M"],
    *,
    windows: Int[Array, " L"],
    rotary: tuple[Float[Array, "T D2"], Float[Array, "T D2"]],
    batch: AttentionBatch,
) -> tuple[Float[Array, "T M"], KVPool]:
    # The pool is carried, never scanned over: as xs and ys it would be copied whole.
    # Panels are not either: the kernel that reads them finds the layer's by itself.
    graph, panels, stacked = nnx.split(stacked_layers, layers.Panels, ...)

    def body(carry, weights):
        pool, x, index = carry
        layer = nnx.merge(graph, panels, weights)
        x, pool = layer(pool, x, layer=index, window=windows[index], rotary=rotary, batch=batch)
        return (pool, x, index + 1), None

    (pool, x, _), _ = jax.lax.scan(body, (pool, x, jnp.int32(0)), stacked)
    return x, pool
