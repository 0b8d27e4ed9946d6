"""Fills the decoder with a checkpoint's tensors.

The only place that knows both the checkpoint's names and the module tree. Tensors are read one at
a time, so loading needs the weights themselves plus one stack of a single kind.
"""

import collections.abc
from collections.abc import Callable
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from jaxpaged.model.checkpoint import Checkpoint
from jaxpaged.model.checkpoint.tensors import check_tensors, tensor_source
from jaxpaged.model.llama import LayerLoop, Llama
from pallas_kernels import Implementation, QuantizedPanels, WeightDType, weight_format
from pallas_kernels.weight_format import PackedMatrix

_EXPERTS = ".mlp.experts."

Path = tuple[collections.abc.Hashable, ...]

Target = jax.ShapeDtypeStruct | PackedMatrix | QuantizedPanels
"""Shapes and dtypes of what a variable holds."""


def load(
    checkpoint: Checkpoint,
    *,
    dtype: jnp.dtype,
    layer_loop: LayerLoop,
    attention: Implementation = "xla",
    weight_dtype: WeightDType | None = None,
    max_model_len: int | None = None,
) -> Llama:
    """The decoder with the checkpoint's weights on the default device.

    Args:
        checkpoint: The model.
        dtype: Of weights and activations.
        layer_loop: How layers are driven.
        attention: Who computes attention.
        weight_dtype: What the layers' linear maps are quantised to, each tensor as soon as it is
            read; None for `dtype`.
        max_model_len: Most tokens of a sequence; None is what the model was trained for. Only
            rotary frequencies of some models depend on it.

    Raises:
        CheckpointError: A tensor is missing, unexpected or of another shape; names it.
    """
    config = checkpoint.config
    check_tensors(config, checkpoint.shapes(), str(checkpoint.path))
    config = config if max_model_len is None else config.for_length(max_model_len)
    graph, abstract = nnx.split(
        nnx.eval_shape(
            lambda: Llama(
                config,
                dtype=dtype,
                layer_loop=layer_loop,
                attention=attention,
                weight_dtype=weight_dtype,
            )
        )
    )
    state = nnx.to_flat_state(abstract)
    read = _stacked if layer_loop == "scan" else _single
    loaded = [
        (path, variable.replace(_value(read, checkpoint, path, variable.get_value())))
        for path, variable in state
    ]
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def _value(
    read: Callable[..., jax.Array], checkpoint: Checkpoint, path: Path, target: Target
) -> jax.Array | PackedMatrix | QuantizedPanels:
    if isinstance(target, PackedMatrix | QuantizedPanels):
        return _quantized(checkpoint, path, target)
    return read(checkpoint, path, target)


def _quantized(
    checkpoint: Checkpoint, path: Path, target: PackedMatrix | QuantizedPanels
) -> PackedMatrix | QuantizedPanels:
    """A kernel, or a stack of kernels, in few bits; one tensor is held in more at a time."""
    whole = jax.tree.map(lambda part: np.empty(part.shape, part.dtype), target)
    if isinstance(path[1], int):
        _quantize_onto(whole, ..., checkpoint, path)
    else:
        for index in range(checkpoint.config.num_layers):
            _quantize_onto(whole, index, checkpoint, ("layers", index, *path[1:]))
    return jax.tree.map(jnp.asarray, whole)


def _quantize_onto(
    whole: PackedMatrix | QuantizedPanels,
    place: int | EllipsisType,
    checkpoint: Checkpoint,
    path: Path,
) -> None:
    pack = weight_format.pack if path[-1] == "kernel" else pallas_kernels.pack_quantized
    kernel = _read(checkpoint, _tensor_name(path)).T
    packed = pack(weight_format.quantize(kernel, weight_format.weight_dtype_of(whole)))
    for stack, part in zip(jax.tree.leaves(whole), jax.tree.leaves(packed), strict=True):
        stack[place] = part


def _single(checkpoint: Checkpoint, path: Path, target: jax.ShapeDtypeStruct) -> jax.Array:
    name = _tensor_name(path)
    return jnp.asarray(_oriented(_read(checkpoint, name), path).astype(target.dtype))


def _stacked(checkpoint: Checkpoint, path: Path, target: jax.ShapeDtypeStruct) -> jax.Array:
    if path[0] != "layers":
        return _single(checkpoint, path, target)
    stack = np.empty(target.shape, target.dtype)
    for index in range(target.shape[0]):
        name = _tensor_name(("layers", index, *path[1:]))
        stack[index] = _oriented(_read(checkpoint, name), path)
    return jnp.asarray(stack)


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor of the decoder, cut out of the one that holds it or put together from experts."""
    experts = checkpoint.config.experts
    if experts is not None and _EXPERTS in name:
        names = (name.replace(_EXPERTS, f"{_EXPERTS}{expert}.") for expert in range(experts.count))
        return np.stack([_read_one(checkpoint, one) for one in names])
    return _read_one(checkpoint, name)


def _read_one(checkpoint: Checkpoint, name: str) -> np.ndarray:
    source = tensor_source(checkpoint.config, name)
    return checkpoint.tensor(source.name)[source.rows]


def _oriented(tensor: np.ndarray, path: Path) -> np.ndarray:
    """Linear maps are stored `[out, in]` in checkpoints and `[in, out]` here, or in panels."""
    if path[-1] == "panels":
        return np.asarray(pallas_kernels.pack(tensor.T))
    return np.swapaxes(tensor, -1, -2) if path[-1] in ("kernel", "kernels") else tensor


def _tensor_name(path: Path) -> str:
    """The checkpoint's name: `("layers", 0, "mlp", "up_proj", "kernel")` becomes
    `model.layers.0.mlp.up_proj.weight`.
    """
    if path == ("lm_head",):
        return "lm_head.weight"
    parts = path
    leaf = "bias" if path[-1] == "bias" else "weight"
    if path[-1] in ("kernel", "kernels", "panels", "bias", "scale"):
        parts = path[:-1]
    return ".".join(["model", *map(str, parts), leaf])
