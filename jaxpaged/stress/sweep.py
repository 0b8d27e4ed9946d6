"""A load test: the same requests at rising concurrency, with blocks on demand and with static
reservation in the same memory."""

import dataclasses
import gc
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxpaged.cache.capacity import blocks_for
from jaxpaged.config import EngineConfig, Reservation
from jaxpaged.engine import limits
from jaxpaged.engine.engine import Engine, load_model
from jaxpaged.engine.shortage import size
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.job import versions
from jaxpaged.job.spec import JobSpec
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.plan.survey import Lens
from jaxpaged.request import Request
from jaxpaged.stress import check, load, workload
from jaxpaged.stress.check import Check
from jaxpaged.stress.load import Load
from jaxpaged.stress.workload import Shape

# Unless it is said: a pool in which static reservation carries this share of the requests in
# flight.
_STATIC_SHARE = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StressOptions:
    """What is tried.

    Attributes:
        shape: What requests look like.
        lengths: Parquet with lengths to take instead.
        requests: How many.
        concurrency: Requests in flight at a time, rising.
        pool_bytes: Memory of the KV pool; None takes the job's `engine.num_blocks`, or what static
            reservation needs for a quarter of the highest concurrency.
        is_compared: Static reservation is tried, too.
        checked: Requests whose completions are compared with the unpaged decoder.
    """

    shape: Shape
    lengths: pathlib.Path | None = None
    requests: int = 64
    concurrency: tuple[int, ...] = (16, 32, 64)
    pool_bytes: int | None = None
    is_compared: bool = True
    checked: int = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StressReport:
    """What was found.

    Attributes:
        model: As the job names it.
        engine: The engine's own description at the highest concurrency.
        versions: Of what the result depends on.
        max_model_len: Most tokens of a sequence.
        block_size: Tokens per block.
        pool_bytes: Memory of the KV pool, the same for all loads.
        prompt_lens: Prompts' lengths.
        new_lens: Completions' lengths.
        loads: The loads, in the order in which they were run.
        check: The comparison with the unpaged decoder; None without one.
        notes: What could not be tried.
    """

    model: str
    engine: str
    versions: dict[str, str]
    max_model_len: int
    block_size: int
    pool_bytes: int
    prompt_lens: Lens
    new_lens: Lens
    loads: tuple[Load, ...]
    check: Check | None
    notes: tuple[str, ...]

    @property
    def widest(self) -> dict[str, Load]:
        """The loads at the highest concurrency, by reservation."""
        most = max(one.concurrency for one in self.loads)
        return {one.reservation: one for one in self.loads if one.concurrency == most}

    @property
    def is_failed(self) -> bool:
        """Whether completions are not the unpaged decoder's, or a load completed no request."""
        differs = self.check is not None and self.check.is_good is False
        return differs or any(not one.requests for one in self.loads)

    @property
    def exit_code(self) -> int:
        """1 if something is wrong."""
        return int(self.is_failed)

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return {
            "model": self.model,
            "engine": self.engine,
            "versions": self.versions,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "pool_bytes": self.pool_bytes,
            "prompt_tokens": self.prompt_lens.summary(),
            "new_tokens": self.new_lens.summary(),
            "loads": [one.to_json() for one in self.loads],
            "check": self.check.to_json() if self.check else None,
            "notes": self.notes,
        }


def stress(
    spec: JobSpec, options: StressOptions, note: Callable[[str], None] = lambda _: None
) -> StressReport:
    """Runs the loads, one behind the other, each on an engine of its own with the same weights.

    Args:
        spec: The job: its model and engine count, its rows do not.
        options: What is tried.
        note: Is told what is being done.

    Raises:
        ConfigError: A setting does not suit the model, or the requests do not.
        CheckpointError: The model's files are not right.
        CapacityError: Weights or pool cannot fit.
        InputSchemaError: The file with lengths cannot be used.
    """
    # What is wrong with the lengths is found before the weights are loaded.
    lens = None if options.lengths is None else workload.read(options.lengths, options.requests)
    note(f"loading {spec.model}")
    model, tokenizer, config = load_model(spec.model, spec.engine_config(), spec.adapters)
    length = limits.max_model_len(config, model.config)
    requests = _requests(spec, options, tokenizer, lens=lens, max_model_len=length)
    token_bytes = limits.token_bytes(model.config, limits.kv_dtype(config, model))
    num_blocks = _num_blocks(config, options, token_bytes, max_model_len=length)
    loads: list[Load] = []
    notes: list[str] = []
    description, pairs = "", []
    for concurrency, reservation in _trials(options):
        trial = dataclasses.replace(
            config,
            max_num_seqs=concurrency,
            num_blocks=num_blocks,
            reservation=reservation,
            max_num_batched_tokens=_budget(config, concurrency),
        )
        try:
            engine = Engine(model, tokenizer, trial)
        except CapacityError:
            if reservation == "paged":
                raise
            # Once is enough.
            if not notes:
                notes.append(_no_static(num_blocks, config, length, token_bytes=token_bytes))
            continue
        note(f"{concurrency} requests in flight, {reservation}: {engine.description}")
        found, completions = load.run(engine, requests, concurrency)
        loads.append(found)
        note(f"  {found.tokens_per_second:,.0f} tokens/s, {found.mean_running:.1f} at once")
        if reservation == "paged":
            description = engine.description
            pairs = check.sample(requests, completions, options.checked)
        # The next engine's pool goes where this one's was.
        del engine
        gc.collect()
    checked: Check | None = None
    if pairs:
        note(f"comparing {len(pairs)} completions with the unpaged decoder")
        checked = check.check(model, limits.kv_dtype(config, model), pairs)
    return StressReport(
        model=spec.model,
        engine=description,
        versions=versions.installed(),
        max_model_len=length,
        block_size=config.block_size,
        pool_bytes=num_blocks * config.block_size * token_bytes,
        prompt_lens=_lens(len(request.prompt_ids) for request in requests),
        new_lens=_lens(request.params.max_tokens or 0 for request in requests),
        loads=tuple(loads),
        check=checked,
        notes=tuple(notes),
    )


def _trials(options: StressOptions) -> Iterator[tuple[int, Reservation]]:
    for concurrency in options.concurrency:
        yield concurrency, "paged"
        if options.is_compared:
            yield concurrency, "static"


def _requests(
    spec: JobSpec,
    options: StressOptions,
    tokenizer: Tokenizer,
    *,
    lens: list[tuple[int, int]] | None,
    max_model_len: int,
) -> list[Request]:
    special = set(tokenizer.special_tokens.values())
    ids = [token for token in range(tokenizer.vocab_size) if token not in special]
    common = {"token_ids": ids, "max_model_len": max_model_len, "seed": spec.seed}
    if lens is not None:
        found = workload.from_lens(lens, shape=options.shape, **common)
    else:
        found = workload.from_shape(options.shape, options.requests, **common)
    turns = _adapters(spec)
    return [
        dataclasses.replace(request, adapter=turns[index % len(turns)])
        for index, request in enumerate(found)
    ]


def _adapters(spec: JobSpec) -> tuple[str | None, ...]:
    """The adapters that requests take in turn: where a column chooses, all and none."""
    choice = spec.adapter_choice()
    if choice is None:
        return (None,)
    return (choice.fixed,) if choice.column is None else (None, *choice.names)


def _num_blocks(
    config: EngineConfig, options: StressOptions, token_bytes: int, *, max_model_len: int
) -> int:
    block_bytes = token_bytes * config.block_size
    if options.pool_bytes is not None:
        if options.pool_bytes < block_bytes:
            raise ConfigError(
                f"--memory: {size(options.pool_bytes)} hold not one block of "
                f"{config.block_size} tokens, which takes {size(block_bytes)}"
            )
        return options.pool_bytes // block_bytes
    if config.num_blocks is not None:
        return config.num_blocks
    held = max(1, max(options.concurrency) // _STATIC_SHARE)
    return held * blocks_for(max_model_len, config.block_size)


def _no_static(
    num_blocks: int, config: EngineConfig, max_model_len: int, *, token_bytes: int
) -> str:
    needed = blocks_for(max_model_len, config.block_size) * config.block_size * token_bytes
    held = num_blocks * config.block_size
    return (
        f"static reservation was not tried: {size(needed)} needed for one sequence of "
        f"{max_model_len:,} tokens, {size(held * token_bytes)} in the pool. Cheapest changes: (1) "
        f"engine.max_model_len: at most {held:,}; (2) --memory: at least {size(needed)}"
    )


def _budget(config: EngineConfig, concurrency: int) -> int | None:
    """Tokens of a step: the job's, as far as they carry so many sequences."""
    budget = config.max_num_batched_tokens
    return None if budget is None else max(budget, concurrency)


def _lens(values: Iterator[int]) -> Lens:
    lens = Lens()
    for value in values:
        lens.add(value)
    return lens
