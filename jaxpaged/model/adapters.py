"""LoRA adapters in the decoder: rows of several of them, and of none, in one batch.

The factors of all adapters of a linear map stand side by side:

    x A   | adapter 1 | adapter 2 | ... | padding |     what is not the row's own adapter's
    (x A) masked, times B                               becomes zero here

Two narrow products for all rows, whatever adapters are in the batch: no weights are gathered for
a token, no shape depends on who is there, and what is not a row's own comes to exactly nothing.
(arXiv:2106.09685 is the method.)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels
from jaxpaged.model import layers
from jaxpaged.model.checkpoint.adapter import Adapter
from jaxpaged.model.checkpoint.tensors import Shape, linear_maps
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.llama import DecoderLayer, Llama

RANK_TILE = 16
"""Ranks of all adapters of a map are filled up to a multiple of it: narrower products, of 4 and 8
columns, were measured to give a row other bits among 64 rows than among more (JAX 0.12, CPU)."""

_NOBODY = -1


class AdaptedLinear(nnx.Module):
    """A linear map of any kind, changed for rows that have an adapter.

    Args:
        base: The map as the model has it.
        down: The first factors of all adapters.
        up: The second ones, their scales in them.
        owners: For each column between the two, the number of its adapter, from 1; below 0 for
            padding.
    """

    def __init__(
        self,
        base: nnx.Module,
        down: layers.Linear | layers.PackedLinear,
        up: layers.Linear | layers.PackedLinear,
        *,
        owners: tuple[int, ...],
    ) -> None:
        self.base = base
        self.down = down
        self.up = up
        self.owners = owners

    def __call__(
        self, x: Float[Array, "T I"], place: layers.Place, added: Float[Array, "T O"] | None = None
    ) -> Float[Array, "T O"]:
        """The mapped rows, and what is added to them."""
        assert place.adapters is not None, "a model with adapters is told those of its tokens"
        y = self.base(x, place, added=added)  # pyright: ignore[reportCallIssue]  (any linear map)
        numbers = jnp.asarray(place.adapters)
        is_own = jnp.asarray(self.owners, jnp.int32)[None, :] == numbers[:, None]
        inner = self.down(x, place)
        # Chosen, not multiplied: another adapter's infinity would be NaN times zero.
        own = jnp.where(is_own, inner, jnp.zeros_like(inner))
        changed = self.up(own, place, added=y)
        # Rows without an adapter stay the bits they are, minus zeros included.
        return jnp.where(jnp.any(is_own, axis=1, keepdims=True), changed, y)


def attach(model: Llama, adapters: Mapping[str, Adapter]) -> None:
    """Makes room for adapters in a decoder, which may be one of shapes only."""
    model.adapter_names = tuple(adapters)
    for name, owners in _owners(model.config, list(adapters.values())).items():
        for module, leaf, _ in _places(model, name):
            setattr(module, leaf, _adapted(model, getattr(module, leaf), name, owners))


def load(model: Llama, adapters: Mapping[str, Adapter]) -> None:
    """Puts adapters with their weights into a decoder, in its dtype.

    The factors of one linear map are read at a time.

    Raises:
        CheckpointError: A tensor cannot be read, or holds a number that is not finite.
    """
    model.adapter_names = tuple(adapters)
    for name, owners in _owners(model.config, list(adapters.values())).items():
        for module, leaf, numbers in _places(model, name):
            adapted = _adapted(model, getattr(module, leaf), name, owners)
            a, b = _factors(list(adapters.values()), name, owners, numbers, model)
            # A scan's stack has a leading axis, a single layer of a loop has none.
            for linear, stack in ((adapted.down, a), (adapted.up, b)):
                _fill(linear, stack if isinstance(model.layers, DecoderLayer) else stack[0])
            setattr(module, leaf, adapted)


def shapes(config: ModelConfig, adapters: Mapping[str, Adapter]) -> dict[str, Shape]:
    """Name to shape of the arrays that adapters take on the device."""
    sizes, found = linear_maps(config), {}
    for name, owners in _owners(config, list(adapters.values())).items():
        width, inner = sizes[name], len(owners)
        found[f"adapters.{name}.down"] = (config.num_layers, width[1], inner)
        found[f"adapters.{name}.up"] = (config.num_layers, inner, width[0])
    return found


def _owners(config: ModelConfig, adapters: Sequence[Adapter]) -> dict[str, tuple[int, ...]]:
    """By map that any adapter changes, the number of the adapter each inner column is of."""
    found = {}
    for name in linear_maps(config):
        owners = [
            number
            for number, adapter in enumerate(adapters, start=1)
            for _ in range(adapter.ranks.get(name, 0))
        ]
        if owners:
            found[name] = (*owners, *[_NOBODY] * (-len(owners) % RANK_TILE))
    return found


def _places(model: Llama, name: str) -> Iterator[tuple[nnx.Module, str, range]]:
    """Where a map is: the module that holds it, its name there, and the layers it is of."""
    parent, leaf = name.split(".")
    if isinstance(model.layers, DecoderLayer):
        yield getattr(model.layers, parent), leaf, range(model.config.num_layers)
        return
    for index, layer in enumerate(model.layers):
        yield getattr(layer, parent), leaf, range(index, index + 1)


def _adapted(model: Llama, base: nnx.Module, name: str, owners: tuple[int, ...]) -> AdaptedLinear:
    rows, columns = linear_maps(model.config)[name]
    is_stacked = isinstance(model.layers, DecoderLayer)
    lead = (model.config.num_layers,) if is_stacked else ()
    # In full, whatever the kind of the map itself: they are small.
    linear = layers.PackedLinear if model.attention == "llvm" else layers.Linear
    shared = {"bias": False, "lead": lead, "dtype": model.dtype}
    return AdaptedLinear(
        base,
        linear(columns, len(owners), **shared),
        linear(len(owners), rows, **shared),
        owners=owners,
    )


def _factors(
    adapters: Sequence[Adapter],
    name: str,
    owners: tuple[int, ...],
    numbers: range,
    model: Llama,
) -> tuple[np.ndarray, np.ndarray]:
    """The stacks of both factors, `[layers, in, inner]` and `[layers, inner, out]`."""
    rows, columns = linear_maps(model.config)[name]
    a = np.zeros((len(numbers), columns, len(owners)), model.dtype)
    b = np.zeros((len(numbers), len(owners), rows), model.dtype)
    for at, layer in enumerate(numbers):
        for number, adapter in enumerate(adapters, start=1):
            factors = adapter.factors(layer, name)
            if factors is None:
                continue
            first, rank = owners.index(number), len(factors.a)
            a[at, :, first : first + rank] = factors.a.T.astype(model.dtype)
            b[at, first : first + rank] = factors.b.T.astype(model.dtype)
    return a, b


def _fill(linear: layers.Linear | layers.PackedLinear, stack: np.ndarray) -> None:
    if isinstance(linear, layers.PackedLinear):
        linear.panels = layers.Panels(jnp.asarray(pallas_kernels.pack(stack)))
    else:
        linear.kernel = nnx.Param(cast(Array, jnp.asarray(stack)))
