"""Logits of one prompt through the paged model, chunk by chunk, without the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine.model_runner import allocate_pool
from jaxpaged.model.llama import Llama
from jaxpaged.request import Request
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence

MAX_PROMPT = 512


def last_logits(
    model: Llama, prompt_ids: list[int], *, token_budget: int = 512, block_size: int = 16
) -> np.ndarray:
    """Logits behind the prompt's last token, `[V]`, computed in chunks of the budget."""
    # The same pool for all prompts, so that they share compiled steps.
    num_blocks = -(-MAX_PROMPT // block_size)
    assert len(prompt_ids) <= MAX_PROMPT
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size), max_num_seqs=1, token_budget=token_budget
    )
    shapes = step_batch.batch_shapes(
        max_num_seqs=1,
        token_budget=token_budget,
        max_model_len=num_blocks * block_size,
        capacity=PoolCapacity(num_blocks=num_blocks, block_size=block_size, bytes_per_token=1),
        vocab_size=model.config.vocab_size,
    )
    graph, weights = nnx.split(model)
    pool = allocate_pool(model, num_blocks, block_size)
    scheduler.add(
        Sequence(request=Request(request_id=0, prompt_ids=tuple(prompt_ids)), max_tokens=1)
    )
    while True:
        plan = scheduler.schedule()
        arrays = step_batch.build(plan, shapes.bucket(plan), shapes)
        logits, pool = forward(graph, weights, pool, arrays)
        scheduler.advance(plan)
        if plan.chunks[0].samples:
            return np.asarray(logits[0])


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, weights, pool, batch):
    """Logits of every lane and the pool."""
    return nnx.merge(graph, weights)(
        pool,
        jnp.asarray(batch.token_ids),
        jnp.asarray(batch.positions),
        batch=batch.attention,
        sampled_tokens=jnp.asarray(batch.sampled_tokens),
    )
