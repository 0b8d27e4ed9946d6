"""The plan of a job, made of its rows, its model's shape and a device, without loading weights."""

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.config import EngineConfig
from jaxpaged.engine import attention, device, limits, memory
from jaxpaged.engine.device import Place
from jaxpaged.engine.engine import layer_loop
from jaxpaged.engine.limits import Limits
from jaxpaged.engine.model_runner import SCORE_ROWS
from jaxpaged.engine.shortage import size
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.job import planned_job
from jaxpaged.job.input import reader
from jaxpaged.job.planned_job import PlannedJob, RunOptions
from jaxpaged.job.prompt.prompt_limit import PromptLimit
from jaxpaged.job.prompt.prompts import Prompt, PromptBuilder
from jaxpaged.job.prompt.row_fault import RowFault, RowSkipped
from jaxpaged.job.spec import JobSpec
from jaxpaged.job.units import Unit
from jaxpaged.model.llama import Llama
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.plan import advice, memory_estimate, rehearsal
from jaxpaged.plan.advice import Change, Situation
from jaxpaged.plan.cards import Card
from jaxpaged.plan.memory_estimate import MemoryEstimate
from jaxpaged.plan.rehearsal import Rehearsal
from jaxpaged.plan.survey import Survey
from jaxpaged.request import Request

# A sample is made of so many pieces, evenly spread over the rows.
_PIECES = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan is made for.

    Attributes:
        card: A GPU that need not be there; None is the device of this process.
        max_rows: Rows to look at; a job with more is judged by a sample.
        new_tokens: Tokens to assume of each completion, at most; None assumes that each one runs to
            its limit.
        speed: Tokens in and out per second, slowest and fastest; None gives no time.
        compiles: Temporary memory is asked of the compiler, which takes some seconds.
    """

    card: Card | None = None
    max_rows: int = 5000
    new_tokens: int | None = None
    speed: tuple[float, float] | None = None
    compiles: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a plan is for.

    Attributes:
        device: Name of the device.
        dtype: Of the weights.
        kv_dtype: Of the KV pool.
        implementation: Who computes attention, and why.
        max_model_len: Most tokens of a sequence.
        max_num_seqs: Lanes.
    """

    device: str
    dtype: str
    kv_dtype: str
    implementation: str
    max_model_len: int
    max_num_seqs: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What a job would take.

    Attributes:
        target: What it is planned for.
        total_rows: Of the input.
        survey: The rows that were looked at.
        memory: What goes where; None where not even the weights fit.
        capacity: The pool; None where there is none.
        paged: What the scheduler would do with these rows.
        static: The same with `max_model_len` reserved for each sequence, in the same pool; None
            where the pool holds not one such sequence.
        seconds: How long all rows take, fastest and slowest; None without a speed.
        shortage: Why the job cannot run at all; None if it can.
        changes: What would help, where something does not fit or had to make room.
        notes: What the figures assume.
    """

    target: Target
    total_rows: int
    survey: Survey
    memory: MemoryEstimate | None = None
    capacity: PoolCapacity | None = None
    paged: Rehearsal | None = None
    static: Rehearsal | None = None
    seconds: tuple[float, float] | None = None
    shortage: CapacityError | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """All rows for each one that was looked at."""
        return self.total_rows / self.survey.rows if self.survey.rows else 1.0

    def to_json(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        survey = self.survey
        values: dict[str, Any] = dataclasses.asdict(self.target) | {
            "total_rows": self.total_rows,
            "rows_for_each_looked_at": self.scale,
            "capacity": dataclasses.asdict(self.capacity) if self.capacity else None,
            "paged": dataclasses.asdict(self.paged) if self.paged else None,
            "static": dataclasses.asdict(self.static) if self.static else None,
            "seconds": self.seconds,
            "notes": self.notes,
        }
        values["changes"] = [dataclasses.asdict(change) for change in self.changes]
        values["survey"] = {
            "rows": survey.rows,
            "prompt_tokens": survey.prompt_lens.summary(),
            "new_tokens": survey.new_lens.summary(),
            "faults": dict(survey.fault_counts),
            "fault_examples": survey.faults,
            "skipped": dict(survey.skipped),
            "too_long": survey.too_long,
            "too_long_by_policy": {
                name: dataclasses.asdict(effect) for name, effect in survey.effects.items()
            },
            "duplicates": survey.duplicates,
            "shared_prompt_tokens": survey.shared_tokens,
            "rows_with_special_text": survey.special_texts,
        }
        values["shortage"] = str(self.shortage) if self.shortage else None
        values["memory"] = self.memory.to_json() if self.memory else None
        return values

    @property
    def exit_code(self) -> int:
        """What a run would end with for want of memory; 0 if it would start."""
        return self.shortage.exit_code if self.shortage else 0


def make(spec: JobSpec, options: PlanOptions) -> JobPlan:
    """The plan of a job.

    Raises:
        ConfigError: The job, or the model's files, are not right, or do not suit each other.
        InputSchemaError: The input is missing, broken, or not what the job needs.
    """
    job = planned_job.plan(spec, RunOptions(looks_only=True))
    job.check_model()
    place = _place(options.card)
    config = spec.engine_config()
    model = _abstract_model(job, config, place)
    config = dataclasses.replace(config, dtype=_dtype(model))
    tokenizer = job.checkpoint.tokenizer()
    process = memory_estimate.process_bytes(model)
    rows = _Rows(job, tokenizer, options)
    weights = memory_estimate.weights_bytes(model)
    try:
        memory.check_weights(
            job.checkpoint.shapes(), dtype=_dtype(model), available=place.available_bytes
        )
        beside = Place(place.device, max(0, place.available_bytes - weights))
        resolved = limits.resolve(
            config, model, device=place.device, available=beside.available_bytes
        )
    except CapacityError as error:
        for _ in rows.requests():
            pass
        return _unfit(job, rows, model=model, place=place, error=error)
    paged = rehearsal.rehearse(model, tokenizer, rows.config(config), rows.requests(), place=beside)
    for code, count in paged.rejected.items():
        rows.survey.fault_counts[code] += count
    return JobPlan(
        target=_target(job, model, place),
        total_rows=job.inputs.num_rows,
        survey=rows.survey,
        memory=_memory(
            model, resolved, rows, paged=paged, place=place, options=options, process=process
        ),
        capacity=resolved.capacity,
        paged=paged,
        static=_static(model, tokenizer, config, rows, place=beside),
        seconds=_seconds(paged, rows, options.speed),
        changes=_changes(job, rows, paged, resolved, model=model, place=place),
        notes=_notes(spec, rows, options),
    )


class _Rows:
    """The rows that are looked at, as requests; the survey is made as they first pass by.

    Attributes:
        job: Theirs.
        survey: What they ask for.
        longest: Tokens of the longest one with its completion.
    """

    def __init__(self, job: PlannedJob, tokenizer: Tokenizer, options: PlanOptions) -> None:
        self.job = job
        self._options = options
        self._builder = _builder(job, tokenizer)
        self._limit = PromptLimit(
            job.max_model_len, job.spec.input.on_too_long, bos_id=tokenizer.bos_id
        )
        self.survey = Survey(
            max_model_len=job.max_model_len,
            block_size=job.spec.engine.block_size,
            bos_id=tokenizer.bos_id,
        )
        self.longest = 1
        self._is_surveyed = False

    def config(self, config: EngineConfig) -> EngineConfig:
        """The settings as they are for these rows: where prompt tokens are scored, none of them
        comes from the prefix cache."""
        if self.job.spec.sampling.prompt_logprobs is None:
            return config
        return dataclasses.replace(config, prefix_cache=False)

    def requests(self) -> Iterator[Request]:
        """The rows that reach the engine; counted in the survey the first time."""
        is_counting, self._is_surveyed = not self._is_surveyed, True
        wanted = sample(self.job.inputs.num_rows, self._options.max_rows)
        for batch in reader.read(self.job.inputs, self.job.columns.needed, wanted):
            for row in batch.rows(self._builder.columns):
                try:
                    row.check()
                    prompt = self._builder.build(row.cells)
                except RowFault as fault:
                    if is_counting:
                        self.survey.fault(row.place, fault)
                    continue
                except RowSkipped as skip:
                    if is_counting:
                        self.survey.skip(skip)
                    continue
                if is_counting:
                    self._count(prompt)
                try:
                    yield self._request(row.number, prompt)
                except RowSkipped as skip:
                    if is_counting:
                        self.survey.skipped[skip.code] += 1

    def _count(self, prompt: Prompt) -> None:
        room = max(0, self.job.max_model_len - len(prompt.whole_ids))
        limit = prompt.params.max_tokens
        new = room if limit is None else min(limit, room)
        if self._options.new_tokens is not None:
            new = min(new, self._options.new_tokens)
        self.survey.add(prompt, new_tokens=new)
        length = min(self.job.max_model_len, len(prompt.whole_ids) + new)
        self.longest = max(self.longest, length)

    def _request(self, number: int, prompt: Prompt) -> Request:
        ids = self._limit.apply(prompt.whole_ids, max_tokens=prompt.params.max_tokens)
        params = rehearsal.without_ends(prompt.params, max_new=self._options.new_tokens)
        return Request(request_id=number, prompt_ids=ids, params=params)


def sample(num_rows: int, max_rows: int) -> list[Unit]:
    """The rows to look at: all, or so many in pieces that are evenly spread."""
    if num_rows <= max_rows:
        return [Unit(index=0, start=0, stop=num_rows)]
    pieces = min(_PIECES, max_rows)
    length = max_rows // pieces
    starts = [at * num_rows // pieces for at in range(pieces)]
    return [Unit(index=at, start=start, stop=start + length) for at, start in enumerate(starts)]


def _builder(job: PlannedJob, tokenizer: Tokenizer) -> PromptBuilder:
    """What makes whole prompts: the policy for those that are too long is applied later."""
    began = datetime.datetime.fromisoformat(job.history.job.created).replace(tzinfo=None)
    return PromptBuilder(job.spec, tokenizer, job.inputs.schema.names, moment=began)


def _place(card: Card | None) -> Place:
    if card is not None:
        return Place(card.device, card.available_bytes)
    return Place(device.here(), memory.available_bytes())


def _abstract_model(job: PlannedJob, config: EngineConfig, place: Place) -> Llama:
    """The decoder without weights."""
    shape, dtype = job.checkpoint.config, limits.dtype(config, place.device)
    choice = attention.choose(config, shape, device=place.device)
    return nnx.eval_shape(
        lambda: Llama(
            shape,
            dtype=jnp.dtype(dtype),
            layer_loop=layer_loop(place.device),
            attention=choice.implementation,
        )
    )


def _dtype(model: Llama) -> Any:  # noqa: ANN401  (a literal, for the type checker)
    return str(model.dtype)


def _target(job: PlannedJob, model: Llama, place: Place) -> Target:
    config = job.spec.engine_config()
    choice = attention.choose(config, model.config, device=place.device)
    return Target(
        device=place.device.name,
        dtype=str(model.dtype),
        kv_dtype=limits.kv_dtype(config, model),
        implementation=f"{choice.implementation} ({choice.reason})",
        max_model_len=job.max_model_len,
        max_num_seqs=job.spec.engine.max_num_seqs,
    )


def _unfit(
    job: PlannedJob, rows: _Rows, *, model: Llama, place: Place, error: CapacityError
) -> JobPlan:
    """The plan of a job that cannot run."""
    workspace = limits.workspace_bytes(job.spec.engine.max_num_seqs, model.config.vocab_size)
    situation = _situation(job, rows, model=model, place=place, workspace=workspace)
    return JobPlan(
        target=_target(job, model, place),
        total_rows=job.inputs.num_rows,
        survey=rows.survey,
        shortage=error,
        changes=advice.changes(situation),
    )


def _memory(
    model: Llama,
    resolved: Limits,
    rows: _Rows,
    *,
    paged: Rehearsal,
    place: Place,
    options: PlanOptions,
    process: int,
) -> MemoryEstimate:
    is_here = options.card is None
    if options.compiles and not is_here:
        raise ConfigError(
            "--compile asks the compiler of this machine's device; leave --device out"
        )
    estimate = memory_estimate.by_compiler if options.compiles else memory_estimate.by_formula
    temporary = estimate(model, resolved, rows.job.spec.sampling_params())
    capacity = resolved.capacity
    # Only with its kernels a CPU's pool takes memory as it is written.
    is_lazy = model.attention == "llvm"
    touched = paged.touched_blocks * capacity.block_size * capacity.bytes_per_token
    is_cpu = place.device.is_cpu and is_here
    return MemoryEstimate(
        weights_bytes=memory_estimate.weights_bytes(model),
        pool_bytes=capacity.num_bytes,
        touched_bytes=touched if is_lazy else None,
        temporary=temporary,
        process_bytes=process if is_cpu else 0,
        available_bytes=place.available_bytes,
    )


def _static(
    model: Llama, tokenizer: Tokenizer, config: EngineConfig, rows: _Rows, *, place: Place
) -> Rehearsal | None:
    static = dataclasses.replace(rows.config(config), reservation="static")
    try:
        return rehearsal.rehearse(model, tokenizer, static, rows.requests(), place=place)
    except CapacityError:
        return None


def _seconds(
    paged: Rehearsal, rows: _Rows, speed: tuple[float, float] | None
) -> tuple[float, float] | None:
    if speed is None or not rows.survey.rows:
        return None
    tokens = (paged.prompt_tokens + paged.new_tokens) * (
        rows.job.inputs.num_rows / rows.survey.rows
    )
    slowest, fastest = speed
    return tokens / fastest, tokens / slowest


def _situation(
    job: PlannedJob, rows: _Rows, *, model: Llama, place: Place, workspace: int
) -> Situation:
    config = job.spec.engine_config()
    return Situation(
        config=config,
        model=model.config,
        kv_dtype=limits.kv_dtype(config, model),
        max_model_len=job.max_model_len,
        longest=rows.longest,
        place=place,
        weights_bytes=memory_estimate.weights_bytes(model),
        workspace_bytes=workspace,
    )


def _changes(
    job: PlannedJob,
    rows: _Rows,
    paged: Rehearsal,
    resolved: Limits,
    *,
    model: Llama,
    place: Place,
) -> tuple[Change, ...]:
    """What would help; nothing if every row fits and none had to make room."""
    if not paged.preemptions and "kv_capacity" not in paged.rejected:
        return ()
    workspace = limits.workspace_bytes(resolved.shapes.num_lanes, model.config.vocab_size)
    return advice.changes(_situation(job, rows, model=model, place=place, workspace=workspace))


def _notes(spec: JobSpec, rows: _Rows, options: PlanOptions) -> tuple[str, ...]:
    notes = []
    if rows.survey.rows < rows.job.inputs.num_rows:
        notes.append(
            f"{rows.survey.rows:,} of {rows.job.inputs.num_rows:,} rows were looked at, in "
            f"{_PIECES} pieces evenly spread; repetitions are those among them (--rows)"
        )
    if options.new_tokens is None and not spec.sampling.ignore_eos:
        notes.append("every completion is taken to run to its limit (--new-tokens)")
    if spec.sampling.prompt_logprobs is not None:
        vocab_size = rows.job.checkpoint.config.vocab_size
        scores = limits.workspace_bytes(SCORE_ROWS, vocab_size)
        notes.append(
            f"prompt log-probabilities are computed for {SCORE_ROWS} tokens at a time, in "
            f"{size(scores)} at most, behind the sampler and not beside it; such prompts take "
            "nothing from the prefix cache"
        )
    if spec.sampling.beam_width:
        notes.append(f"beam search counts as {spec.sampling.beam_width} samples")
    if options.card is not None:
        notes.append("of a card's memory three quarters are taken to be usable, as XLA has it")
    return tuple(notes)
