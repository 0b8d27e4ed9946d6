"""Logits of one prompt by the paged decoder, step by step as the engine would run it."""

import jax
import numpy as np
from flax import nnx

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.cache.capacity import PoolCapacity
from jaxpaged.engine import batch as step_batch
from jaxpaged.engine import lanes, model_runner
from jaxpaged.model.llama import Llama
from jaxpaged.request import Request
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence

MAX_PROMPT = 512

_forward = jax.jit(model_runner.forward, static_argnums=(0, 1))


def last_logits(
    model: Llama,
    prompt: list[int],
    *,
    token_budget: int = 512,
    block_size: int = 16,
    adapter: int = 0,
) -> np.ndarray:
    """Logits behind the last token, `[V]`, the prompt cut into chunks of the budget."""
    # The same sizes for all prompts, so that they share compiled steps.
    assert len(prompt) <= MAX_PROMPT
    num_blocks = -(-MAX_PROMPT // block_size)
    vocab_size = model.config.vocab_size
    shapes = step_batch.batch_shapes(
        max_num_seqs=1,
        token_budget=token_budget,
        max_model_len=MAX_PROMPT,
        capacity=PoolCapacity(num_blocks=num_blocks, block_size=block_size, bytes_per_token=1),
        is_deterministic=False,
    )
    state = lanes.allocate(
        1,
        max_model_len=MAX_PROMPT,
        table_width=shapes.table_width,
        vocab_size=vocab_size,
        has_adapters=bool(model.adapter_names),
    )
    kv_dtype = "float32" if model.embed_tokens[...].dtype == np.float32 else "bfloat16"
    pool = model_runner.allocate_pool(model, num_blocks, block_size, kv_dtype=kv_dtype)
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size), max_num_seqs=1, token_budget=token_budget
    )
    request = Request(request_id=0, prompt_ids=tuple(prompt))
    scheduler.add(Sequence(request=request, max_tokens=1, adapter=adapter))
    graph, weights = nnx.split(model)
    while True:
        plan = scheduler.schedule()
        if plan.admitted:
            rows = lanes.rows(plan.admitted, state, vocab_size=vocab_size)
            state = lanes.set_lanes(state, *rows)
        layout = step_batch.lay_out(plan)
        batch = step_batch.build(layout, shapes.bucket(layout), shapes)
        _, rows, pool = _forward(graph, shapes, weights, pool, state, batch)
        if layout.samplers:
            with jax.default_matmul_precision("highest"):
                return np.asarray(model.logits(rows, np.asarray(rows.shape[0], np.int32))[0])
