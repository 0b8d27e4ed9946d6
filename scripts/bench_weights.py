"""Linear maps by the kernels for CPUs: float32 weights beside int8 and int4, in turns.

Regime: square matrices that together fit no cache, one after the other, as a step goes through a
model's layers. Few rows (sequences that decode) are bound by the bandwidth to the weights, which is
what fewer bits are for; many are bound by arithmetic, to which reading fewer bits adds.

    python scripts/bench_weights.py
    taskset -c 0 python scripts/bench_weights.py --clock cpu     # on a machine that is busy

Baseline: float32 in the same round. A figure is the median over the rounds of the ratio within a
round, with the least and the largest. With `--clock cpu` times are those that the process had the
processor for, which count one thread only if it has one processor. Prints a table; the last line is
one JSON object.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Literal

import bench_environment
import click
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import pallas_kernels
from pallas_kernels import WeightDType, weight_format

FORMATS: tuple[WeightDType, ...] = ("int8", "int4")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Map = Callable[[jax.Array, int], jax.Array]
"""Of rows, by the matrix with that number."""


def maps(width: int, layers: int) -> dict[str, Map]:
    """The same linear maps by each format."""
    random = np.random.default_rng(0)
    kernels = random.standard_normal((layers, width, width)).astype(np.float32)
    linear = jax.jit(pallas_kernels.linear, static_argnames="width")
    quantized_linear = jax.jit(pallas_kernels.quantized_linear, static_argnames="width")
    panels = jnp.asarray(pallas_kernels.pack(kernels))

    def by(function: Callable[..., jax.Array], weights: object) -> Map:
        return lambda x, layer: function(
            x, weights, layer=jnp.int32(layer), num_rows=jnp.int32(x.shape[0]), width=width
        )

    found = {"float32": by(linear, panels)}
    for weight_dtype in FORMATS:
        packed = pallas_kernels.pack_quantized(weight_format.quantize(kernels, weight_dtype))
        found[weight_dtype] = by(quantized_linear, jax.tree.map(jnp.asarray, packed))
    return found


@click.command()
@click.option("--width", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--layers", type=click.IntRange(1), default=8, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--clock", type=click.Choice(list(CLOCKS)), default="wall", show_default=True)
def main(width: int, layers: int, rounds: int, clock: Literal["wall", "cpu"]) -> None:
    """Measure linear maps by weights of few bits.

    Example: python scripts/bench_weights.py --rounds 5
    """
    now = CLOCKS[clock]
    found = maps(width, layers)
    table = Table(
        title=f"time of float32 over that of few bits, {layers} maps of {width:,} squared"
    )
    for name in ("rows", "float32 ms", *(f"{name} (least to largest)" for name in FORMATS)):
        table.add_column(name, justify="right")
    figures = []
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 96):
        x = jnp.ones((num_rows, width), jnp.float32)
        times: dict[str, list[float]] = {name: [] for name in found}
        for round_number in range(rounds + 1):
            for name, function in found.items():
                started = now()
                for layer in range(layers):
                    function(x, layer).block_until_ready()
                # In the first round they are compiled.
                if round_number:
                    times[name].append((now() - started) / layers)
        plain = times.pop("float32")
        ratios = {
            name: sorted(base / own for base, own in zip(plain, taken, strict=True))
            for name, taken in times.items()
        }
        shown = (
            f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"
            for each in ratios.values()
        )
        table.add_row(str(num_rows), f"{statistics.median(plain) * 1000:.2f}", *shown)
        figures.append({"rows": num_rows, "float32_seconds": plain, "ratios": ratios})
    Console(width=110).print(table)
    settings = {"width": width, "layers": layers, "rounds": rounds, "clock": clock}
    environment = bench_environment.describe()
    print(json.dumps({"benchmark": "weights", **environment, **settings, "figures": figures}))


if __name__ == "__main__":
    main()
