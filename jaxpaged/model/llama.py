"""The decoder: a Llama, and what differs in other families, driven by its config.

One layer body has two drivers. On the CPU `lax.scan` runs over stacked weights: it compiles once
per step shape, whatever the depth. On a GPU a Python loop runs over a list of layers: there a
scan would copy every layer's weights in front of each matrix product, on every step.

Attention itself is the caller's: through the pool in a step, and without one in `model.unpaged`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxpaged.cache.kv_pool import KVPool
from jaxpaged.model import attention as attention_module
from jaxpaged.model import layers
from jaxpaged.model.attention import Attention, AttentionBatch, Scores
from jaxpaged.model.config import Activation, ModelConfig
from jaxpaged.model.experts import RoutedMLP
from jaxpaged.shapes import AnyArray
from pallas_kernels import Implementation, WeightDType

LayerLoop = Literal["scan", "unrolled"]

Attend = Callable[..., tuple[Array, Any]]
"""Attention of a layer: of `carried, q, k, v` (the last three `[T, heads, width]`) and by name
`layer` and `window`; gives what the queries attend to, and what is carried to the next layer."""

ALL_KEYS = 2**30
"""The window of a layer without one: more keys than any sequence has."""


class MLP(nnx.Module):
    """Gated feed-forward (arXiv:2002.05202): SwiGLU, or GeGLU where the config says so."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        implementation: Implementation,
        weight_dtype: WeightDType | None = None,
    ) -> None:
        shared = {"bias": config.mlp_bias, "lead": lead, "dtype": dtype}
        linear = layers.linear_kind(implementation, weight_dtype)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, **shared)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, **shared)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, **shared)
        self.activation: Activation = config.activation

    def __call__(
        self, x: Float[Array, "T M"], place: layers.Place, *, added: Float[Array, "T M"] | None
    ) -> Float[Array, "T M"]:
        """The MLP's output, and what is added to it."""
        gated = layers.activated(self.gate_proj(x, place), self.activation) * self.up_proj(x, place)
        return self.down_proj(gated, place, added=added)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each added to the stream, with norms before, behind or around them.

    Norms have their names from the checkpoints: the one that stands behind attention in some
    families stands before the MLP in others.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        attention: Implementation,
        weight_dtype: WeightDType | None = None,
    ) -> None:
        norm = functools.partial(
            layers.RMSNorm,
            config.hidden_size,
            eps=config.rms_norm_eps,
            how=config.norm_scale,
            lead=lead,
            dtype=dtype,
        )
        places = config.norm_places
        self.input_layernorm = norm() if places != "behind" else None
        linear = {"implementation": attention, "weight_dtype": weight_dtype}
        self.self_attn = Attention(config, lead=lead, dtype=dtype, **linear)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if places == "around" else None
        self.mlp = (
            MLP(config, lead=lead, dtype=dtype, **linear)
            if config.experts is None
            else RoutedMLP(config, config.experts, lead=lead, dtype=dtype)
        )
        self.post_feedforward_layernorm = norm() if places != "before" else None
        self.norms_behind = places != "before"
        self.multiplier = config.residual_multiplier

    def __call__(
        self,
        x: Float[Array, "T M"],
        attend: Callable[[Array, Array, Array], tuple[Array, Any]],
        *,
        place: layers.Place,
        rotary: tuple[Float[Array, "T R2"], Float[Array, "T R2"]],
    ) -> tuple[Float[Array, "T M"], Any]:
        """The stream behind this layer, and what attention gave beside its result."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        q, k, v = self.self_attn.project(normed, place, rotary)
        attended, carried = attend(q, k, v)
        flat = attended.reshape(x.shape[0], -1)
        project = functools.partial(self.self_attn.o_proj, flat, place)
        if not self.norms_behind:
            x = self._added(x, project, None)
            feed = functools.partial(self.mlp, self.post_attention_layernorm(x), place)
            return self._added(x, feed, None), carried
        x = self._added(x, project, self.post_attention_layernorm)
        before = self.pre_feedforward_layernorm
        feed = functools.partial(self.mlp, x if before is None else before(x), place)
        return self._added(x, feed, self.post_feedforward_layernorm), carried

    def _added(
        self,
        stream: Float[Array, "T M"],
        branch: Callable[..., Array],
        norm: layers.RMSNorm | None,
    ) -> Float[Array, "T M"]:
        """The stream with a branch's output added, as it is written if nothing comes between."""
        if norm is None and self.multiplier == 1.0:
            return branch(added=stream)
        output = branch(added=None)
        output = output if norm is None else norm(output)
        return stream + layers.scaled(output, self.multiplier)


class Llama(nnx.Module):
    """Embedding, decoder layers, final norm, output head.

    Args:
        config: The model's shape.
        dtype: Of weights and activations.
        layer_loop: "scan" stacks the layers' weights, "unrolled" keeps a list.
        attention: Who computes attention.
        weight_dtype: What the layers' linear maps are quantised to; None for `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        layer_loop: LayerLoop,
        attention: Implementation = "xla",
        weight_dtype: WeightDType | None = None,
    ) -> None:
        if weight_dtype is not None and config.experts is not None:
            raise ValueError("routed experts have no maps of few bits")
        if attention == "llvm" and config.experts is not None:
            raise ValueError("routed experts have no kernels for CPUs; use xla")
        if attention == "llvm" and layer_loop != "scan":
            raise ValueError("the kernels for CPUs read the panels of all layers; use scan")
        self.config = config
        self.dtype = dtype
        self.attention: Implementation = attention
        self.weight_dtype: WeightDType | None = weight_dtype
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(jnp.zeros(vocabulary, dtype))
        layer = functools.partial(
            DecoderLayer, config, dtype=dtype, attention=attention, weight_dtype=weight_dtype
        )
        self.layers = (
            layer(lead=(config.num_layers,))
            if layer_loop == "scan"
            else nnx.List([layer(lead=()) for _ in range(config.num_layers)])
        )
        self.norm = layers.RMSNorm(
            config.hidden_size,
            eps=config.rms_norm_eps,
            how=config.norm_scale,
            lead=(),
            dtype=dtype,
        )
        # Row per token, as the embedding: a tied head is the embedding itself.
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nnx.Param(jnp.zeros(vocabulary, dtype))
        self.adapter_names: tuple[str, ...] = ()
        """The adapters that `model.adapters` put into it: number 1 and so on."""

    def __call__(
        self,
        pool: KVPool,
        token_ids: Int[AnyArray, " T"],
        positions: Int[AnyArray, " T"],
        *,
        batch: AttentionBatch,
        adapters: Int[AnyArray, " T"] | None = None,
    ) -> tuple[Float[Array, "T M"], KVPool]:
        """The stream behind the last layer, for every token; the pool with the tokens in it."""
        config = self.config
        attend = functools.partial(
            attention_module.write_and_attend,
            batch=batch,
            scores=Scores(config.score_scale, config.score_cap, self.attention),
        )
        return self.stream(
            token_ids,
            positions,
            attend=attend,
            carried=pool,
            num_tokens=batch.num_tokens,
            adapters=adapters,
        )

    def stream(
        self,
        token_ids: Int[AnyArray, " T"],
        positions: Int[AnyArray, " T"],
        *,
        attend: Attend,
        carried: Any,  # noqa: ANN401 - what `attend` wants
        num_tokens: Int[AnyArray, ""],
        adapters: Int[AnyArray, " T"] | None = None,
    ) -> tuple[Float[Array, "T M"], Any]:
        """The stream behind the last layer, and what attention carried through the layers.

        Args:
            token_ids: All tokens.
            positions: Their places in their sequences.
            attend: Attention of a layer.
            carried: What it is given in the first one.
            num_tokens: The first tokens; what becomes of the others does not matter.
            adapters: The number of each token's adapter, 0 for none; None in a model without.
        """
        x = self.embed_tokens[...][token_ids]
        if self.config.embedding_multiplier != 1.0:
            x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        rotary = layers.rotary_tables(positions, self.config)
        windows = jnp.asarray([window or ALL_KEYS for window in self.config.windows], jnp.int32)

        def through(layer, x, carried, index, window, tables):
            place = layers.Place(index, num_tokens, adapters)
            bound = functools.partial(attend, carried, layer=index, window=window)
            return layer(x, bound, place=place, rotary=tables)

        if not isinstance(self.layers, DecoderLayer):
            for index, layer in enumerate(self.layers):
                number = jnp.int32(index)
                x, carried = through(layer, x, carried, number, windows[index], rotary.of(index))
            return x, carried
        # The pool is carried, never scanned over: as xs and ys it would be copied whole.
        # Panels are not either: the kernel that reads them finds the layer's by itself.
        graph, panels, stacked = nnx.split(self.layers, layers.Panels, ...)

        def body(carry, weights):
            carried, x, index = carry
            layer = nnx.merge(graph, panels, weights)
            x, carried = through(layer, x, carried, index, windows[index], rotary.of(index))
            return (carried, x, index + 1), None

        (carried, x, _), _ = jax.lax.scan(body, (carried, x, jnp.int32(0)), stacked)
        return x, carried

    def logits(
        self, stream: Float[Array, "R M"], num_rows: Int[AnyArray, ""]
    ) -> Float[Array, "R V"]:
        """Logits (float32) of the first rows of the stream behind the last layer.

        Those of the other rows do not matter.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        x = self.norm(stream)
        if self.attention == "llvm":
            logits = pallas_kernels.head(x, head[...], num_rows=num_rows)
        else:
            logits = jnp.einsum("rm,vm->rv", x, head[...], preferred_element_type=jnp.float32)
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        return layers.capped(logits, self.config.logit_cap)
