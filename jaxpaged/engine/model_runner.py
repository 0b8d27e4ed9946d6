"""Runs step plans on the device: alone holds device arrays, weights and pool."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxpaged.cache import kv_pool
from jaxpaged.cache.kv_pool import KVPool
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine import sampling
from jaxpaged.engine.batch import BatchShapes, Bucket, StepBatch
from jaxpaged.model.llama import Llama
from jaxpaged.scheduler.plan import Chunk, StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave.

    Attributes:
        tokens: Each chunk that samples with its token, `sampling.INVALID_TOKEN` where the logits
            were not finite.
        num_padding: Token positions computed only to fill the bucket.
        seconds: Time from the call to the tokens on the host, without compilation.
    """

    tokens: list[tuple[Chunk, int]]
    num_padding: int
    seconds: float


class ModelRunner:
    """The model's weights, the pool, and one compiled step per bucket.

    Steps are compiled when their bucket is first met. The pool is donated to each step and
    replaced by what comes back.
    """

    def __init__(self, model: Llama, pool: KVPool, shapes: BatchShapes) -> None:
        graph, self._weights = nnx.split(model)
        self._pool = pool
        self._shapes = shapes
        # Weights are arguments of the step: closed over, they would be constants of the program.
        self._step = jax.jit(functools.partial(run_step, graph), donate_argnums=1)
        self._compiled: dict[Bucket, jax.stages.Compiled] = {}
        self.compile_seconds = 0.0

    @property
    def num_executables(self) -> int:
        """Compiled steps."""
        return len(self._compiled)

    def warm_up(self) -> None:
        """Compiles the steps of all buckets."""
        for bucket in self._shapes.buckets():
            self.compiled(bucket)

    def compiled(self, bucket: Bucket) -> jax.stages.Compiled:
        """The compiled step of a bucket."""
        if bucket not in self._compiled:
            started = time.perf_counter()
            empty = StepPlan(decodes=(), prefills=())
            arrays = step_batch.build(empty, bucket, self._shapes)
            self._compiled[bucket] = self._step.lower(self._weights, self._pool, arrays).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[bucket]

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step and waits for its tokens."""
        bucket = self._shapes.bucket(plan)
        arrays = step_batch.build(plan, bucket, self._shapes)
        step = self.compiled(bucket)
        started = time.perf_counter()
        tokens, self._pool = step(self._weights, self._pool, arrays)
        sampled = np.asarray(tokens).tolist()
        seconds = time.perf_counter() - started
        lanes = enumerate(step_batch.lane_order(plan))
        return StepResult(
            tokens=[(chunk, sampled[lane]) for lane, chunk in lanes if chunk.samples],
            num_padding=bucket.num_tokens - plan.num_tokens,
            seconds=seconds,
        )


def run_step(
    graph: nnx.GraphDef, weights: nnx.State, pool: KVPool, batch: StepBatch
) -> tuple[Int[Array, " B"], KVPool]:
    """One step of the model: the next token of every lane, and the pool."""
    model = nnx.merge(graph, weights)
    with jax.default_matmul_precision("highest" if _is_float32(weights) else "default"):
        logits, pool = model(
            pool,
            batch.token_ids,
            batch.positions,
            batch=batch.attention,
            sampled_tokens=batch.sampled_tokens,
        )
    return sampling.sample(logits, batch.sampling), pool


def allocate_pool(model: Llama, num_blocks: int, block_size: int) -> KVPool:
    """The pool for a model, in the dtype of its weights."""
    config = model.config
    shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    dtype = model.embed_tokens[...].dtype
    return kv_pool.allocate(shape, dtype, as_bits=jax.default_backend() == "cpu")


def _is_float32(weights: nnx.State) -> bool:
    # On GPUs float32 products are rounded to TF32 unless asked otherwise.
    return all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(weights))
