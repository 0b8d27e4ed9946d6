"""Whole engines on random weights in the shapes of Llama 3.2 1B and Llama 3.1 8B.

The weights are made on the device, nothing is read. Prompts are random token ids; completions have
a fixed length. What comes out cannot be right or wrong, only whole: as many valid tokens as were
asked for, and every block given back.

A decode step cannot be faster than the memory: it reads all weights but the embedding once, and
every live key and value once. That many bytes at the speed of a copy are the floor, and steps that
only decoded are held against theirs.

Peak memory is the device's own figure for the whole life of a process, so each model has one for
itself, and the copy is measured when the engine is gone.
"""

import collections.abc
import contextlib
import dataclasses
import functools
import gc
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import copy_rate
import jax
import jax.numpy as jnp
import numpy as np
from case_stream import Case, Deadline, LeftOut, tell
from flax import nnx
from llama_shapes import MODELS

from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine, attention, device, limits, memory
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.llama import Llama
from jaxpaged.request import Completion, Request, SamplingParams

LEAST_OF_FLOOR = 0.85
"""Of the floor's time, that decode steps may take without the count being wrong."""
DTYPE = "bfloat16"
STD = 0.02
"""Of the weights."""
KEPT = 4
"""Completions whose tokens go into the report."""
SPARE_SECONDS = 4.0
"""Left for the figures when stepping has to end."""
BEAT_SECONDS = 10.0
"""Between signs of life: a process that tells nothing for long is ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What an engine is given.

    Attributes:
        model: Its shape.
        config: The engine's settings.
        num_requests: All at once.
        prompt_lens: The shortest and the longest prompt, in tokens.
        new_tokens: Of each completion.
    """

    model: ModelConfig
    config: EngineConfig
    num_requests: int
    prompt_lens: tuple[int, int]
    new_tokens: int

    def requests(self) -> list[Request]:
        """The same every time; every fourth one samples, the others are greedy."""
        rng = np.random.default_rng(0)
        lens = rng.integers(*self.prompt_lens, size=self.num_requests, endpoint=True)
        return [
            Request(
                request_id=index,
                prompt_ids=tuple(rng.integers(0, self.model.vocab_size, length).tolist()),
                params=SamplingParams(
                    max_tokens=self.new_tokens,
                    ignore_eos=True,
                    temperature=1.0 if index % 4 == 3 else 0.0,
                ),
                address=index,
            )
            for index, length in enumerate(lens)
        ]


class NumberTokenizer:
    """What an engine needs of a tokenizer: the text of a token is its number."""

    eos_ids: frozenset[int] = frozenset()
    special_tokens: collections.abc.Mapping[str, int] = {}

    def encode_text(self, text: str) -> list[int]:
        """The numbers in a text."""
        return [int(number) for number in text.split()]

    encode = encode_text

    def decode(self, ids: collections.abc.Sequence[int]) -> str:
        """The numbers as text."""
        return "".join(f" {token}" for token in ids)

    def token_text(self, token_id: int) -> str:
        """The number as text."""
        return f" {token_id}"


def random_model(config: ModelConfig, implementation: Any) -> Llama:  # noqa: ANN401
    """A decoder with weights made on the device, a leaf at a time; norms are ones."""
    abstract = nnx.eval_shape(
        lambda: Llama(
            config, dtype=jnp.dtype(DTYPE), layer_loop="unrolled", attention=implementation
        )
    )
    graph, state = nnx.split(abstract)

    @functools.partial(jax.jit, static_argnames="shape")
    def normal(seed: np.uint32, shape: tuple[int, ...]) -> jax.Array:
        # In bfloat16 from the start: the largest leaf has half a billion numbers.
        return jax.random.normal(jax.random.key(seed), shape, DTYPE) * jnp.asarray(STD, DTYPE)

    filled = []
    for path, variable in nnx.to_flat_state(state):
        shape = variable.get_value().shape
        # By name: the order of the leaves is the container's affair.
        seed = zlib.crc32("/".join(map(str, path)).encode())
        is_norm = path[-1] == "scale"
        array = jnp.ones(shape, DTYPE) if is_norm else normal(np.uint32(seed), shape)
        filled.append((path, variable.replace(array)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def weight_bytes(model: Llama) -> tuple[int, int]:
    """Of all weights, and of those that a decode step reads."""
    _, state = nnx.split(model)
    all_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # The embedding of a tied model is its head; of another one, only the step's tokens are read.
    unread = 0 if model.lm_head is None else model.embed_tokens[...].nbytes
    return all_bytes, all_bytes - unread


@dataclasses.dataclass(slots=True, kw_only=True)
class Steps:
    """What the steps of an engine came to.

    Attributes:
        completions: As they came.
        seconds: From the first step to the end of the last one.
        floor_bytes: That steps which only decoded had to read.
        decode_steps: How many those were.
        is_whole: All requests were completed.
    """

    completions: list[Completion]
    seconds: float
    floor_bytes: int
    decode_steps: int
    is_whole: bool


def run_steps(engine: Engine, read_bytes: int, deadline: Deadline) -> Steps:
    """Steps the engine until it has no work, or there is no time.

    Args:
        engine: With requests.
        read_bytes: Weights that a decode step reads.
        deadline: When to stop at the latest.
    """
    stats, completions = engine.stats, []
    floor_bytes, decode_steps, live = 0, 0, 0
    started = beat = time.perf_counter()
    while engine.has_work() and deadline.left() > SPARE_SECONDS:
        if time.perf_counter() - beat > BEAT_SECONDS:
            beat = time.perf_counter()
            tell({"decode_steps": decode_steps})
        decoded, live_before = stats.decode_tokens, stats.live_slot_steps
        completions += engine.step()
        # The result that came back is of the step before, whose live tokens were counted then.
        if stats.decode_tokens > decoded:
            floor_bytes += read_bytes + live * engine.capacity.bytes_per_token
            decode_steps += 1
        live = stats.live_slot_steps - live_before
    return Steps(
        completions=completions,
        seconds=time.perf_counter() - started,
        floor_bytes=floor_bytes,
        decode_steps=decode_steps,
        is_whole=not engine.has_work(),
    )


def faults(workload: Workload, steps: Steps) -> list[str]:
    """What is wrong with the completions."""
    found = []
    for completion in steps.completions:
        tokens = completion.token_ids
        is_valid = all(0 <= token < workload.model.vocab_size for token in tokens)
        if completion.finish_reason != "length" or not is_valid:
            found.append(f"request {completion.request_id}: {completion.finish_reason}, {tokens}")
        elif len(tokens) != workload.new_tokens:
            found.append(f"request {completion.request_id}: {len(tokens)} tokens")
    ids = sorted(completion.request_id for completion in steps.completions)
    if steps.is_whole and ids != list(range(workload.num_requests)):
        found.append(f"{len(ids)} completions of {workload.num_requests} requests")
    if not steps.is_whole and not steps.decode_steps:
        found.append("no time for a decode step")
    return found


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Gives signs of life meanwhile, whatever happens: only the clock of the section ends it."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_SECONDS):
            tell({"compiles": True})

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def floor_faults(decode_seconds: float, floor_seconds: float) -> list[str]:
    """What is wrong with the count if decode steps were faster than the memory."""
    # Reading alone may be somewhat faster than a copy, which the floor is taken from.
    if decode_seconds >= LEAST_OF_FLOOR * floor_seconds:
        return []
    share = decode_seconds / floor_seconds
    return [f"decode took {share:.3f} of its floor: bytes, seconds or the copy are counted wrong"]


def run(workload: Workload, deadline: Deadline) -> dict[str, object]:
    """Makes the model, runs the engine, measures the copy; everything that came out.

    Raises:
        LeftOut: The weights do not fit into memory.
    """
    model_config = workload.model
    choice = attention.choose(workload.config, model_config, device=device.here())
    needed, available = 2 * num_parameters(model_config), memory.available_bytes()
    if needed > available:
        raise LeftOut(
            f"weights of {needed / 2**30:.1f} GiB, {available / 2**30:.1f} are free for JAX"
        )
    phases: dict[str, float] = {}

    def phase(name: str, started: float) -> None:
        phases[name] = round(time.perf_counter() - started, 2)
        tell({"phase": name, "seconds": phases[name]})

    started = time.perf_counter()
    model = random_model(model_config, choice.implementation)
    jax.block_until_ready(jax.tree.leaves(nnx.split(model)[1]))
    phase("weights", started)
    all_bytes, read_bytes = weight_bytes(model)
    started = time.perf_counter()
    tokenizer: Any = NumberTokenizer()
    engine = Engine(model, tokenizer, workload.config)
    # Its own copy of them stays.
    del model
    for request in workload.requests():
        engine.add_request(request)
    # It compiles, for as long as it takes, and runs nothing that could hang.
    with beating():
        engine.warm_up()
    phase("warm_up", started)
    steps = run_steps(engine, read_bytes, deadline)
    phases["steps"] = round(steps.seconds, 2)
    found = faults(workload, steps)
    if steps.is_whole:
        engine.check_integrity()
    used = jax.devices()[0].memory_stats() or {}
    stats, capacity = dataclasses.asdict(engine.stats), engine.capacity
    workspace = limits.workspace_bytes(workload.config.max_num_seqs, model_config.vocab_size)
    del engine
    gc.collect()
    on_cpu = jax.default_backend() == "cpu"
    copied = copy_rate.measure(2**24 if on_cpu else copy_rate.MOST_BYTES)
    floor_seconds = steps.floor_bytes / copied
    # In front: not all are kept.
    found = floor_faults(stats["decode_seconds"], floor_seconds) + found
    plan = all_bytes + capacity.num_bytes + workspace
    peak = used.get("peak_bytes_in_use")
    kept = sorted(steps.completions, key=lambda completion: completion.request_id)[:KEPT]
    return {
        "passed": not found,
        "faults": found[:KEPT],
        "is_whole": steps.is_whole,
        "implementation": choice.implementation,
        "reason": choice.reason,
        "tokens_per_second": round(stats["sampled_tokens"] / steps.seconds, 1),
        "decode_tokens_per_second": _rate(stats["decode_tokens"], stats["decode_seconds"]),
        "prefill_tokens_per_second": _rate(stats["prefill_tokens"], stats["prefill_seconds"]),
        "decode_over_floor": _rate(stats["decode_seconds"], floor_seconds, digits=3),
        "decode_steps": steps.decode_steps,
        "decode_floor_bytes": steps.floor_bytes,
        "copy_bytes_per_second": round(copied),
        "weight_bytes": all_bytes,
        "weight_bytes_read_by_a_decode_step": read_bytes,
        "pool_bytes": capacity.num_bytes,
        "workspace_bytes": workspace,
        "planned_bytes": plan,
        "peak_bytes": peak,
        "peak_over_plan": None if peak is None else round(peak / plan, 3),
        "device_limit_bytes": used.get("bytes_limit"),
        "phases": phases,
        "stats": stats,
        "tokens": [list(completion.token_ids) for completion in kept],
    }


def num_parameters(config: ModelConfig) -> int:
    """Weights of a model without biases."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size + 2)
    vocabularies = 1 if config.tie_word_embeddings else 2
    outside = vocabularies * config.vocab_size + 1
    return config.num_layers * layer + outside * config.hidden_size


def _rate(count: float, seconds: float, *, digits: int = 1) -> float | None:
    return round(count / seconds, digits) if seconds else None


TINY = Workload(
    model=ModelConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    ),
    config=EngineConfig(
        dtype=DTYPE,
        attention="triton",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_blocks=16,
        deterministic=False,
        compilation_cache=False,
    ),
    num_requests=5,
    prompt_lens=(8, 24),
    new_tokens=4,
)


def cases(deadline: Deadline, *, is_tiny: bool) -> Iterator[Case]:
    """One for each model, the smaller one first; two models share the time that is left."""
    if is_tiny:
        yield Case(name="tiny", run=lambda _: run(TINY, deadline), is_alone=True)
        return
    config = EngineConfig(dtype=DTYPE, compilation_cache=False)
    for name, model in MODELS.items():
        workload = Workload(
            model=model,
            config=config,
            num_requests=config.max_num_seqs,
            prompt_lens=(512, 1000),
            new_tokens=256,
        )
        yield Case(name=name, run=functools.partial(_run, workload, deadline), is_alone=True)


def _run(workload: Workload, deadline: Deadline, _: None) -> dict[str, object]:
    return run(workload, deadline)
