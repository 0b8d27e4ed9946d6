"""What quantising the weights of linear maps costs in quality and saves in memory.

Regime: the packaged model on real English text that ships with Python, the language reference in
`pydoc_data.topics` (its hash is printed: it differs a little between Python versions). Per format:

- perplexity over windows of the text, spread evenly over it, by the decoder without a pool, and
  against the weights in float32: the mean Kullback-Leibler divergence of a token's distribution and
  how often the likeliest token is the same;
- greedy continuations of prompts from the same text by the engine: the mean number of equal tokens
  before the first difference, the share of all tokens that they make, and how many continuations
  are equal to the end;
- bytes of the linear maps and of all weights as the engine holds them.

The packaged model was of 4 bits before (Q4_1: a scale and a minimum for 32 weights), which int4
reproduces. What int4 does to other models shows the row "int4, moved": its groups begin in the
middle of those that the file has.

    python scripts/weight_quality.py
    python scripts/weight_quality.py --windows 4 --continuations 8

Baseline: float32 in the same run; bfloat16 is there for comparison. Prints a table; the last line
is one JSON object.
"""

import collections.abc
import dataclasses
import functools
import hashlib
import json
import math
import statistics

import bench_environment
import click
import jax
import jax.numpy as jnp
import numpy as np
import quality_text
from flax import nnx
from quality_text import Ids
from rich.console import Console
from rich.table import Table

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.engine import attention, device
from jaxpaged.model import unpaged, weights
from jaxpaged.model.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.model.llama import Llama
from jaxpaged.model.source import locate
from pallas_kernels import WeightDType, weight_format

ROWS = 256
"""Tokens whose distributions are held at once."""


class Moved:
    """A checkpoint whose linear maps went through int4, in groups that begin half a group later."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self.path = checkpoint.path
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> object:
        return getattr(self._checkpoint, name)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor; a linear map as int4 would have it read."""
        tensor = self._checkpoint.tensor(name)
        if not name.endswith("_proj.weight"):
            return tensor
        half = weight_format.GROUP // 2
        moved = weight_format.quantize(np.roll(tensor.T, half, axis=0), "int4")
        return np.roll(np.asarray(weight_format.dequantize(moved)), -half, axis=0).T


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights are held.

    Attributes:
        name: Tells it from the others.
        dtype: Of weights and activations.
        weight_dtype: Of linear maps.
        is_moved: See `Moved`.
    """

    name: str
    dtype: str = "float32"
    weight_dtype: WeightDType | None = None
    is_moved: bool = False


FORMATS = (
    Format(name="float32"),
    Format(name="bfloat16", dtype="bfloat16"),
    Format(name="int8", weight_dtype="int8"),
    Format(name="int4", weight_dtype="int4"),
    Format(name="int4, moved", is_moved=True),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A format against float32.

    Attributes:
        name: The format's.
        perplexity: Over all windows.
        divergence: Of a token's distribution from that of float32, in nats.
        top_agreement: Share of tokens whose likeliest successor is the same.
        mean_prefix: Mean number of equal tokens before a continuation first differs.
        agreement: The same as a share of all tokens.
        equal_continuations: Share of continuations that are equal to the end.
        map_bytes: Of the linear maps; None where they are only read as if they were so.
        weight_bytes: Of all weights.
    """

    name: str
    perplexity: float
    divergence: float
    top_agreement: float
    mean_prefix: float
    agreement: float
    equal_continuations: float
    map_bytes: int | None
    weight_bytes: int | None


_logits = jax.jit(unpaged.logits, static_argnums=0)


@jax.jit
def _compare(mine: jax.Array, theirs: jax.Array, targets: jax.Array) -> jax.Array:
    """Sums over the rows: of log-probabilities, of divergences, of equal likeliest tokens."""
    mine, theirs = jax.nn.log_softmax(mine), jax.nn.log_softmax(theirs)
    own = jnp.take_along_axis(mine, targets[:, None], axis=1)
    divergence = jnp.sum(jnp.exp(theirs) * (theirs - mine))
    equal = jnp.sum(jnp.argmax(mine, axis=1) == jnp.argmax(theirs, axis=1))
    return jnp.stack([jnp.sum(own), divergence, equal.astype(jnp.float32)])


def load(checkpoint: Checkpoint, form: Format) -> Llama:
    """The model in a format, as an engine would hold it here."""
    here = device.here()
    choice = attention.choose(config_of(form, 2), checkpoint.config, device=here)
    return weights.load(
        Moved(checkpoint) if form.is_moved else checkpoint,  # type: ignore[arg-type]
        dtype=jnp.dtype(form.dtype),
        layer_loop="scan" if here.is_cpu else "unrolled",
        attention=choice.implementation,
        weight_dtype=form.weight_dtype,
    )


def config_of(form: Format, longest: int) -> EngineConfig:
    """The engine's settings, for sequences of so many tokens."""
    lanes = 8
    return EngineConfig(
        dtype=form.dtype,  # type: ignore[arg-type]
        weight_dtype=form.weight_dtype,
        max_model_len=longest,
        max_num_seqs=lanes,
        block_size=min(16, longest),
        num_blocks=lanes * (longest // 16 + 2),
    )


def judge(model: Llama, baseline: Llama, windows: list[Ids]) -> tuple[float, float, float]:
    """Perplexity over the windows, mean divergence, and share of equal likeliest tokens."""
    parts, others = nnx.split(model), nnx.split(baseline)
    sums, count = np.zeros(3), 0
    for window in windows:
        ids = np.array(window, np.int32)
        for first in range(0, len(ids) - 1, ROWS):
            # The last token of a window has no successor.
            rows = np.arange(first, min(first + ROWS, len(ids) - 1), dtype=np.int32)
            mine, theirs = (_logits(*part, ids, rows) for part in (parts, others))
            sums += np.asarray(_compare(mine, theirs, ids[rows + 1]), np.float64)
            count += len(rows)
    return math.exp(-sums[0] / count), sums[1] / count, sums[2] / count


def continuations(engine: Engine, prompts: list[Ids], new_tokens: int) -> list[tuple[int, ...]]:
    """Greedy continuations of all prompts."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return [completion.token_ids for completion in engine.generate(prompts, params)]


def map_bytes(model: Llama) -> int:
    """Bytes of the weights of linear maps in layers."""
    kinds = ("kernel", "panels")
    leaves = [
        leaf
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if path[-1] in kinds
        for leaf in jax.tree.leaves(variable)
    ]
    return _num_bytes(leaves)


def _num_bytes(leaves: collections.abc.Iterable[jax.Array]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def print_rows(rows: list[Row], new_tokens: int) -> None:
    """Print the table."""
    table = Table(title="weights of linear maps against float32")
    table.add_column("weights")
    names = ("perplexity", "divergence", "same likeliest", f"equal of {new_tokens}", "agreement")
    for name in (*names, "all equal", "maps MiB", "all MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.perplexity:.3f}",
            f"{row.divergence:.5f}",
            f"{row.top_agreement:.1%}",
            f"{row.mean_prefix:.1f}",
            f"{row.agreement:.1%}",
            f"{row.equal_continuations:.0%}",
            _mebibytes(row.map_bytes),
            _mebibytes(row.weight_bytes),
        )
    Console(width=120).print(table)


def _mebibytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:.1f}"


@click.command()
@click.option("--model", default=quality_text.PACKAGED_MODEL, show_default=True)
@click.option("--windows", type=click.IntRange(1), default=16, show_default=True)
@click.option("--window-tokens", type=click.IntRange(2), default=513, show_default=True)
@click.option("--continuations", "count", type=click.IntRange(1), default=32, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
def main(
    model: str,
    windows: int,
    window_tokens: int,
    count: int,
    prompt_tokens: int,
    new_tokens: int,
) -> None:
    """Measure what quantised weights cost and save.

    Example: python scripts/weight_quality.py --windows 4 --continuations 8
    """
    environment = bench_environment.describe()
    checkpoint = open_checkpoint(locate(model))
    tokenizer = checkpoint.tokenizer()
    text = quality_text.real_text()
    ids = tokenizer.encode_text(text)
    pieces = quality_text.spread(ids, windows, window_tokens)
    prompts = quality_text.spread(ids, count, prompt_tokens)
    baseline = load(checkpoint, FORMATS[0])
    continue_all = functools.partial(continuations, prompts=prompts, new_tokens=new_tokens)
    expected: list[tuple[int, ...]] = []
    rows = []
    for form in FORMATS:
        loaded = load(checkpoint, form)
        perplexity, divergence, top_agreement = judge(loaded, baseline, pieces)
        config = config_of(form, prompt_tokens + new_tokens)
        found = continue_all(Engine(loaded, tokenizer, config))
        expected = expected or found
        pairs = list(zip(found, expected, strict=True))
        prefix = statistics.fmean(quality_text.common_prefix(*pair) for pair in pairs)
        rows.append(
            Row(
                name=form.name,
                perplexity=perplexity,
                divergence=divergence,
                top_agreement=top_agreement,
                mean_prefix=prefix,
                agreement=prefix / new_tokens,
                equal_continuations=statistics.fmean(mine == theirs for mine, theirs in pairs),
                map_bytes=None if form.is_moved else map_bytes(loaded),
                weight_bytes=None
                if form.is_moved
                else _num_bytes(jax.tree.leaves(nnx.state(loaded))),
            )
        )
    print_rows(rows, new_tokens)
    settings = {
        "model": model,
        "text": "pydoc_data.topics",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_tokens": len(ids),
        "windows": windows,
        "window_tokens": window_tokens,
        "continuations": count,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
    }
    figures = [dataclasses.asdict(row) for row in rows]
    print(json.dumps({"benchmark": "weight_quality", **environment, **settings, "rows": figures}))


if __name__ == "__main__":
    main()
