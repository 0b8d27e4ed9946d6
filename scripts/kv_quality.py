"""What storing keys and values in fewer bits costs in quality and buys in room.

Regime: the packaged model on real English text that ships with Python, the language reference in
`pydoc_data.topics` (its hash is printed: it differs a little between Python versions). Per KV
dtype:

- perplexity over windows of the text, spread evenly over it, by `prompt_logprobs`; with it the
  change of the mean log-probability per token against float32 and its standard error over the
  windows, which are the same for every dtype;
- greedy continuations of prompts from the same text, compared with those of float32: the mean
  number of equal tokens before the first difference, the share of all tokens that they make, and
  how many continuations are equal to the end;
- bytes of a token's keys and values over all layers, scales included, and the tokens that fit into
  one GiB of pool, in whole blocks.

    python scripts/kv_quality.py                                      # about 17,000 tokens a dtype
    python scripts/kv_quality.py --kv-dtype int8 --windows 4 --continuations 8

Baseline: a float32 pool in the same run. Weights and activations are the same for all. Prints a
table; the last line is one JSON object.
"""

import dataclasses
import hashlib
import json
import math
import statistics
import typing

import bench_environment
import click
import quality_text
from quality_text import Ids
from rich.console import Console
from rich.table import Table

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.config import KVDType
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.source import locate

KV_DTYPES: tuple[KVDType, ...] = typing.get_args(KVDType)
BLOCK_SIZE = 16
GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every dtype is given.

    Attributes:
        windows: Token ids whose log-probabilities are taken, all of one length.
        prompts: Token ids that are continued.
        new_tokens: Tokens of a continuation.
    """

    windows: list[Ids]
    prompts: list[Ids]
    new_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the task needs."""
        with_answer = [len(prompt) + self.new_tokens for prompt in self.prompts]
        return max(with_answer + [len(window) + 1 for window in self.windows])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one dtype gave.

    Attributes:
        window_logprobs: Mean log-probability of a token, by window.
        continuations: Greedy tokens, by prompt.
        bytes_per_token: Keys and values of a token over all layers.
    """

    window_logprobs: list[float]
    continuations: list[tuple[int, ...]]
    bytes_per_token: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One dtype against float32.

    Attributes:
        kv_dtype: How keys and values are stored.
        perplexity: Over all windows.
        logprob_change: Mean change of a token's log-probability; negative is worse.
        logprob_change_error: Its standard error, over the windows.
        mean_prefix: Mean number of equal tokens before a continuation first differs.
        agreement: The same as a share of all tokens.
        equal_continuations: Share of continuations that are equal to the end.
        bytes_per_token: Keys and values of a token over all layers.
        tokens_per_gib: Tokens that fit into one GiB.
        capacity_ratio: The same against float32.
    """

    kv_dtype: str
    perplexity: float
    logprob_change: float
    logprob_change_error: float
    mean_prefix: float
    agreement: float
    equal_continuations: float
    bytes_per_token: int
    tokens_per_gib: int
    capacity_ratio: float


def measure(model: str, task: Task, kv_dtype: KVDType) -> Measured:
    """The task's results with keys and values stored as `kv_dtype`."""
    lanes = 8
    engine = Engine.load(
        model,
        EngineConfig(
            kv_dtype=kv_dtype,
            max_model_len=task.longest,
            max_num_seqs=lanes,
            block_size=BLOCK_SIZE,
            num_blocks=lanes * (task.longest // BLOCK_SIZE + 2),
        ),
    )
    scored = engine.generate(
        task.windows, SamplingParams(prompt_logprobs=0, max_tokens=1, ignore_eos=True)
    )
    continued = engine.generate(
        task.prompts, SamplingParams(max_tokens=task.new_tokens, ignore_eos=True)
    )
    for completion in (*scored, *continued):
        if completion.error_code is not None:
            raise click.ClickException(f"{kv_dtype}: {completion.error_message}")
    return Measured(
        window_logprobs=[
            # The first token of a prompt has none.
            statistics.fmean(
                token.logprob
                for token in completion.prompt_logprobs or ()
                if token.logprob is not None
            )
            for completion in scored
        ],
        continuations=[completion.token_ids for completion in continued],
        bytes_per_token=engine.capacity.bytes_per_token,
    )


def compare(kv_dtype: str, measured: Measured, baseline: Measured) -> Row:
    """The dtype's row of the table."""
    changes = [
        after - before
        for after, before in zip(measured.window_logprobs, baseline.window_logprobs, strict=True)
    ]
    spread_of_changes = statistics.stdev(changes) if len(changes) > 1 else math.nan
    pairs = list(zip(measured.continuations, baseline.continuations, strict=True))
    prefixes = [quality_text.common_prefix(*pair) for pair in pairs]
    num_tokens = len(baseline.continuations[0])
    tokens_per_gib = fitting_tokens(measured.bytes_per_token)
    return Row(
        kv_dtype=kv_dtype,
        perplexity=math.exp(-statistics.fmean(measured.window_logprobs)),
        logprob_change=statistics.fmean(changes),
        logprob_change_error=spread_of_changes / math.sqrt(len(changes)),
        mean_prefix=statistics.fmean(prefixes),
        agreement=statistics.fmean(prefixes) / num_tokens,
        equal_continuations=statistics.fmean(mine == theirs for mine, theirs in pairs),
        bytes_per_token=measured.bytes_per_token,
        tokens_per_gib=tokens_per_gib,
        capacity_ratio=tokens_per_gib / fitting_tokens(baseline.bytes_per_token),
    )


def fitting_tokens(bytes_per_token: int) -> int:
    """Tokens that fit into one GiB, in whole blocks."""
    return GIB // (bytes_per_token * BLOCK_SIZE) * BLOCK_SIZE


def print_rows(rows: list[Row], new_tokens: int) -> None:
    """Print the table."""
    table = Table(title="KV dtypes against float32")
    names = ("perplexity", "log p, change", f"equal of {new_tokens}", "agreement", "all equal")
    table.add_column("KV dtype")
    for name in (*names, "bytes/token", "tokens/GiB", "room"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.kv_dtype,
            f"{row.perplexity:.4f}",
            f"{row.logprob_change:+.5f} ± {row.logprob_change_error:.5f}",
            f"{row.mean_prefix:.1f}",
            f"{row.agreement:.1%}",
            f"{row.equal_continuations:.0%}",
            f"{row.bytes_per_token:,}",
            f"{row.tokens_per_gib:,}",
            f"{row.capacity_ratio:.2f}x",
        )
    Console(width=120).print(table)


@click.command()
@click.option("--model", default=quality_text.PACKAGED_MODEL, show_default=True)
@click.option(
    "--kv-dtype",
    "kv_dtypes",
    multiple=True,
    type=click.Choice(KV_DTYPES),
    default=KV_DTYPES,
    help="Besides float32, which is always measured.",
)
@click.option("--windows", type=click.IntRange(1), default=16, show_default=True)
@click.option("--window-tokens", type=click.IntRange(2), default=1024, show_default=True)
@click.option("--continuations", type=click.IntRange(1), default=32, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
def main(
    model: str,
    kv_dtypes: tuple[KVDType, ...],
    windows: int,
    window_tokens: int,
    continuations: int,
    prompt_tokens: int,
    new_tokens: int,
) -> None:
    """Measure what each KV dtype costs and buys.

    Example: python scripts/kv_quality.py --kv-dtype int8 --kv-dtype int4
    """
    environment = bench_environment.describe()
    text = quality_text.real_text()
    ids = open_checkpoint(locate(model)).tokenizer().encode_text(text)
    task = Task(
        windows=quality_text.spread(ids, windows, window_tokens),
        prompts=quality_text.spread(ids, continuations, prompt_tokens),
        new_tokens=new_tokens,
    )
    baseline = measure(model, task, "float32")
    rows = [compare("float32", baseline, baseline)]
    for kv_dtype in kv_dtypes:
        if kv_dtype != "float32":
            rows.append(compare(kv_dtype, measure(model, task, kv_dtype), baseline))
    print_rows(rows, new_tokens)
    settings = {
        "model": model,
        "text": "pydoc_data.topics",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_tokens": len(ids),
        "windows": windows,
        "window_tokens": window_tokens,
        "continuations": continuations,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "block_size": BLOCK_SIZE,
    }
    figures = [dataclasses.asdict(row) for row in rows]
    print(json.dumps({"benchmark": "kv_quality", **environment, **settings, "rows": figures}))


if __name__ == "__main__":
    main()
