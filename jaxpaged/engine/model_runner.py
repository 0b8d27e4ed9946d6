"""Runs step plans on the device: alone holds device arrays, weights, pool and lane state.

Everything is dispatched and nothing waited for, until a result is taken: the device works on one
step while the host reads the tokens of the one before and plans the next.
"""

import collections.abc
import dataclasses
import functools
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
from jaxpaged.cache import kv_pool
from jaxpaged.cache.kv_pool import KVPool
from jaxpaged.config import KVDType
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine import device, lanes, sampling
from jaxpaged.engine.batch import BatchShapes, Bucket, Layout, SampleBatch, StepBatch
from jaxpaged.engine.lanes import LaneState
from jaxpaged.engine.limits import Limits
from jaxpaged.engine.runner import ScoredChunk, StepResult
from jaxpaged.engine.sampling import LaneParams, Sampled
from jaxpaged.model.attention import AttentionBatch
from jaxpaged.model.llama import Llama
from jaxpaged.scheduler.plan import Chunk, Sampler, StepPlan
from jaxpaged.sequence import Sequence, SequenceStatus
from jaxpaged.shapes import AnyArray

_COPY_ROWS = 8
SCORE_ROWS = 64
"""Prompt tokens that are scored at a time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFlight:
    """A step that was dispatched.

    Attributes:
        plan: What it does.
        num_padding: Token positions computed only to fill the bucket.
        is_starved: The device had run out of work by then.
        sampled: The sampler's arrays, on the device; None if nothing is sampled.
        samplers: Who samples.
        scores: Chunks whose prompt tokens are scored, with arrays on the device.
        marker: An array that is ready when the step is done.
    """

    plan: StepPlan
    num_padding: int
    is_starved: bool
    sampled: Sampled | None
    samplers: tuple[Sampler, ...]
    scores: tuple[tuple[Chunk, int, Sampled], ...]
    marker: AnyArray

    def result(self) -> StepResult:
        """What the step gave; waits for it."""
        jax.block_until_ready(self.marker)
        sampled = self.sampled
        if sampled is None:
            sampled = _no_rows()
        elif not any(_wants_logprobs(sampler.sequence) for sampler in self.samplers):
            # Alternatives that nobody asked for stay where they are.
            sampled = _no_rows()._replace(tokens=np.asarray(sampled.tokens))
        else:
            sampled = Sampled(*(np.asarray(part) for part in sampled))
        return StepResult(
            samplers=self.samplers,
            sampled=sampled,
            scores=tuple(
                ScoredChunk(
                    sequence=chunk.sequence,
                    start=chunk.start + 1,
                    sampled=Sampled(*(np.asarray(part)[:count] for part in scored)),
                )
                for chunk, count, scored in self.scores
            ),
        )


class ModelRunner:
    """The model's weights, the pool, the lane state, and the compiled programs.

    Programs are compiled when first met: a forward pass per bucket, a sampler per sampler count,
    and one of each kind that moves blocks or sets lanes. Pool and lane state are donated to each
    and replaced by what comes back.
    """

    def __init__(self, model: Llama, pool: KVPool, shapes: BatchShapes, state: LaneState) -> None:
        graph, self._weights = nnx.split(model)
        self._pool = pool
        self._state = state
        self._shapes = shapes
        self._vocab_size = model.config.vocab_size
        self._swapped: dict[Sequence, list[Any]] = {}
        self._last: AnyArray | None = None
        self._compiled: dict[object, jax.stages.Compiled] = {}
        # Weights are arguments of the step: closed over, they would be constants of the program.
        self._forward = jax.jit(functools.partial(forward, graph, shapes), donate_argnums=1)
        self._sample = jax.jit(functools.partial(sample, graph), donate_argnums=1)
        self._score = jax.jit(functools.partial(score, graph))
        self._set_lanes = jax.jit(lanes.set_lanes, donate_argnums=0)
        self._update_tables = jax.jit(lanes.update_tables, donate_argnums=0)
        self._copy_blocks = jax.jit(kv_pool.copy_blocks, donate_argnums=0)
        self._read_blocks = jax.jit(kv_pool.read_blocks)
        self._write_blocks = jax.jit(kv_pool.write_blocks, donate_argnums=0)
        self.compile_seconds = 0.0

    @classmethod
    def allocate(cls, model: Llama, limits: Limits) -> "ModelRunner":
        """The runner of a loaded model, with a new pool and lanes that were not set yet."""
        shapes, capacity = limits.shapes, limits.capacity
        state = lanes.allocate(
            shapes.num_lanes,
            max_model_len=limits.max_model_len,
            table_width=shapes.table_width,
            vocab_size=model.config.vocab_size,
            has_adapters=bool(model.adapter_names),
        )
        pool = allocate_pool(
            model, capacity.num_blocks, capacity.block_size, kv_dtype=limits.kv_dtype
        )
        return cls(model, pool, shapes, state)

    @property
    def num_executables(self) -> int:
        """Compiled programs."""
        return len(self._compiled)

    def warm_up(
        self, prompts: collections.abc.Sequence[tuple[int, ...]], *, is_shared: bool
    ) -> None:
        """Compiles everything this engine can ever need, and so runs none of it.

        Args:
            prompts: The token buckets are fitted to them.
            is_shared: Whether what prompts have in common is computed once.
        """
        self._shapes = step_batch.fit(self._shapes, prompts, is_shared=is_shared)
        shapes, empty = self._shapes, step_batch.lay_out(StepPlan())
        buckets = shapes.buckets()
        for bucket in buckets:
            arrays = step_batch.build(empty, bucket, shapes)
            self._program(bucket, self._forward, self._weights, self._pool, self._state, arrays)
        arrays = step_batch.build(empty, buckets[0], shapes)
        hidden, rows, _ = jax.eval_shape(
            self._forward, self._weights, self._pool, self._state, arrays
        )
        targets = self._score_arguments([], 0)
        self._program("score", self._score, self._weights, hidden, *targets)
        for size in shapes.sample_buckets:
            batch = SampleBatch(*(np.zeros(size, np.int32) for _ in SampleBatch._fields))
            self._program(("sample", size), self._sample, *self._sampler_arguments(rows, batch))
        self._program(
            "set_lanes",
            self._set_lanes,
            self._state,
            *lanes.rows([], self._state, vocab_size=self._vocab_size),
        )
        self._program(
            "update_tables",
            self._update_tables,
            self._state,
            *lanes.table_updates([], shapes.num_lanes),
        )
        ids = np.zeros(_COPY_ROWS, np.int32)
        self._program("copy", self._copy_blocks, self._pool, ids, ids)
        self._program("read", self._read_blocks, self._pool, ids)
        blocks = jax.eval_shape(kv_pool.read_blocks, self._pool, ids)
        self._program("write", self._write_blocks, self._pool, ids, blocks)

    def temporary_bytes(
        self, bucket: Bucket, arrays: StepBatch, samplers: SampleBatch
    ) -> tuple[int, int]:
        """Temporary memory of a forward pass and of a sampler, as the compiler says.

        Nothing is run: weights, pool and lanes may be shapes alone.
        """
        arguments = (self._weights, self._pool, self._state, arrays)
        _, rows, _ = jax.eval_shape(self._forward, *arguments)
        programs = (
            self._program(bucket, self._forward, *arguments),
            self._program(
                ("sample", len(samplers.lanes)),
                self._sample,
                *self._sampler_arguments(rows, samplers),
            ),
        )
        forward, sampler = (program.memory_analysis() for program in programs)
        assert forward is not None, "this compiler does not say what memory a program takes"
        assert sampler is not None, "this compiler does not say what memory a program takes"
        return forward.temp_size_in_bytes, sampler.temp_size_in_bytes

    def prepare(self, plan: StepPlan) -> None:
        """Starts what comes before the step: moves blocks and sets lanes."""
        self._move_blocks(plan)
        self._set_state(plan)

    def dispatch(self, plan: StepPlan) -> DeviceFlight:
        """Starts a step that was prepared; the result can be taken from what it returns."""
        is_starved = self._last is not None and cast(Any, self._last).is_ready()
        layout = step_batch.lay_out(plan)
        bucket = self._shapes.bucket(layout)
        arrays = step_batch.build(layout, bucket, self._shapes)
        arguments = (self._weights, self._pool, self._state, arrays)
        hidden, rows, self._pool = self._run(bucket, self._forward, *arguments)
        sampled = self._dispatch_sampler(layout, rows) if layout.samplers else None
        scores = self._dispatch_scores(layout, hidden)
        marker = hidden if sampled is None else sampled.tokens
        self._last = marker
        return DeviceFlight(
            plan=plan,
            num_padding=bucket.num_tokens - plan.num_tokens,
            is_starved=is_starved,
            sampled=sampled,
            samplers=tuple(sampler for sampler, _, _ in layout.samplers),
            scores=scores,
            marker=marker,
        )

    def _dispatch_sampler(self, layout: Layout, rows: Array) -> Sampled:
        arrays = step_batch.build_samples(layout, self._shapes)
        key = ("sample", len(arrays.lanes))
        arguments = self._sampler_arguments(rows, arrays)
        sampled, tokens = self._run(key, self._sample, *arguments)
        self._state = self._state._replace(tokens=tokens)
        return sampled

    def _sampler_arguments(self, rows: Any, batch: SampleBatch) -> tuple[Any, ...]:  # noqa: ANN401
        # Without the block tables: one sampler suits pools of all shapes, also from the cache.
        return self._weights, self._state.tokens, self._state.params, rows, batch

    def _dispatch_scores(
        self, layout: Layout, hidden: Array
    ) -> tuple[tuple[Chunk, int, Sampled], ...]:
        """Scores of the prompt tokens behind those of the segments, piece by piece."""
        found: list[tuple[Chunk, int, Sampled]] = []
        at = len(layout.decode_lanes)
        for chunk, length in layout.segments:
            sequence = chunk.sequence
            if sequence.request.params.prompt_logprobs is not None:
                # The token behind the prompt's last one is sampled, not scored.
                last = min(length, sequence.num_prompt - 1 - chunk.start)
                for offset in range(0, last, SCORE_ROWS):
                    count = min(SCORE_ROWS, last - offset)
                    first = chunk.start + offset + 1
                    targets = sequence.token_ids[first : first + count]
                    arrays = self._score_arguments(targets, at + offset)
                    scored = self._run("score", self._score, self._weights, hidden, *arrays)
                    piece = dataclasses.replace(chunk, start=chunk.start + offset)
                    found.append((piece, count, scored))
            at += length
        return tuple(found)

    def _score_arguments(
        self, targets: collections.abc.Sequence[int], first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = np.zeros(SCORE_ROWS, np.int32)
        padded = np.zeros(SCORE_ROWS, np.int32)
        rows[: len(targets)] = np.arange(first, first + len(targets))
        padded[: len(targets)] = targets
        return rows, padded

    def _move_blocks(self, plan: StepPlan) -> None:
        num_blocks = self._pool.k.values.shape[1]
        for sequence in [s for s in self._swapped if s.status is SequenceStatus.FINISHED]:
            del self._swapped[sequence]
        for sequence, block_ids in plan.swap_outs:
            self._swapped[sequence] = [
                self._run("read", self._read_blocks, self._pool, ids)
                for ids in _padded(block_ids, num_blocks - 1)
            ]
            for blocks in self._swapped[sequence]:
                for part in jax.tree.leaves(blocks):
                    part.copy_to_host_async()
        for sequence, block_ids in plan.swap_ins:
            saved = self._swapped.pop(sequence)
            for ids, blocks in zip(_padded(block_ids, num_blocks), saved, strict=True):
                self._pool = self._run("write", self._write_blocks, self._pool, ids, blocks)
        sources = [copy.source for copy in plan.copies]
        targets = [copy.target for copy in plan.copies]
        for ids, into in zip(
            _padded(sources, num_blocks - 1), _padded(targets, num_blocks), strict=True
        ):
            self._pool = self._run("copy", self._copy_blocks, self._pool, ids, into)

    def _set_state(self, plan: StepPlan) -> None:
        for first in range(0, len(plan.admitted), lanes.SET_ROWS):
            group = plan.admitted[first : first + lanes.SET_ROWS]
            rows = lanes.rows(group, self._state, vocab_size=self._vocab_size)
            self._state = self._run("set_lanes", self._set_lanes, self._state, *rows)
        for first in range(0, len(plan.table_updates), lanes.UPDATE_ROWS):
            updates = plan.table_updates[first : first + lanes.UPDATE_ROWS]
            arrays = lanes.table_updates(updates, self._shapes.num_lanes)
            self._state = self._run("update_tables", self._update_tables, self._state, *arrays)

    def _run(self, key: object, function: Any, *arguments: Any) -> Any:  # noqa: ANN401
        return self._program(key, function, *arguments)(*arguments)

    def _program(self, key: object, function: Any, *arguments: Any) -> jax.stages.Compiled:  # noqa: ANN401
        """The compiled program of a kind."""
        if key not in self._compiled:
            started = time.perf_counter()
            options = device.compiler_options()
            self._compiled[key] = function.lower(*arguments).compile(compiler_options=options)
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]


def forward(
    graph: nnx.GraphDef,
    shapes: BatchShapes,
    weights: nnx.State,
    pool: KVPool,
    state: LaneState,
    batch: StepBatch,
) -> tuple[Float[Array, "T M"], Float[Array, "B M"], KVPool]:
    """The decoder over one step's tokens.

    Returns:
        The stream behind the last layer, of one length for all buckets; its rows that are sampled
        behind; and the pool.
    """
    model: Llama = nnx.merge(graph, weights)
    safe = jnp.minimum(jnp.asarray(batch.token_lanes), shapes.num_lanes - 1)
    positions = jnp.asarray(batch.positions)
    attention = AttentionBatch(
        slot_mapping=lanes.slots(
            jnp.asarray(state.tables),
            batch.token_lanes,
            positions,
            block_size=shapes.block_size,
            num_slots=shapes.num_slots,
        ),
        block_tables=jnp.asarray(state.tables),
        token_lanes=safe[: shapes.max_decodes],
        context_lens=positions[: shapes.max_decodes] + 1,
        num_decodes=batch.num_decodes,
        num_tokens=batch.num_tokens,
        tiles=batch.tiles,
    )
    token_ids = jnp.asarray(state.tokens)[safe, positions]
    adapters = None if state.adapters is None else jnp.asarray(state.adapters)[safe]
    with jax.default_matmul_precision(_precision(model)):
        hidden, pool = model(pool, token_ids, positions, batch=attention, adapters=adapters)
    rows = hidden[jnp.asarray(batch.sampled_tokens)]
    return jnp.pad(hidden, ((0, shapes.most_tokens - hidden.shape[0]), (0, 0))), rows, pool


def sample(
    graph: nnx.GraphDef,
    weights: nnx.State,
    history: Int[AnyArray, "L C"],
    lane_params: LaneParams,
    rows: Float[Array, "X M"],
    batch: SampleBatch,
) -> tuple[Sampled, Int[Array, "L C"]]:
    """The next token of every sampler, and the lanes' tokens with it."""
    model: Llama = nnx.merge(graph, weights)
    lane_ids = jnp.asarray(batch.lanes)
    history = jnp.asarray(history)
    num_samplers = jnp.sum(lane_ids < history.shape[0])
    with jax.default_matmul_precision(_precision(model)):
        logits = model.logits(rows[: lane_ids.shape[0]], num_samplers)
    safe = jnp.minimum(lane_ids, history.shape[0] - 1)
    params = jax.tree.map(lambda part: jnp.asarray(part)[safe], lane_params)
    sampled = sampling.sample(logits, params, history[safe], jnp.asarray(batch.num_tokens))
    written = jnp.maximum(sampled.tokens, 0)
    return sampled, history.at[lane_ids, jnp.asarray(batch.num_tokens)].set(written, mode="drop")


def score(
    graph: nnx.GraphDef,
    weights: nnx.State,
    hidden: Float[Array, "T M"],
    rows: Int[AnyArray, " R"],
    targets: Int[AnyArray, " R"],
) -> Sampled:
    """How likely the model found given tokens behind rows of the stream."""
    model: Llama = nnx.merge(graph, weights)
    with jax.default_matmul_precision(_precision(model)):
        logits = model.logits(hidden[jnp.asarray(rows)], jnp.int32(rows.shape[0]))
    return sampling.score_prompt(logits, jnp.asarray(targets))


def allocate_pool(model: Llama, num_blocks: int, block_size: int, *, kv_dtype: KVDType) -> KVPool:
    """The pool for a model."""
    config = model.config
    shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    # With its kernels a CPU's memory is taken block by block, when a block is first written.
    new = pallas_kernels.untouched if model.attention == "llvm" else jnp.zeros
    return kv_pool.allocate(shape, kv_dtype, as_bits=jax.default_backend() == "cpu", new=new)


def _wants_logprobs(sequence: Sequence) -> bool:
    params = sequence.request.params
    return bool(params.logprobs is not None or params.best_of or params.beam_width)


def _no_rows() -> Sampled:
    empty = np.zeros(0, np.float32)
    return Sampled(np.zeros(0, np.int32), empty, np.zeros(0, np.int32), empty, empty)


def _padded(
    block_ids: collections.abc.Sequence[int], filler: int
) -> collections.abc.Iterator[np.ndarray]:
    """The ids in groups of one size, the last one filled up."""
    for first in range(0, len(block_ids), _COPY_ROWS):
        group = np.full(_COPY_ROWS, filler, np.int32)
        part = block_ids[first : first + _COPY_ROWS]
        group[: len(part)] = part
        yield group


def _precision(model: Llama) -> str:
    # On GPUs float32 products are rounded to TF32 unless asked otherwise.
    return "highest" if model.dtype == jnp.float32 else "default"
