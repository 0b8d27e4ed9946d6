"""What a job's memory goes to: weights, pool, temporary arrays, and on a CPU the process itself."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.config import EngineConfig
from jaxpaged.engine import batch, lanes, limits, memory
from jaxpaged.engine.batch import SampleBatch
from jaxpaged.engine.limits import Limits
from jaxpaged.engine.model_runner import ModelRunner, allocate_pool
from jaxpaged.model.llama import Llama
from jaxpaged.request import SamplingParams
from jaxpaged.scheduler.plan import StepPlan

# By measurement on x86-64: numba and LLVM with the compiled kernels for CPUs 100 MiB, rows that are
# read, completed and written 90.
_KERNEL_BYTES = 100 * 2**20
_ROWS_BYTES = 90 * 2**20
# Of float32 logits, where a step wants the likeliest tokens and nothing else.
_GREEDY_ARRAYS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """Memory of a step beside weights and pool.

    Attributes:
        forward_bytes: Of the largest forward pass.
        sampler_bytes: Of the largest sampler.
        by_compiler: As the compiler says, not by a formula.
    """

    forward_bytes: int
    sampler_bytes: int
    by_compiler: bool = False

    @property
    def num_bytes(self) -> int:
        """The two run one behind the other."""
        return max(self.forward_bytes, self.sampler_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of a job.

    Attributes:
        weights_bytes: Weights as the engine holds them.
        pool_bytes: The whole pool.
        touched_bytes: What the job's rows write to of it; None where they were not rehearsed.
        temporary: Of a step.
        process_bytes: The interpreter with its modules, where weights share memory with it: on a
            CPU; 0 elsewhere.
        available_bytes: What there is for weights, pool and temporary arrays.
    """

    weights_bytes: int
    pool_bytes: int
    touched_bytes: int | None
    temporary: Temporary
    process_bytes: int
    available_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of weights, pool and temporary arrays."""
        return self.weights_bytes + self.pool_bytes + self.temporary.num_bytes

    @property
    def peak_bytes(self) -> int:
        """What a run is expected to hold at its highest, process included."""
        pool = self.pool_bytes if self.touched_bytes is None else self.touched_bytes
        return self.process_bytes + self.weights_bytes + pool + self.temporary.num_bytes

    def to_json(self) -> dict[str, Any]:
        """The figures in JSON's types, sums included."""
        sums = {"needed_bytes": self.needed_bytes, "peak_bytes": self.peak_bytes}
        return dataclasses.asdict(self) | sums


def weights_bytes(model: Llama) -> int:
    """Bytes of a model's weights, which need not be there."""
    leaves = jax.tree.leaves(nnx.state(model))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def process_bytes(model: Llama) -> int:
    """What the process of a run holds beside weights, pool and temporary arrays, on a CPU.

    As this process is now, with what a run loads and holds in addition.
    """
    kernels = _KERNEL_BYTES if model.attention == "llvm" else 0
    return memory.resident_bytes() + kernels + _ROWS_BYTES


def by_formula(
    model: Llama, resolved: Limits, params: SamplingParams | None, *, config: EngineConfig
) -> Temporary:
    """Temporary memory from the shapes alone.

    Of a forward pass the stream and its like (four arrays as wide as the model) and the parts of
    an MLP (three) live at once, with routed experts also rows as wide as all of them together, and
    what XLA makes of quantised weights, or the partial results of decode attention; of a sampler
    ten copies of the logits, or two where only the likeliest token is wanted.

    Args:
        model: May be without weights.
        resolved: What the settings come to.
        params: Of all rows; None if they differ.
        config: The settings.
    """
    shape, itemsize = model.config, model.dtype.itemsize
    width = 4 * shape.hidden_size + 3 * shape.intermediate_size
    if shape.experts is not None:
        inner = max(shape.hidden_size, 3 * shape.intermediate_size)
        width += shape.experts.per_token * shape.experts.count * inner
    sampler = limits.workspace_bytes(resolved.shapes.num_lanes, shape.vocab_size)
    if _is_plain(params):
        sampler = sampler * _GREEDY_ARRAYS // limits.LOGITS_ARRAYS
    forward = resolved.shapes.most_tokens * width * itemsize
    if model.attention == "xla":
        forward += _dequantized_bytes(model)
    _, most = limits.reserve(config, shape, model.attention, resolved.max_model_len)
    partials = most if most != limits.workspace_bytes(config.max_num_seqs, shape.vocab_size) else 0
    return Temporary(forward_bytes=max(forward, partials), sampler_bytes=sampler)


def _dequantized_bytes(model: Llama) -> int:
    """What XLA writes out of quantised weights, by its figures on a CPU: one matrix of int8, all of
    a layer twice of int4."""
    shape = model.config
    largest = shape.hidden_size * max(shape.intermediate_size, shape.num_heads * shape.head_dim)
    if model.weight_dtype == "int8":
        return largest * model.dtype.itemsize
    if model.weight_dtype is None:
        return 0
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    maps = shape.hidden_size * (heads + 3 * shape.intermediate_size)
    return 2 * maps * np.dtype(np.float32).itemsize


def by_compiler(
    model: Llama, resolved: Limits, params: SamplingParams | None, *, config: EngineConfig
) -> Temporary:
    """Temporary memory as the compiler says, of programs that are compiled here and not run.

    The sampler's is of everything that a row can ask for; where only the likeliest tokens are
    wanted, most of it is never touched, and the formula's counts.
    """
    shapes = resolved.shapes
    state = jax.eval_shape(
        lambda: lanes.allocate(
            shapes.num_lanes,
            max_model_len=resolved.max_model_len,
            table_width=shapes.table_width,
            vocab_size=model.config.vocab_size,
            has_adapters=bool(model.adapter_names),
        )
    )
    pool = jax.eval_shape(
        lambda: allocate_pool(
            model,
            resolved.capacity.num_blocks,
            resolved.capacity.block_size,
            kv_dtype=resolved.kv_dtype,
        )
    )
    runner = ModelRunner(model, pool, shapes, state)
    largest = max(shapes.buckets(), key=lambda bucket: bucket.num_tokens)
    arrays = batch.build(batch.lay_out(StepPlan()), largest, shapes)
    samplers = SampleBatch(
        *(np.zeros(shapes.sample_buckets[-1], np.int32) for _ in SampleBatch._fields)
    )
    forward, sampler = runner.temporary_bytes(largest, arrays, samplers)
    memory.give_back()
    if _is_plain(params):
        sampler = min(sampler, by_formula(model, resolved, params, config=config).sampler_bytes)
    return Temporary(forward_bytes=forward, sampler_bytes=sampler, by_compiler=True)


def _is_plain(params: SamplingParams | None) -> bool:
    """Whether all rows want the likeliest tokens and nothing else."""
    if params is None:
        return False
    is_more = params.temperature > 0 or params.logprobs is not None or params.beam_width
    has_bias = params.logit_bias or params.min_tokens or params.best_of
    return not (is_more or has_bias or params.needs_history)
