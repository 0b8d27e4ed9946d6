"""What a step costs on the host: planning, building the batch, handling what was sampled.

Regime: every lane decodes, and the model costs nothing: the runner does all of its own work but
its compiled programs, in whose place constant tokens come back at once. So all of the time is the
host's, text included. It should grow with what changes in a step (a token for each lane, a block
for every 16th) and not with the lanes times their context.

    python scripts/bench_host.py
    python scripts/bench_host.py --lanes 256 --context 1000 --context 30000

Baseline: the smallest context, for each number of lanes. The CPU time is that of the process, mean
over whole cycles of a block, so that each lane takes as many new blocks in every case. `fill` is
the CPU time of taking the prompts in, per 1,000 prompt tokens. The device's own work and the call
of a compiled program (some tens of microseconds, whatever the batch) are not in it. Prints a
table; the last line is one JSON object.
"""

import collections.abc
import dataclasses
import gc
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import bench_environment
import click
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.engine.batch import Bucket
from jaxpaged.engine.model_runner import ModelRunner
from jaxpaged.engine.sampling import Sampled
from jaxpaged.request import Request

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK_SIZE = 16
# So many that filling takes few steps: those who are done decode meanwhile.
TOKEN_BUDGET = 2**20
# Of room for completions behind the context; enough for the fill and the measured steps.
MAX_TOKENS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured number of lanes and length of context; times are CPU time.

    Attributes:
        lanes: Sequences that decode.
        context: Tokens of each when the measurement begins, but for those of the fill.
        step_ms: Of a step, mean.
        schedule_ms: Thereof the scheduler.
        dispatch_ms: Thereof the batch and the lane state.
        result_ms: Thereof the rest: tokens, text, stopping, counters.
        worst_step_ms: Of the slowest step.
        lane_us: Of a step, by lane, in microseconds.
        fill_ms: Of taking in 1,000 prompt tokens.
    """

    lanes: int
    context: int
    step_ms: float
    schedule_ms: float
    dispatch_ms: float
    result_ms: float
    worst_step_ms: float
    lane_us: float
    fill_ms: float


class FreeRunner(ModelRunner):
    """Takes over a runner and does all that it does, but for running programs."""

    def __init__(self, runner: ModelRunner, token: int) -> None:
        vars(self).update(vars(runner))
        self._token = token
        self._rows = jnp.zeros((1, 1))
        self._answers: dict[int, Sampled] = {}

    def _run(self, key: object, function: Any, *arguments: Any) -> Any:  # noqa: ANN401
        if isinstance(key, Bucket):
            return self._rows, self._rows, self._pool
        if isinstance(key, tuple) and key[0] == "sample":
            return self._answer(key[1]), self._state.tokens
        # What sets lanes or moves blocks gives back its first argument, changed.
        return arguments[0]

    def _answer(self, size: int) -> Sampled:
        if size not in self._answers:
            tokens = jnp.full(size, self._token, jnp.int32)
            blank = jnp.zeros(size)
            others = {name: blank for name in Sampled._fields if name != "tokens"}
            self._answers[size] = Sampled(tokens=tokens, **others)
        return self._answers[size]


class Stopwatch:
    """CPU time spent in functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: collections.abc.Callable[..., Any]) -> Any:  # noqa: ANN401
        """The function, timed."""

        def timed(*arguments: Any) -> Any:  # noqa: ANN401
            started = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.process_time() - started

        return timed


def free_engine(model: pathlib.Path, lanes: int, context: int, token: int) -> Engine:
    """An engine of so many lanes whose model costs nothing."""
    longest = context + MAX_TOKENS
    engine = Engine.load(
        model,
        EngineConfig(
            kv_dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=lanes,
            max_num_batched_tokens=TOKEN_BUDGET,
            block_size=BLOCK_SIZE,
            num_blocks=lanes * (longest // BLOCK_SIZE + 1),
            watermark=0.0,
            # The prompts are alike; shared, they would take one sequence's blocks.
            prefix_cache=False,
        ),
    )
    engine._runner = FreeRunner(engine._runner, token)
    return engine


def measure(model: pathlib.Path, *, lanes: int, context: int, steps: int, token: int) -> Case:
    """The host's time for one number of lanes and one length of context.

    Raises:
        click.ClickException: Not every sequence ran in every step.
    """
    engine = free_engine(model, lanes, context, token)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    # The lane comes first, so that prompts can be told apart, and sorted, by it.
    prompts = [(token, *divmod(lane, 100), *[token] * (context - 3)) for lane in range(lanes)]
    started = time.process_time()
    for lane, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=lane, prompt_ids=prompt, params=params))
    while not decodes_all(engine, lanes):
        pass
    fill_seconds = time.process_time() - started
    # As a running job has it.
    gc.collect()
    gc.freeze()
    schedule, dispatch = Stopwatch(), Stopwatch()
    engine._scheduler.schedule = schedule.around(engine._scheduler.schedule)
    engine._runner.dispatch = dispatch.around(engine._runner.dispatch)
    before = engine.stats.sampled_tokens
    seconds = []
    for _ in range(steps):
        started = time.process_time()
        engine.step()
        seconds.append(time.process_time() - started)
    if engine.stats.sampled_tokens - before != steps * lanes:
        raise click.ClickException("not every lane decoded in every step")
    engine.abort()
    gc.unfreeze()
    step_ms = statistics.fmean(seconds) * 1e3
    schedule_ms, dispatch_ms = (watch.seconds / steps * 1e3 for watch in (schedule, dispatch))
    return Case(
        lanes=lanes,
        context=context,
        step_ms=round(step_ms, 4),
        schedule_ms=round(schedule_ms, 4),
        dispatch_ms=round(dispatch_ms, 4),
        result_ms=round(step_ms - schedule_ms - dispatch_ms, 4),
        worst_step_ms=round(max(seconds) * 1e3, 4),
        lane_us=round(step_ms * 1e3 / lanes, 3),
        fill_ms=round(fill_seconds * 1e3 / (lanes * context / 1e3), 4),
    )


def decodes_all(engine: Engine, lanes: int) -> bool:
    """Whether the step that this makes gave every lane a token.

    Raises:
        click.ClickException: A completion ended.
    """
    before = engine.stats.sampled_tokens
    ended = engine.step()
    if ended:
        raise click.ClickException(f"a completion ended while filling: {ended[0]}")
    return engine.stats.sampled_tokens - before == lanes


def print_cases(cases: list[Case]) -> None:
    """Print a table; each case with its ratio to the smallest context of as many lanes."""
    table = Table(title="host CPU time of a decode step, ms")
    names = ("lanes", "context", "step", "schedule", "dispatch", "results", "worst step")
    for name in (*names, "µs/lane", "x baseline", "fill"):
        table.add_column(name, justify="right")
    for case in cases:
        alike = [other for other in cases if other.lanes == case.lanes]
        baseline = min(alike, key=lambda other: other.context)
        parts = (case.step_ms, case.schedule_ms, case.dispatch_ms, case.result_ms)
        table.add_row(
            f"{case.lanes:,}",
            f"{case.context:,}",
            *(f"{part:.3f}" for part in (*parts, case.worst_step_ms)),
            f"{case.lane_us:.2f}",
            f"{case.step_ms / baseline.step_ms:.2f}",
            f"{case.fill_ms:.3f}",
        )
    Console(width=110).print(table)


def write_model(folder: pathlib.Path, most_positions: int) -> tuple[pathlib.Path, int]:
    """The folder of the smallest model that there is, and a token that is a letter."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import byte_id, write_tiny_llama

    write_tiny_llama(
        folder,
        hidden=2,
        layers=1,
        heads=1,
        kv_heads=1,
        intermediate=2,
        max_position_embeddings=most_positions,
    )
    return folder, byte_id(ord("a"))


@click.command()
@click.option("--lanes", multiple=True, type=click.IntRange(1), default=(64, 256, 1024))
@click.option("--context", multiple=True, type=click.IntRange(16), default=(1000, 4000, 30000))
@click.option("--block-cycles", type=click.IntRange(1), default=8, show_default=True)
def main(lanes: tuple[int, ...], context: tuple[int, ...], block_cycles: int) -> None:
    """Measure every combination of --lanes and --context.

    Example: python scripts/bench_host.py --lanes 64 --context 1000
    """
    environment = bench_environment.describe()
    steps = block_cycles * BLOCK_SIZE
    with tempfile.TemporaryDirectory() as scratch:
        model, token = write_model(pathlib.Path(scratch) / "model", max(context) + MAX_TOKENS)
        cases = [
            measure(model, lanes=count, context=length, steps=steps, token=token)
            for count, length in itertools.product(lanes, context)
        ]
    print_cases(cases)
    settings = {"steps": steps, "block_size": BLOCK_SIZE, "token_budget": TOKEN_BUDGET}
    figures = [dataclasses.asdict(case) for case in cases]
    print(json.dumps({"benchmark": "host", **environment, **settings, "cases": figures}))


if __name__ == "__main__":
    main()
