"""Loading takes the weights and at most one stack beside them, whatever the format."""

import json
import pathlib
import subprocess
import sys

import pytest
import tiny
import tiny_gguf

from jaxpaged import convert

MIB = 2**20

LOAD = """
import gc, json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import pallas_kernels
from flax import nnx
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint

path, dtype, attention = pathlib.Path(sys.argv[1]), jnp.dtype(sys.argv[2]), sys.argv[3]
def resident(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":"))
jnp.zeros((8, 8)).block_until_ready()
# What the packages take that a format or the kernels need is not asked for here.
if attention == "llvm":
    pallas_kernels.pack(np.zeros((8, 8), np.float32))
open_checkpoint(path).tensor("model.norm.weight")
gc.collect()
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
model = weights.load(
    open_checkpoint(path), dtype=dtype, layer_loop="scan", attention=attention
)
sizes = [array.nbytes for array in jax.tree.leaves(nnx.state(model))]
peak = resident("VmHWM") - before
print(json.dumps({"weights": sum(sizes), "stack": max(sizes), "peak": peak}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, pathlib.Path]:
    """One model of 61 million weights in every format."""
    place = tmp_path_factory.mktemp("models")
    shape = {"hidden": 512, "layers": 12, "intermediate": 2560, "vocab_size": 8192, "tie": True}
    single = tiny.write_tiny_llama(place / "single", **shape)
    sharded = tiny.write_tiny_llama(place / "sharded", **shape, dtype="bfloat16", num_shards=4)
    tokenizer = json.loads((single / "tokenizer.json").read_text())
    metadata = tiny_gguf.llama_metadata(single)
    metadata |= tiny_gguf.byte_level_metadata(tokenizer, shape["vocab_size"])
    tensors = tiny_gguf.llama_tensors(single)
    return {
        "single": single,
        "sharded": sharded,
        "gguf": tiny_gguf.write_gguf(place / "model.gguf", metadata, tensors),
        "orbax": convert.convert(str(sharded), place / "orbax"),
    }


@pytest.mark.parametrize(
    ("name", "dtype", "attention"),
    [
        ("single", "float32", "xla"),
        ("single", "bfloat16", "xla"),
        ("sharded", "float32", "llvm"),
        ("gguf", "float32", "llvm"),
        ("gguf", "bfloat16", "xla"),
        ("orbax", "float32", "xla"),
        ("orbax", "bfloat16", "xla"),
        ("orbax", "float32", "llvm"),
    ],
)
def test_peak_is_the_weights_and_one_stack(models, name, dtype, attention):
    command = [sys.executable, "-c", LOAD, str(models[name]), dtype, attention]
    root = pathlib.Path(convert.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    took = json.loads(done.stdout)
    # Beside the arrays: pages of files, and what Orbax holds of a piece or leaves to the allocator.
    allowed = took["weights"] + took["stack"] + 64 * MIB
    assert took["weights"] <= took["peak"] <= allowed, took
