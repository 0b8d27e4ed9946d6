"""Fills the decoder with a checkpoint's tensors.

The only place that knows both the checkpoint's names and the module tree. Tensors are read one at
a time into memory that a CPU's arrays then take over, so loading needs the weights themselves plus
one tensor.
"""

import collections.abc
import math
from collections.abc import Callable, Iterator
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from jaxpaged.model import config_stretch
from jaxpaged.model.checkpoint import Checkpoint, StackedCheckpoint
from jaxpaged.model.checkpoint.tensors import check_tensors, tensor_source
from jaxpaged.model.llama import LayerLoop, Llama
from pallas_kernels import Implementation, QuantizedPanels, WeightDType, weight_format
from pallas_kernels.weight_format import PackedMatrix

_EXPERTS = ".mlp.experts."

# Arrays that begin at a multiple of so many bytes become a CPU's arrays without being copied.
_ALIGNMENT = 64

# What a stack can be stored in; others are those of quantised tensors.
_STORED_DTYPES = {np.dtype(dtype) for dtype in (np.float32, np.float16, jnp.bfloat16)}

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
    rope: collections.abc.Mapping[str, object] | None = None,
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

        rope: Another rotation than the checkpoint's; see `config_stretch`.

    Raises:
        CheckpointError: A tensor is missing, unexpected or of another shape; names it.
    """
    config = checkpoint.config
    check_tensors(config, checkpoint.shapes(), str(checkpoint.path))
    config = config_stretch.stretched(config, rope)
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
    # What is read is held twice for a moment: the largest are read while little else is held.
    loaded = {
        path: variable.replace(_value(read, checkpoint, path, variable.get_value()))
        for path, variable in sorted(state, key=_largest_first)
    }
    return nnx.merge(graph, nnx.from_flat_state([(path, loaded[path]) for path, _ in state]))


def stacks(checkpoint: Checkpoint, dtype: np.dtype | None) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values of every array of a decoder with stacked layers, one at a time.

    Args:
        checkpoint: The model.
        dtype: Of the values; None for the one they are stored in, which is bfloat16 for quantised
            ones and float32 where the tensors of a stack differ.

    Raises:
        CheckpointError: A tensor is missing, unexpected or of another shape; names it.
    """
    config = checkpoint.config
    check_tensors(config, checkpoint.shapes(), str(checkpoint.path))
    abstract = nnx.eval_shape(
        lambda: Llama(config, dtype=jnp.dtype(jnp.float32), layer_loop="scan")
    )
    for path, variable in nnx.to_flat_state(nnx.state(abstract)):
        shape = variable.get_value().shape
        wanted = dtype or _stored_dtype(checkpoint, path)
        yield stack_name(path), _host_stack(checkpoint, path, shape, wanted)


def stack_name(path: Path) -> str:
    """The name of a stored array: its place in the module tree."""
    return ".".join(map(str, path))


def _largest_first(item: tuple[Path, nnx.Variable]) -> tuple[int, str, int]:
    """By the size of a tensor: a stack is read one tensor at a time.

    Arrays of one kind follow each other, since some checkpoints store them together.
    """
    path, variable = item
    layer = next((part for part in path if isinstance(part, int)), None)
    is_stack = path[0] == "layers" and layer is None
    kind = stack_name(tuple(part for part in path if not isinstance(part, int)))
    size = sum(
        math.prod(part.shape[1:] if is_stack else part.shape)
        for part in jax.tree.leaves(variable.get_value())
    )
    return -size, kind, layer or 0


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
    return _on_device(_host_array(checkpoint, path, target.shape, target.dtype))


def _stacked(checkpoint: Checkpoint, path: Path, target: jax.ShapeDtypeStruct) -> jax.Array:
    return _on_device(_host_stack(checkpoint, path, target.shape, target.dtype))


def _host_stack(
    checkpoint: Checkpoint, path: Path, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    if path[0] != "layers":
        return _host_array(checkpoint, path, shape, dtype)
    stack = _empty(shape, dtype)
    if isinstance(checkpoint, StackedCheckpoint) and path[-1] != "panels":
        return _filled(stack, checkpoint, path)
    for index in range(shape[0]):
        name = _tensor_name(("layers", index, *path[1:]))
        stack[index] = _oriented(_read(checkpoint, name), path)
    return stack


def _host_array(
    checkpoint: Checkpoint, path: Path, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    array = _empty(shape, dtype)
    if isinstance(checkpoint, StackedCheckpoint) and path[0] != "layers":
        return _filled(array, checkpoint, path)
    array[...] = _oriented(_read(checkpoint, _tensor_name(path)), path)
    return array


def _filled(array: np.ndarray, checkpoint: StackedCheckpoint, path: Path) -> np.ndarray:
    """The array with the values that are stored as the decoder has them."""
    for part, values in checkpoint.pieces(stack_name(path)):
        array[part] = values
    return array


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def _on_device(array: np.ndarray) -> jax.Array:
    """The array on the default device, which on a CPU is the same memory: nobody may write to it
    any more."""
    return jax.block_until_ready(jax.device_put(array))


def _stored_dtype(checkpoint: Checkpoint, path: Path) -> np.dtype:
    layers = range(checkpoint.config.num_layers) if path[0] == "layers" else (None,)
    paths = (path if layer is None else ("layers", layer, *path[1:]) for layer in layers)
    names = {
        tensor_source(checkpoint.config, name).name
        for one in paths
        for name in _tensor_names(checkpoint, _tensor_name(one))
    }
    dtypes = {checkpoint.stored_dtype(name) for name in names}
    known = [dtype for dtype in dtypes if dtype is not None and dtype in _STORED_DTYPES]
    if len(known) < len(dtypes):
        return np.dtype(jnp.bfloat16)
    return known[0] if len(known) == 1 else np.dtype(np.float32)


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor of the decoder, cut out of the one that holds it or put together from experts."""
    names = _tensor_names(checkpoint, name)
    if names == [name]:
        return _read_one(checkpoint, name)
    return np.stack([_read_one(checkpoint, one) for one in names])


def _tensor_names(checkpoint: Checkpoint, name: str) -> list[str]:
    """The tensor itself, or those of all experts."""
    experts = checkpoint.config.experts
    if experts is None or _EXPERTS not in name:
        return [name]
    return [name.replace(_EXPERTS, f"{_EXPERTS}{expert}.") for expert in range(experts.count)]


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
