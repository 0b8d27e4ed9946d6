"""The engine: requests in, completions out, one step at a time.

Knows nothing of rows, files or reports.
"""

import collections
import collections.abc
import dataclasses
import logging
import pathlib

import jax.numpy as jnp

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.cache.capacity import longer_sequences
from jaxpaged.config import EngineConfig
from jaxpaged.engine import (
    attention,
    compile_cache,
    device,
    limits,
    memory,
    out_of_memory,
    stopping,
)
from jaxpaged.engine.admission import Admission
from jaxpaged.engine.batch import max_decodes
from jaxpaged.engine.beam_group import BeamGroup
from jaxpaged.engine.device import Device, Place
from jaxpaged.engine.limits import Limits
from jaxpaged.engine.model_runner import ModelRunner
from jaxpaged.engine.runner import Flight, RunnerMaker, StepResult
from jaxpaged.engine.sample_group import SampleGroup
from jaxpaged.engine.shortage import size
from jaxpaged.engine.stats import EngineStats
from jaxpaged.engine.step_clock import StepClock
from jaxpaged.errors import ConfigError
from jaxpaged.model import adapters as adapters_module
from jaxpaged.model import config_stretch, weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.checkpoint.adapter import open_adapters
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.llama import LayerLoop, Llama
from jaxpaged.model.source import locate
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, ErrorCode, Request, SamplingParams
from jaxpaged.scheduler import Scheduler, StepPlan, Usage
from jaxpaged.sequence import SequenceStatus

_log = logging.getLogger(__name__)


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
        place: Where it runs; None for the device of this process.
        make_runner: Makes what runs its steps.

    Raises:
        ConfigError: A setting does not suit the model.
        CapacityError: The pool cannot fit into memory.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        place: Place | None = None,
        make_runner: RunnerMaker = ModelRunner.allocate,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        place = place or Place(device.here(), memory.available_bytes())
        self.limits = limits.resolve(
            config, model, device=place.device, available=place.available_bytes
        )
        self.max_model_len = self.limits.max_model_len
        self.model_max_len = model.config.own_longest or model.config.max_len
        self.capacity = self.limits.capacity
        num_blocks, block_size = self.capacity.num_blocks, self.capacity.block_size
        is_static = config.reservation == "static"
        self._admission = Admission(
            max_model_len=self.max_model_len,
            capacity=self.capacity,
            vocab_size=model.config.vocab_size,
            seed=config.seed,
            max_num_seqs=config.max_num_seqs,
            adapters=model.adapter_names,
        )
        self._swaps = limits.swap_space(config, self.capacity)
        self._blocks = BlockManager(
            num_blocks,
            block_size,
            # What is reserved never grows.
            watermark=0.0 if is_static else config.watermark,
            prefix_cache=config.prefix_cache and not is_static,
            window=model.config.max_window,
            reserved_tokens=self.max_model_len if is_static else 0,
        )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            token_budget=self.limits.token_budget,
            decode_budget=max_decodes(config.max_num_seqs),
            swaps=self._swaps,
        )
        self._remedies = out_of_memory.remedies(config)
        with out_of_memory.told("allocating the KV pool", self._remedies):
            self._runner = make_runner(model, self.limits)
        self._groups: dict[int, SampleGroup | BeamGroup] = {}
        self._rejected: list[Completion] = []
        self._flight: Flight | None = None
        self._clock = StepClock()
        self.stats = EngineStats(
            device=place.device.name,
            dtype=str(model.dtype),
            weight_dtype=model.weight_dtype or str(model.dtype),
            kv_dtype=self.limits.kv_dtype,
            is_deterministic=self.limits.is_deterministic,
            implementation=model.attention,
            implementation_reason=_reason(config, model, place.device),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=self.max_model_len,
            model_max_len=self.model_max_len,
            max_num_seqs=config.max_num_seqs,
            token_budget=self.limits.token_budget,
        )

    @classmethod
    def load(
        cls,
        model: str | pathlib.Path,
        config: EngineConfig | None = None,
        *,
        adapters: collections.abc.Mapping[str, str] | None = None,
    ) -> "Engine":
        """An engine with the weights of a model folder, a `.gguf` file or a `pkg://` name.

        Args:
            model: The model.
            config: The engine's settings.
            adapters: Name to folder of LoRA adapters, for requests to choose from.

        Raises:
            CheckpointError: The files of the model or of an adapter are missing, damaged or of
                another architecture.
            ConfigError: A setting does not suit the model.
            CapacityError: Weights or pool cannot fit into memory.
        """
        engine = cls(*load_model(model, config or EngineConfig(), adapters))
        _tell_rope(engine)
        return engine

    @property
    def description(self) -> str:
        """One line: device, dtype, and what the pool holds."""
        capacity, length = self.capacity, self.max_model_len
        narrow = self.stats.weight_dtype
        maps = "" if narrow == self.stats.dtype else f" with linear maps in {narrow}"
        return (
            f"{self.stats.device}, {self.stats.dtype}{maps}, "
            f"attention by {self.stats.implementation} "
            f"({self.stats.implementation_reason}): KV pool in {self.stats.kv_dtype}, "
            f"{capacity.num_blocks:,} blocks x {capacity.block_size} = "
            f"{capacity.num_tokens:,} tokens, "
            f"{size(capacity.num_bytes)} ({capacity.bytes_per_token:,} bytes a token); "
            f"{capacity.concurrent(length):,} requests of {length:,} tokens fit at once"
        )

    def add_request(self, request: Request) -> None:
        """Queues a request.

        What is wrong with the request itself never raises: it comes back from the next `step` as
        a completion with an error code.

        Raises:
            ValueError: A request with the same id is unfinished.
        """
        if request.request_id in self._groups:
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
        kind = SampleGroup if request.params.beam_width is None else BeamGroup
        self._groups[request.request_id] = kind(
            self._admission.sequences(request, rule),
            rule,
            self.tokenizer,
            scheduler=self._scheduler,
            seed=seed,
        )

    def fault(self, request: Request) -> tuple[ErrorCode, str] | None:
        """Code and message of what makes a request impossible here, or None."""
        return self._admission.fault(request, stopping.stop_rule(request.params, self.tokenizer))

    def has_work(self) -> bool:
        """Whether `step` has something to do or to hand out."""
        return bool(self._groups or self._rejected)

    def num_unfinished(self) -> int:
        """Requests queued or running, and rejected ones not handed out yet."""
        return len(self._groups) + len(self._rejected)

    def num_tokens(self) -> dict[int, int]:
        """Tokens that were sampled so far for each unfinished request."""
        return {request_id: group.num_tokens for request_id, group in self._groups.items()}

    def step(self) -> list[Completion]:
        """Starts the next step and takes the result of the one before.

        Returns the completions that ended with it. The device works on the new step meanwhile.

        Raises:
            CapacityError: The device ran out of memory.
        """
        completions, self._rejected = self._rejected, []
        with out_of_memory.told("running a step", self._remedies):
            completions += self._advance(self._scheduler.schedule())
        if not self.has_work():
            self._clock.rest()
            self._observe_usage()
        return completions

    def _advance(self, plan: StepPlan) -> list[Completion]:
        """Starts a step; the completions that ended with the one before."""
        before, self._flight = self._flight, None
        self._runner.prepare(plan)
        if not plan.is_empty:
            self._observe(plan)
            self._flight = self._runner.dispatch(plan)
            self._clock.dispatched()
        elif before is None:
            assert not self._groups, f"{len(self._groups)} requests can never run"
        if before is None:
            return []
        result = before.result()
        self._count(before)
        return self._take(result)

    def generate(
        self,
        prompts: collections.abc.Iterable[str | collections.abc.Sequence[int]],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Completions of all prompts, in their order, `n` for each.

        Args:
            prompts: Texts, or token ids that are taken as they are.
            params: How to sample; by default greedy until the model stops or a limit is reached.
            adapter: The name of the adapter that completes them; None for the model as it is.

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
                    adapter=adapter,
                )
            )
            count += 1
        done: dict[int, list[Completion]] = collections.defaultdict(list)
        while self.has_work():
            for completion in self.step():
                done[completion.request_id].append(completion)
        return [completion for index in range(count) for completion in done[index]]

    def warm_up(self) -> None:
        """Compiles all steps this engine can ever need, instead of each when first met.

        Their sizes are chosen by the requests that wait, as a sample of those to come.
        """
        prompts = [sequence.request.prompt_ids for sequence in self._scheduler.sequences()]
        with out_of_memory.told("compiling the steps", self._remedies):
            self._runner.warm_up(prompts, is_shared=self.config.prefix_cache)
        memory.give_back()
        self._count_executables()

    def abort(self) -> list[int]:
        """Drops everything queued or running; returns the request ids."""
        ids = [completion.request_id for completion in self._rejected]
        self._rejected = []
        for request_id, group in self._groups.items():
            ids.append(request_id)
            group.drop()
        self._groups.clear()
        self._flight = None
        self._clock.rest()
        self._observe_usage()
        return ids

    def check_integrity(self) -> None:
        """Proves that free and held blocks are the whole pool; raises AssertionError if not."""
        self._scheduler.check_integrity()

    def _take(self, result: StepResult) -> list[Completion]:
        """Hands a step's tokens to those who sampled them; the completions that this ended."""
        completions: list[Completion] = []
        for scored in result.scores:
            group = self._groups.get(scored.sequence.request.request_id)
            if group is not None and scored.sequence.status is not SequenceStatus.FINISHED:
                group.prompt_scores.take(scored.start, scored.sampled)
        tokens = result.sampled.tokens.tolist()
        for row, (sequence, _) in enumerate(result.samplers):
            # What ended with the step before is over, though one more token was on its way.
            if sequence.status is SequenceStatus.FINISHED:
                continue
            request_id = sequence.request.request_id
            ended = self._groups[request_id].take(sequence, tokens[row], result.sampled, row)
            if ended is not None:
                del self._groups[request_id]
                completions += ended
        return completions

    def _observe_usage(self) -> Usage:
        """Takes the figures of this moment over."""
        stats, usage, blocks = self.stats, self._scheduler.usage(), self._blocks
        stats.running, stats.waiting = usage.running, usage.waiting
        stats.swapped = usage.swapped
        stats.recomputes, stats.swaps = usage.recomputes, usage.swaps
        stats.used_blocks = usage.used_blocks
        stats.peak_used_blocks = max(stats.peak_used_blocks, usage.used_blocks)
        stats.evictions = blocks.num_evictions
        stats.copied_blocks = blocks.num_copies
        return usage

    def _observe(self, plan: StepPlan) -> None:
        """Counts what the plan holds, before the step."""
        stats, usage = self.stats, self._observe_usage()
        stats.live_slot_steps += usage.computed_tokens
        stats.reserved_slot_steps += usage.used_blocks * stats.block_size
        # Once for each prompt: when it is computed up to its end with nothing sampled yet.
        for chunk in plan.chunks:
            sequence = chunk.sequence
            ends_prompt = chunk.start < sequence.num_prompt <= chunk.start + chunk.length
            if ends_prompt and not sequence.num_output:
                stats.prompt_tokens += sequence.num_prompt
                stats.cached_tokens += sequence.num_cached

    def _count(self, flight: Flight) -> None:
        stats, plan = self.stats, flight.plan
        compiled = self._runner.compile_seconds - stats.compile_seconds
        seconds, waited = self._clock.collected(compiled)
        stats.steps += 1
        stats.starved_steps += flight.is_starved
        stats.sampled_tokens += len(flight.samplers)
        stats.padding_tokens += flight.num_padding
        if any(chunk.length > 1 or chunk.start == 0 for chunk in plan.chunks):
            stats.prefill_tokens += plan.num_tokens
            stats.prefill_seconds += seconds
            stats.prefill_times.add(seconds)
        else:
            stats.decode_tokens += plan.num_tokens
            stats.decode_seconds += seconds
            stats.decode_times.add(seconds)
        stats.host_seconds += max(0.0, seconds - waited)
        self._count_executables()
        if stats.prefill_tokens:
            self._swaps.token_seconds = stats.prefill_seconds / stats.prefill_tokens

    def _count_executables(self) -> None:
        self.stats.compile_seconds = self._runner.compile_seconds
        self.stats.executables = self._runner.num_executables


def load_model(
    model: str | pathlib.Path,
    config: EngineConfig,
    adapters: collections.abc.Mapping[str, str] | None = None,
) -> tuple[Llama, Tokenizer, EngineConfig]:
    """What an engine is made of: the decoder with its weights, the tokenizer, and the settings with
    the weights' dtype.

    Args:
        model: The model's name.
        config: The settings.
        adapters: Name to folder of LoRA adapters that the decoder gets, too.

    Raises:
        CheckpointError: The files of the model or of an adapter are missing, damaged or of another
            architecture.
        ConfigError: A setting does not suit the model.
        CapacityError: The weights cannot fit into memory.
    """
    if config.compilation_cache:
        compile_cache.enable()
    checkpoint = open_checkpoint(locate(str(model)))
    place = device.here()
    dtype = limits.dtype(config, place)
    opened = open_adapters(adapters or {}, checkpoint.config)
    weight_dtype = limits.weight_dtype(config, checkpoint.config)
    memory.check_weights(
        checkpoint.shapes() | adapters_module.shapes(checkpoint.config, opened),
        dtype=dtype,
        weight_dtype=weight_dtype,
        available=memory.available_bytes(),
    )
    shape = config_stretch.stretched(checkpoint.config, config.rope)
    length = limits.max_model_len(config, shape)
    _tell_long_factors(shape, length)
    with out_of_memory.told("loading the weights", ["end what else takes memory of the device"]):
        decoder = weights.load(
            checkpoint,
            dtype=jnp.dtype(dtype),
            layer_loop=layer_loop(place),
            attention=attention.choose(config, shape, device=place).implementation,
            weight_dtype=weight_dtype,
            max_model_len=length,
            rope=config.rope,
        )
        adapters_module.load(decoder, opened)
    return decoder, checkpoint.tokenizer(), dataclasses.replace(config, dtype=dtype)


def stretch_warning(resolved: Limits, model_max_len: int) -> str | None:
    """What sequences longer than the model was made for cost; None if they are no longer."""
    if resolved.max_model_len <= model_max_len:
        return None
    return longer_sequences(model_max_len, resolved.max_model_len, pool=resolved.capacity)


def _tell_rope(engine: Engine) -> None:
    if engine.config.rope is None:
        return
    unneeded = (
        "engine.rope changes what the model computes for every row, though sequences are no longer "
        f"than the {engine.model_max_len:,} tokens it was made for"
    )
    _log.warning("%s", stretch_warning(engine.limits, engine.model_max_len) or unneeded)


def _tell_long_factors(model: ModelConfig, length: int) -> None:
    scaling = model.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return
    original = scaling.original_max_position_embeddings
    if length > original:
        _log.warning(
            "engine.max_model_len is %d, above the model's original context of %d tokens: all rows "
            "rotate by its long factors, short rows too; with %d they rotate by the short ones",
            length,
            original,
            original,
        )


def layer_loop(place: Device) -> LayerLoop:
    """How the decoder's layers are driven on a device."""
    return "scan" if place.is_cpu else "unrolled"


def _reason(config: EngineConfig, model: Llama, place: Device) -> str:
    """Why the model's attention is computed by whom it is."""
    choice = attention.choose(config, model.config, device=place)
    if choice.implementation == model.attention:
        return choice.reason
    return "the model was made with it"
