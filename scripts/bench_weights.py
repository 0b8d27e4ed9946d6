"""Decode speed with quantised weights against weights as they are, in one process, in turns.

Regime: so many sequences decode together, a token each a step. Few are bound by the bandwidth to
the weights, which is what fewer bits are for; many are bound by arithmetic, which quantising adds
to. Greedy, end-of-sequence ignored, short prompts.

    python scripts/bench_weights.py
    python scripts/bench_weights.py --sequences 1 --rounds 9

Baseline: the same engine without `weight_dtype`, in the same round. A figure is the median over the
rounds of a ratio within a round, with the least and the largest: absolute times of this or another
machine's day are not compared. Prints a table; the last line is one JSON object.
"""

import json
import statistics

import bench_environment
import click
import quality_text
from rich.console import Console
from rich.table import Table

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.config import DType, WeightDType

FORMATS: dict[str, WeightDType | None] = {"plain": None, "int8": "int8", "int4": "int4"}
PROMPT_TOKENS = 16


def decode_seconds(engine: Engine, sequences: int, new_tokens: int) -> float:
    """Seconds of a step that decodes a token for each sequence."""
    before = engine.stats.decode_seconds, engine.stats.decode_tokens
    prompts = [[10 + index] * PROMPT_TOKENS for index in range(sequences)]
    engine.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    tokens = engine.stats.decode_tokens - before[1]
    return (engine.stats.decode_seconds - before[0]) / tokens * sequences


@click.command()
@click.option("--model", default=quality_text.PACKAGED_MODEL, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--sequences", multiple=True, type=click.IntRange(1), default=(1, 2, 4, 8, 16, 64))
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
def main(
    model: str, dtype: DType, sequences: tuple[int, ...], new_tokens: int, rounds: int
) -> None:
    """Measure decode steps with quantised weights.

    Example: python scripts/bench_weights.py --sequences 1 --rounds 9
    """
    environment = bench_environment.describe()
    length = PROMPT_TOKENS + new_tokens
    engines = {
        name: Engine.load(
            model,
            EngineConfig(
                dtype=dtype,
                weight_dtype=weight_dtype,
                max_model_len=length,
                max_num_seqs=max(sequences),
                prefix_cache=False,
            ),
        )
        for name, weight_dtype in FORMATS.items()
    }
    table = Table(title=f"a decode step of {dtype} weights over one of quantised weights")
    table.add_column("sequences", justify="right")
    table.add_column("plain ms", justify="right")
    for name in list(FORMATS)[1:]:
        table.add_column(f"{name} (least to largest)", justify="right")
    figures = []
    for count in sequences:
        times: dict[str, list[float]] = {name: [] for name in FORMATS}
        for round_number in range(rounds + 1):
            for name, engine in engines.items():
                seconds = decode_seconds(engine, count, new_tokens)
                # In the first round steps are compiled.
                if round_number:
                    times[name].append(seconds)
        plain = times.pop("plain")
        ratios = {
            name: sorted(base / own for base, own in zip(plain, taken, strict=True))
            for name, taken in times.items()
        }
        table.add_row(
            str(count),
            f"{statistics.median(plain) * 1000:.1f}",
            *(
                f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
                for found in ratios.values()
            ),
        )
        figures.append({"sequences": count, "plain_seconds": plain, "ratios": ratios})
    Console(width=110).print(table)
    settings = {"model": model, "dtype": dtype, "new_tokens": new_tokens, "rounds": rounds}
    print(json.dumps({"benchmark": "weights", **environment, **settings, "figures": figures}))


if __name__ == "__main__":
    main()
