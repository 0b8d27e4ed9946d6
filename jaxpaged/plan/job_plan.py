"""The plan of a job, made of its rows, its model's shape and a device, without loading weights."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.config import EngineConfig
from jaxpaged.engine import attention, device, limits, memory
from jaxpaged.engine.device import Place
from jaxpaged.engine.engine import layer_loop, stretch_warning
from jaxpaged.engine.limits import Limits
from jaxpaged.engine.model_runner import SCORE_ROWS
from jaxpaged.engine.shortage import shortage, size
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.job import planned_job, validate
from jaxpaged.job.pipeline import FEED_FACTOR
from jaxpaged.job.planned_job import PlannedJob, RunOptions
from jaxpaged.job.spec import JobSpec
from jaxpaged.model import adapters
from jaxpaged.model.llama import Llama
from jaxpaged.plan import advice, memory_estimate, rehearsal
from jaxpaged.plan.advice import Change, Situation
from jaxpaged.plan.cards import Card
from jaxpaged.plan.memory_estimate import MemoryEstimate
from jaxpaged.plan.rehearsal import Rehearsal
from jaxpaged.plan.sampled_rows import SampledRows
from jaxpaged.plan.survey import Survey

# A sample is at least so many times what the engine is given at once, so that the lanes are full
# for most of the time.
_LEAST_FILLS = 4


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
        weight_dtype: What those of linear maps are stored as.
        kv_dtype: Of the KV pool.
        implementation: Who computes attention, and why.
        max_model_len: Most tokens of a sequence.
        max_num_seqs: Lanes.
    """

    device: str
    dtype: str
    weight_dtype: str
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
        scale: All rows for each one that was looked at.
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
    scale: float
    memory: MemoryEstimate | None = None
    capacity: PoolCapacity | None = None
    paged: Rehearsal | None = None
    static: Rehearsal | None = None
    seconds: tuple[float, float] | None = None
    shortage: CapacityError | None = None
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

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
            "rows_ending_in_answer": survey.answered,
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
        ConfigError: The job, or the model's files, are not right, or do not suit each other; or two
            options exclude each other.
        InputSchemaError: The input is missing, broken, or not what the job needs.
    """
    if options.compiles and options.card is not None:
        raise ConfigError(
            "--compile asks the compiler of this machine's device; leave --device out"
        )
    job = planned_job.plan(spec, RunOptions(looks_only=True))
    job.check_model()
    place = _place(options.card)
    config = spec.engine_config()
    model = _abstract_model(job, config, place)
    config = dataclasses.replace(config, dtype=_dtype(model))
    tokenizer = job.checkpoint.tokenizer()
    process = memory_estimate.process_bytes(model)
    least = _LEAST_FILLS * FEED_FACTOR * config.max_num_seqs
    rows = SampledRows(
        job, tokenizer, max_rows=max(options.max_rows, least), max_new=options.new_tokens
    )
    weights = memory_estimate.weights_bytes(model)
    beside = Place(place.device, max(0, place.available_bytes - weights))
    target = _target(job, model, place)
    try:
        shapes = job.checkpoint.shapes() | adapters.shapes(model.config, job.adapters)
        memory.check_weights(
            shapes,
            dtype=_dtype(model),
            weight_dtype=model.weight_dtype,
            available=place.available_bytes,
        )
        resolved = limits.resolve(
            config, model, device=place.device, available=beside.available_bytes
        )
    except CapacityError as error:
        collections.deque(rows.requests(), maxlen=0)
        return JobPlan(
            target=target,
            total_rows=job.inputs.num_rows,
            survey=rows.survey,
            scale=rows.scale,
            shortage=error,
            changes=advice.changes(_situation(config, model, job, rows, place=place)),
        )
    config = _as_scored(config, spec)
    rehearse = functools.partial(
        rehearsal.rehearse, model, tokenizer, place=beside, max_new=options.new_tokens
    )
    paged = rehearse(config, rows.requests())
    for code, ids in paged.rejected_ids.items():
        rows.reject(code, ids, paged.rejected[code])
    needs = _memory(model, resolved, job, paged=paged, scale=rows.scale, options=options)
    needs = dataclasses.replace(
        needs,
        process_bytes=process if place.device.is_cpu else 0,
        available_bytes=place.available_bytes,
    )
    error = _overdrawn(needs, config, resolved)
    is_tight = error is not None or paged.preemptions or "kv_capacity" in paged.rejected
    situation = _situation(config, model, job, rows, place=place)
    return JobPlan(
        target=target,
        total_rows=job.inputs.num_rows,
        survey=rows.survey,
        scale=rows.scale,
        memory=needs,
        capacity=resolved.capacity,
        paged=paged,
        static=_static(rehearse, config, rows),
        seconds=_seconds(paged, rows, options.speed),
        shortage=error,
        changes=advice.changes(situation) if is_tight else (),
        notes=(*_notes(job, rows, options), *_stretch(resolved, model)),
    )


def _place(card: Card | None) -> Place:
    if card is not None:
        return Place(card.device, card.available_bytes)
    return Place(device.here(), memory.available_bytes())


def _abstract_model(job: PlannedJob, config: EngineConfig, place: Place) -> Llama:
    """The decoder without weights."""
    shape, dtype = job.model_config, limits.dtype(config, place.device)
    choice = attention.choose(config, shape, device=place.device)

    def made() -> Llama:
        model = Llama(
            shape,
            dtype=jnp.dtype(dtype),
            layer_loop=layer_loop(place.device),
            attention=choice.implementation,
            weight_dtype=limits.weight_dtype(config, shape),
        )
        adapters.attach(model, job.adapters)
        return model

    return nnx.eval_shape(made)


def _dtype(model: Llama) -> Any:  # noqa: ANN401  (a literal, for the type checker)
    return str(model.dtype)


def _target(job: PlannedJob, model: Llama, place: Place) -> Target:
    config = job.spec.engine_config()
    choice = attention.choose(config, model.config, device=place.device)
    return Target(
        device=place.device.name,
        dtype=str(model.dtype),
        weight_dtype=model.weight_dtype or str(model.dtype),
        kv_dtype=limits.kv_dtype(config, model),
        implementation=f"{choice.implementation} ({choice.reason})",
        max_model_len=job.max_model_len,
        max_num_seqs=job.spec.engine.max_num_seqs,
    )


def _as_scored(config: EngineConfig, spec: JobSpec) -> EngineConfig:
    """The settings as they are for these rows: where prompt tokens are scored, none of them comes
    from the prefix cache."""
    if spec.sampling.prompt_logprobs is None:
        return config
    return dataclasses.replace(config, prefix_cache=False)


def _memory(
    model: Llama,
    resolved: Limits,
    job: PlannedJob,
    *,
    paged: Rehearsal,
    scale: float,
    options: PlanOptions,
) -> MemoryEstimate:
    estimate = memory_estimate.by_compiler if options.compiles else memory_estimate.by_formula
    sampling = job.spec.sampling
    # What a column sets is not known before its rows are read.
    by_row = any(column is not None for column in sampling.columns.model_dump().values())
    params = None if by_row else job.spec.sampling_params()
    capacity = resolved.capacity
    touched = min(capacity.num_blocks, round(paged.touched_blocks * scale))
    return MemoryEstimate(
        weights_bytes=memory_estimate.weights_bytes(model),
        pool_bytes=capacity.num_bytes,
        # Only with its kernels a CPU's pool takes memory as it is written.
        touched_bytes=touched * capacity.block_size * capacity.bytes_per_token
        if model.attention == "llvm"
        else None,
        temporary=estimate(model, resolved, params, config=job.spec.engine_config()),
        process_bytes=0,
        available_bytes=0,
    )


def _overdrawn(
    needs: MemoryEstimate, config: EngineConfig, resolved: Limits
) -> CapacityError | None:
    """The error of a sum that there is no memory for, which an engine finds out in its first
    steps."""
    if needs.needed_bytes <= needs.available_bytes:
        return None
    changes = [
        f"engine.memory_utilization: below {config.memory_utilization}",
        "engine.max_num_seqs: fewer",
        "a device with more memory",
    ]
    if needs.temporary.forward_bytes > needs.temporary.sampler_bytes:
        changes.insert(0, f"engine.max_num_batched_tokens: below {resolved.token_budget:,}")
    return shortage(
        "weights, KV pool and temporary arrays together",
        needed=needs.needed_bytes,
        available=needs.available_bytes,
        changes=changes,
    )


def _static(
    rehearse: Callable[..., Rehearsal], config: EngineConfig, rows: SampledRows
) -> Rehearsal | None:
    try:
        return rehearse(dataclasses.replace(config, reservation="static"), rows.requests())
    except CapacityError:
        return None


def _seconds(
    paged: Rehearsal, rows: SampledRows, speed: tuple[float, float] | None
) -> tuple[float, float] | None:
    if speed is None or not rows.survey.rows:
        return None
    tokens = (paged.prompt_tokens + paged.new_tokens) * rows.scale
    slowest, fastest = speed
    return tokens / fastest, tokens / slowest


def _situation(
    config: EngineConfig, model: Llama, job: PlannedJob, rows: SampledRows, *, place: Place
) -> Situation:
    return Situation(
        config=config,
        model=model.config,
        dtype=_dtype(model),
        kv_dtype=limits.kv_dtype(config, model),
        max_model_len=job.max_model_len,
        longest=rows.longest,
        place=place,
        weights_bytes=memory_estimate.weights_bytes(model),
        narrow_weights_bytes=_narrow_weights_bytes(config, model, job, place=place),
    )


def _narrow_weights_bytes(
    config: EngineConfig, model: Llama, job: PlannedJob, *, place: Place
) -> int | None:
    if model.weight_dtype is not None or model.config.experts is not None:
        return None
    narrow = dataclasses.replace(config, weight_dtype="int8")
    return memory_estimate.weights_bytes(_abstract_model(job, narrow, place))


def _stretch(resolved: Limits, model: Llama) -> tuple[str, ...]:
    """What it costs that sequences are longer than the model was made for."""
    warning = stretch_warning(resolved, model.config.own_longest or model.config.max_len)
    return () if warning is None else (warning,)


def _notes(job: PlannedJob, rows: SampledRows, options: PlanOptions) -> tuple[str, ...]:
    spec = job.spec
    notes, _ = validate.look_at_output(job)
    if job.seen is not None and not notes:
        notes.append("the output folder has rows of this job already; the plan is of all rows")
    if rows.survey.rows < job.inputs.num_rows:
        notes.append(
            f"{rows.survey.rows:,} of {job.inputs.num_rows:,} rows were looked at, in "
            f"{len(rows.units)} pieces evenly spread (--rows): what is about is scaled up, the "
            "longest row and repetitions are those among them"
        )
    if options.new_tokens is None and not spec.sampling.ignore_eos:
        notes.append("every completion is taken to run to its limit (--new-tokens)")
    if spec.sampling.prompt_logprobs is not None:
        vocab_size = job.checkpoint.config.vocab_size
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
