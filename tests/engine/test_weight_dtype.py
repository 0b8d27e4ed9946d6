"""Weights quantised when they are loaded: what an engine makes of them, and what it holds."""

import dataclasses
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from tiny import write_tiny_llama, write_weights
from tiny_gguf import llama_metadata, llama_tensors, write_gguf

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.config import Attention, DType, WeightDType
from jaxpaged.engine import limits
from jaxpaged.engine.memory import check_weights
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.model import unpaged, weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.folder import FolderCheckpoint
from jaxpaged.model.config_options import RoutedExperts
from jaxpaged.model.layers import Panels
from jaxpaged.model.llama import Llama
from pallas_kernels import weight_format

PROMPTS = [[1, 40, 41, 42], [1, *range(50, 90)], [1]]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A model whose widths are no multiples of groups and panels."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("models") / "model",
        hidden=72,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=100,
        attention_bias=True,
        mlp_bias=True,
    )


def dequantized(folder: pathlib.Path, weight_dtype: WeightDType) -> pathlib.Path:
    """A model beside it, of the weights as they are read when they were quantised."""
    other = folder.parent / f"{weight_dtype}_read"
    if other.exists():
        return other
    other.mkdir()
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (other / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            quantized = weight_format.quantize(tensor.T, weight_dtype)
            tensors[name] = np.ascontiguousarray(weight_format.dequantize(quantized).T)
    write_weights(other, tensors)
    return other


def engine_of(folder: pathlib.Path, dtype: DType = "float32", **config) -> Engine:
    shared = {"dtype": dtype, "max_model_len": 128, "max_num_seqs": 4, "num_blocks": 32}
    return Engine.load(folder, EngineConfig(**shared, **config))


def answers(engine: Engine) -> tuple[list[tuple[int, ...]], np.ndarray]:
    completions = engine.generate(PROMPTS, PARAMS)
    logprobs = [token.logprob for completion in completions for token in completion.logprobs or ()]
    return [completion.token_ids for completion in completions], np.array(logprobs)


@pytest.mark.parametrize(
    ("weight_dtype", "attention"), [("int8", "llvm"), ("int4", "llvm"), ("int8", "xla")]
)
def test_an_engine_gives_what_one_of_the_dequantised_weights_gives(
    folder: pathlib.Path, weight_dtype: WeightDType, attention: Attention
) -> None:
    engine = engine_of(folder, weight_dtype=weight_dtype, attention=attention)
    tokens, logprobs = answers(engine)
    expected_tokens, expected = answers(
        engine_of(dequantized(folder, weight_dtype), attention=attention)
    )
    assert tokens == expected_tokens
    if attention == "llvm":
        np.testing.assert_array_equal(logprobs, expected)
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    assert engine.stats.weight_dtype == weight_dtype
    assert f"float32 with linear maps in {weight_dtype}, attention by" in engine.description


_logits = jax.jit(unpaged.logits, static_argnums=0)


def logits_of(model) -> np.ndarray:
    ids = np.array(PROMPTS[1], np.int32)
    with jax.default_matmul_precision("highest"):
        return np.asarray(_logits(*nnx.split(model), ids, np.arange(len(ids))), np.float32)


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_bfloat16_and_a_list_of_layers_do_the_same(
    folder: pathlib.Path, weight_dtype: WeightDType
) -> None:
    expected = logits_of(
        weights.load(
            open_checkpoint(dequantized(folder, weight_dtype)),
            dtype=jnp.dtype(jnp.float32),
            layer_loop="unrolled",
        )
    )
    for dtype, tolerance in ((jnp.float32, 1e-4), (jnp.bfloat16, 0.15)):
        found = [
            logits_of(
                weights.load(
                    open_checkpoint(folder),
                    dtype=jnp.dtype(dtype),
                    layer_loop=layer_loop,
                    weight_dtype=weight_dtype,
                )
            )
            for layer_loop in ("scan", "unrolled")
        ]
        for logits in found:
            np.testing.assert_allclose(logits, expected, atol=tolerance)


def test_the_kernel_for_gpus_serves_an_engine(folder: pathlib.Path) -> None:
    config = {"weight_dtype": "int8", "prefix_cache": False}
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    prompt = [PROMPTS[0]]
    found = engine_of(folder, attention="triton", **config).generate(prompt, params)
    expected = engine_of(folder, attention="xla", **config).generate(prompt, params)
    assert found[0].token_ids == expected[0].token_ids


def test_a_gguf_file_is_quantised_too(tmp_path) -> None:
    source = write_tiny_llama(tmp_path / "source")
    path = write_gguf(tmp_path / "model.gguf", llama_metadata(source), llama_tensors(source))
    model = weights.load(
        open_checkpoint(path),
        dtype=jnp.dtype(jnp.float32),
        layer_loop="scan",
        weight_dtype="int8",
    )
    plain = weights.load(open_checkpoint(path), dtype=jnp.dtype(jnp.float32), layer_loop="scan")
    assert np.mean(np.abs(logits_of(model) - logits_of(plain))) < 0.1


class Watched(FolderCheckpoint):
    """A checkpoint that knows which of its tensors somebody still holds."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self.most_alive = 0
        self._read: list[weakref.ref[np.ndarray]] = []

    def tensor(self, name: str) -> np.ndarray:
        tensor = np.array(super().tensor(name))
        self._read.append(weakref.ref(tensor))
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self._read))
        return tensor


@pytest.mark.parametrize("attention", ["llvm", "xla"])
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_one_tensor_at_a_time_is_held_while_loading(
    folder: pathlib.Path, attention, weight_dtype: WeightDType
) -> None:
    watched = Watched(folder)
    weights.load(
        watched,
        dtype=jnp.dtype(jnp.float32),
        layer_loop="scan",
        attention=attention,
        weight_dtype=weight_dtype,
    )
    assert watched.most_alive == 1


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_linear_maps_are_held_in_few_bits_and_nothing_else_is(
    folder: pathlib.Path, weight_dtype: WeightDType
) -> None:
    model = weights.load(
        open_checkpoint(folder),
        dtype=jnp.dtype(jnp.float32),
        layer_loop="scan",
        attention="llvm",
        weight_dtype=weight_dtype,
    )
    narrow, others = nnx.state(model, Panels, ...)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(narrow)}
    expected = {"int8": {"int8", "float32"}, "int4": {"uint8", "bfloat16"}}[weight_dtype]
    assert {dtype.name for dtype in dtypes} == expected
    assert {leaf.dtype for leaf in jax.tree.leaves(others)} == {jnp.dtype(jnp.float32)}
    # q, k, v, o, gate, up, down.
    assert len(jax.tree.leaves(narrow)) == 7 * len(narrow_parts(weight_dtype))


def narrow_parts(weight_dtype: WeightDType) -> tuple[str, ...]:
    return ("values", "scales") if weight_dtype == "int8" else ("values", "scales", "minimums")


def test_weights_that_fit_only_in_few_bits_are_let_through() -> None:
    shapes = {
        "model.embed_tokens.weight": (1000, 64),
        "model.layers.0.mlp.up_proj.weight": (4096, 1024),
        "model.layers.0.mlp.up_proj.bias": (4096,),
    }
    rest = (1000 * 64 + 4096) * 4
    needed = {"int8": 4096 * (1024 + 4), "int4": 4096 * (1024 // 2 + 32 * 4)}
    for weight_dtype, num_bytes in needed.items():
        config = {"dtype": "float32", "weight_dtype": weight_dtype}
        check_weights(shapes, available=num_bytes + rest, **config)
        message = f"the weights in float32 with linear maps in {weight_dtype}: .* needed"
        with pytest.raises(CapacityError, match=message):
            check_weights(shapes, available=num_bytes + rest - 1, **config)
    with pytest.raises(CapacityError, match=r"engine\.weight_dtype: int8, which needs 4\.3 MiB"):
        check_weights(shapes, dtype="float32", available=2**20)


def test_routed_experts_are_refused_by_name(folder: pathlib.Path) -> None:
    experts = RoutedExperts(count=4, per_token=2, is_normed=True)
    config = dataclasses.replace(open_checkpoint(folder).config, experts=experts)
    with pytest.raises(ConfigError, match=r"engine\.weight_dtype is int8.* routed experts"):
        limits.weight_dtype(EngineConfig(weight_dtype="int8"), config)
    assert limits.weight_dtype(EngineConfig(), config) is None
    with pytest.raises(ValueError, match="routed experts have no maps of few bits"):
        Llama(config, dtype=jnp.dtype(jnp.float32), layer_loop="scan", weight_dtype="int4")
