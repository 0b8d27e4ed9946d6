"""The engine: requests in, completions out, one step at a time.

Knows nothing of rows, files or reports.
"""

import collections.abc
import dataclasses
import pathlib
import time

import jax
import jax.numpy as jnp

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.config import EngineConfig
from jaxpaged.engine import limits, memory, stopping
from jaxpaged.engine.admission import Admission
from jaxpaged.engine.batch import batch_shapes
from jaxpaged.engine.generation import Generation
from jaxpaged.engine.model_runner import ModelRunner, allocate_pool
from jaxpaged.engine.stats import EngineStats
from jaxpaged.errors import ConfigError
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.llama import Llama
from jaxpaged.model.source import locate
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, Request, SamplingParams
from jaxpaged.scheduler import Scheduler, StepPlan, Usage


class Engine:
    """A model on a paged pool, fed with requests and stepped by the caller.

    ```python
    engine = Engine.load("path/to/model", EngineConfig(max_num_seqs=16))
    for completion in engine.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(completion.text)
    ```

    Args:
        model: The decoder with its weights.
        tokenizer: The model's tokenizer.
        config: Sizes and limits. Its `dtype` is the weights' already.

    Raises:
        ConfigError: A setting does not suit the model.
        CapacityError: The pool cannot fit into memory.
    """

    def __init__(self, model: Llama, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_model_len = limits.max_model_len(config, model.config)
        self.capacity = limits.capacity(config, model, self.max_model_len)
        num_blocks, block_size = self.capacity.num_blocks, self.capacity.block_size
        self._admission = Admission(
            max_model_len=self.max_model_len,
            capacity=self.capacity,
            vocab_size=model.config.vocab_size,
            seed=config.seed,
        )
        token_budget = limits.token_budget(config)
        self._scheduler = Scheduler(
            BlockManager(num_blocks, block_size, watermark=config.watermark),
            max_num_seqs=config.max_num_seqs,
            token_budget=token_budget,
        )
        shapes = batch_shapes(
            max_num_seqs=config.max_num_seqs,
            token_budget=token_budget,
            max_model_len=self.max_model_len,
            capacity=self.capacity,
            vocab_size=model.config.vocab_size,
        )
        self._runner = ModelRunner(model, allocate_pool(model, num_blocks, block_size), shapes)
        self._generations: dict[int, Generation] = {}
        self._rejected: list[Completion] = []
        self._step_ended: float | None = None
        self.stats = EngineStats(
            device=jax.devices()[0].device_kind,
            dtype=str(model.embed_tokens[...].dtype),
            implementation="xla",
            num_blocks=num_blocks,
            block_size=block_size,
        )

    @classmethod
    def load(cls, model: str | pathlib.Path, config: EngineConfig | None = None) -> "Engine":
        """An engine with the weights of a model folder, a `.gguf` file or a `pkg://` name.

        Raises:
            CheckpointError: The model's files are missing, damaged or of another architecture.
            ConfigError: A setting does not suit the model.
            CapacityError: Weights or pool cannot fit into memory.
        """
        config = config or EngineConfig()
        checkpoint = open_checkpoint(locate(str(model)))
        is_cpu = limits.backend() == "cpu"
        dtype = config.dtype or ("float32" if is_cpu else "bfloat16")
        memory.check_weights(checkpoint.shapes(), dtype=dtype, available=memory.available_bytes())
        decoder = weights.load(
            checkpoint, dtype=jnp.dtype(dtype), layer_loop="scan" if is_cpu else "unrolled"
        )
        return cls(decoder, checkpoint.tokenizer(), dataclasses.replace(config, dtype=dtype))

    @property
    def description(self) -> str:
        """One line: device, dtype, and what the pool holds."""
        capacity, length = self.capacity, self.max_model_len
        return (
            f"{self.stats.device}, {self.stats.dtype}: KV pool of {capacity.num_blocks:,} blocks "
            f"x {capacity.block_size} = {capacity.num_tokens:,} tokens, "
            f"{capacity.num_bytes / 2**30:.2f} GiB ({capacity.bytes_per_token:,} bytes a token); "
            f"{capacity.concurrent(length):,} requests of {length:,} tokens fit at once"
        )

    def add_request(self, request: Request) -> None:
        """Queues a request.

        What is wrong with the request itself never raises: it comes back from the next `step` as
        a completion with an error code.

        Raises:
            ValueError: A request with the same id is unfinished.
        """
        if request.request_id in self._generations:
            raise ValueError(f"request {request.request_id} is unfinished, its id cannot be reused")
        rule = stopping.stop_rule(request.params, self.tokenizer)
        seed = self._admission.row_seed(request.params)
        fault = self._admission.fault(request, rule)
        if fault is not None:
            self._rejected.append(
                Completion(
                    request_id=request.request_id,
                    finish_reason="error",
                    prompt_tokens=len(request.prompt_ids),
                    seed=seed,
                    error_code=fault[0],
                    error_message=fault[1],
                )
            )
            return
        sequence = self._admission.sequence(request, rule)
        generation = Generation(sequence, rule, self.tokenizer, seed=seed)
        self._generations[request.request_id] = generation
        self._scheduler.add(sequence)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return bool(self._generations or self._rejected)

    def num_unfinished(self) -> int:
        """Requests queued or running, and rejected ones not handed out yet."""
        return len(self._generations) + len(self._rejected)

    def step(self) -> list[Completion]:
        """Runs one step of the model; returns the completions that ended with it."""
        completions, self._rejected = self._rejected, []
        plan = self._scheduler.schedule()
        if plan.is_empty:
            assert not self._generations, f"{len(self._generations)} requests can never run"
            return completions
        self._observe(plan)
        result = self._runner.execute(plan)
        self._count(plan, result.seconds, result.num_padding)
        self._scheduler.advance(plan)
        for chunk, token in result.tokens:
            generation = self._generations[chunk.sequence.request.request_id]
            completion = generation.take(token)
            if completion is not None:
                self._drop(generation)
                completions.append(completion)
        if not self._generations:
            # What follows is the caller's time, and the live counters must not go stale.
            self._step_ended = None
            self._observe_usage()
        return completions

    def generate(
        self,
        prompts: collections.abc.Iterable[str | collections.abc.Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, in their order.

        Args:
            prompts: Texts, or token ids that are taken as they are.
            params: How to sample; by default greedy until the model stops or a limit is reached.

        Raises:
            ConfigError: Requests from elsewhere are unfinished; step until they are done. Or
                `prompts` is a single text.
        """
        if isinstance(prompts, str):
            raise ConfigError("generate() takes a list of prompts, got one text; write [text]")
        if self.has_work():
            raise ConfigError(f"{self.num_unfinished()} requests are unfinished, call step() first")
        count = 0
        for index, prompt in enumerate(prompts):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self.add_request(
                Request(
                    request_id=index,
                    prompt_ids=tuple(ids),
                    params=params or SamplingParams(),
                    address=index,
                )
            )
            count += 1
        done: dict[int, Completion] = {}
        while self.has_work():
            done |= {completion.request_id: completion for completion in self.step()}
        return [done[index] for index in range(count)]

    def warm_up(self) -> None:
        """Compiles all steps this engine can ever need, instead of each when first met."""
        self._runner.warm_up()
        self._count_executables()

    def abort(self) -> list[int]:
        """Drops everything queued or running; returns the request ids."""
        ids = [completion.request_id for completion in self._rejected]
        self._rejected = []
        for request_id, generation in list(self._generations.items()):
            ids.append(request_id)
            self._drop(generation)
        self._step_ended = None
        self._observe_usage()
        return ids

    def check_integrity(self) -> None:
        """Proves that free and held blocks are the whole pool; raises AssertionError if not."""
        self._scheduler.check_integrity()

    def _drop(self, generation: Generation) -> None:
        self._scheduler.finish(generation.sequence)
        del self._generations[generation.sequence.request.request_id]

    def _observe_usage(self) -> Usage:
        """Takes the scheduler's figures of this moment over."""
        stats, usage = self.stats, self._scheduler.usage()
        stats.running, stats.waiting = usage.running, usage.waiting
        stats.preemptions = usage.preemptions
        stats.used_blocks = usage.used_blocks
        stats.peak_used_blocks = max(stats.peak_used_blocks, usage.used_blocks)
        return usage

    def _observe(self, plan: StepPlan) -> None:
        """Counts what the plan holds, before the step."""
        stats, usage = self.stats, self._observe_usage()
        stats.live_slot_steps += usage.computed_tokens + plan.num_tokens
        stats.reserved_slot_steps += usage.used_blocks * stats.block_size

    def _count(self, plan: StepPlan, seconds: float, num_padding: int) -> None:
        stats, now = self.stats, time.perf_counter()
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        stats.steps += 1
        stats.sampled_tokens += num_sampled
        stats.padding_tokens += num_padding
        if plan.prefills:
            stats.prefill_tokens += plan.num_tokens
            stats.prefill_seconds += seconds
        else:
            stats.decode_tokens += plan.num_tokens
            stats.decode_seconds += seconds
        compiled = self._runner.compile_seconds - stats.compile_seconds
        if self._step_ended is not None:
            stats.host_seconds += now - self._step_ended - seconds - compiled
        self._step_ended = now
        self._count_executables()

    def _count_executables(self) -> None:
        self.stats.compile_seconds = self._runner.compile_seconds
        self.stats.executables = self._runner.num_executables
