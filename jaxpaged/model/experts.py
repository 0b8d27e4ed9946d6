"""Routed experts: each token through a few of many MLPs, all of them in three grouped products.

Rows are sorted by their expert, so that one product of ragged groups serves all experts whatever
the router chose; shapes depend on nothing that a batch holds. XLA decides how it is computed: on a
CPU as one product of rows as wide as all experts together, which reads every expert's weights.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.model import layers
from jaxpaged.model.config import Activation, ModelConfig
from jaxpaged.model.config_options import RoutedExperts


class ExpertLinear(nnx.Module):
    """The linear maps of all experts, their kernels stored as `[expert, in, out]`."""

    def __init__(
        self, count: int, in_width: int, out_width: int, *, lead: tuple[int, ...], dtype: jnp.dtype
    ) -> None:
        self.kernels = nnx.Param(jnp.zeros((*lead, count, in_width, out_width), dtype))

    def __call__(self, x: Float[Array, "R I"], sizes: Int[Array, " E"]) -> Float[Array, "R O"]:
        """The rows, sorted by expert, each by its own expert's map."""
        return jax.lax.ragged_dot(x, self.kernels[...], sizes)


class ExpertStack(nnx.Module):
    """The MLPs of all experts of a layer."""

    def __init__(
        self,
        config: ModelConfig,
        experts: RoutedExperts,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
    ) -> None:
        wide, inner = config.hidden_size, config.intermediate_size
        shared = {"lead": lead, "dtype": dtype}
        self.gate_proj = ExpertLinear(experts.count, wide, inner, **shared)
        self.up_proj = ExpertLinear(experts.count, wide, inner, **shared)
        self.down_proj = ExpertLinear(experts.count, inner, wide, **shared)
        self.activation: Activation = config.activation

    def __call__(self, x: Float[Array, "R M"], sizes: Int[Array, " E"]) -> Float[Array, "R M"]:
        """The rows, sorted by expert, each through its own expert."""
        gated = layers.activated(self.gate_proj(x, sizes), self.activation)
        return self.down_proj(gated * self.up_proj(x, sizes), sizes)


class RoutedMLP(nnx.Module):
    """What stands in the place of an MLP: a router and its experts (arXiv:2401.04088)."""

    def __init__(
        self,
        config: ModelConfig,
        experts: RoutedExperts,
        *,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
    ) -> None:
        self.gate = layers.Linear(
            config.hidden_size, experts.count, bias=False, lead=lead, dtype=dtype
        )
        self.experts = ExpertStack(config, experts, lead=lead, dtype=dtype)
        self.options = experts

    def __call__(
        self, x: Float[Array, "T M"], place: layers.Place, *, added: Float[Array, "T M"] | None
    ) -> Float[Array, "T M"]:
        """What the chosen experts of each token give together, and what is added to it."""
        count, per_token = self.options.count, self.options.per_token
        probabilities = jax.nn.softmax(self.gate(x, place).astype(jnp.float32), axis=-1)
        shares, chosen = jax.lax.top_k(probabilities, per_token)
        if self.options.is_normed:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=count).astype(jnp.int32)
        sorted_rows = self.experts(x[order // per_token], sizes)
        rows = jnp.zeros_like(sorted_rows).at[order].set(sorted_rows, unique_indices=True)
        rows = rows.reshape(x.shape[0], per_token, -1).astype(jnp.float32)
        y = jnp.sum(rows * shares[:, :, None], axis=1).astype(x.dtype)
        return y if added is None else added + y
