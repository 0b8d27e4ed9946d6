"""A run of the real scheduler and block manager without a model.

Requests go into a real engine whose runner computes nothing, in the order and as many at a time as
a job gives them. Every completion ends at its limit: what depends on what the model says, its end
above all, cannot be known. For greedy completions of fixed length the counts are those of the run.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from jaxpaged.config import EngineConfig
from jaxpaged.engine import limits
from jaxpaged.engine.device import Place
from jaxpaged.engine.dry_runner import DryRunner
from jaxpaged.engine.engine import Engine
from jaxpaged.job.pipeline import FEED_FACTOR
from jaxpaged.model.llama import Llama
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.plan.survey import MAX_EXAMPLES
from jaxpaged.request import Request, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What the scheduler did.

    Attributes:
        steps: Steps.
        preemptions: Sequences that had to make room.
        peak_running: Most sequences at once.
        mean_running: Of sequences over all steps.
        mean_blocks: Blocks in use for each running sequence, on average.
        peak_used_blocks: Most blocks in use at once.
        touched_blocks: Blocks of the pool that are ever written to.
        kv_waste_share: Slots of blocks in use that held no token, over all steps, of all their
            slots; below 0 where sequences share blocks.
        prompt_tokens: Of all prompts.
        cached_tokens: Thereof from the prefix cache.
        new_tokens: Tokens that were sampled.
        computed_tokens: Tokens that went through the model, those computed again among them.
        prefill_tokens: Thereof in steps that took in prompts.
        padding_tokens: Token positions computed only to fill a bucket.
        token_buckets: Sizes of steps that take in prompts.
        executables: Programs to compile.
        rejected: Requests that can never run, by error code.
        rejected_ids: The ids of the first of them.
    """

    steps: int
    preemptions: int
    peak_running: int
    mean_running: float
    mean_blocks: float
    peak_used_blocks: int
    touched_blocks: int
    kv_waste_share: float
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    computed_tokens: int
    prefill_tokens: int
    padding_tokens: int
    token_buckets: tuple[int, ...]
    executables: int
    rejected: dict[str, int]
    rejected_ids: dict[str, tuple[int, ...]]

    @property
    def padding_share(self) -> float:
        """Of all computed token positions."""
        positions = self.computed_tokens + self.padding_tokens
        return self.padding_tokens / positions if positions else 0.0


def rehearse(
    model: Llama,
    tokenizer: Tokenizer,
    config: EngineConfig,
    requests: Iterable[Request],
    *,
    place: Place,
    max_new: int | None = None,
) -> Rehearsal:
    """What the scheduler would do with the requests.

    Args:
        model: May be without weights.
        tokenizer: The model's.
        config: The engine's settings. Preemption counts as by recompute unless they say "swap":
            which of the two "auto" takes depends on times.
        requests: In the order of the job. What the engine would refuse, it refuses here, too.
        place: Where the engine would run.
        max_new: Tokens to assume of a completion at most.

    Raises:
        ConfigError: A setting does not suit the model.
        CapacityError: The pool cannot fit.
    """
    if config.preemption == "auto":
        config = dataclasses.replace(config, preemption="recompute")
    resolved = limits.resolve(config, model, device=place.device, available=place.available_bytes)
    runner = DryRunner(resolved.shapes)
    engine = Engine(model, tokenizer, config, place=place, make_runner=lambda *_: runner)
    rejected: dict[str, list[int]] = {}
    waiting = (_endless(engine, request, max_new) for request in requests)
    _fill(engine, waiting)
    if engine.has_work():
        engine.warm_up()
    peak_running = total_running = total_used = 0
    while engine.has_work():
        _fill(engine, waiting)
        for completion in engine.step():
            if completion.error_code is not None:
                rejected.setdefault(completion.error_code, []).append(completion.request_id)
        peak_running = max(peak_running, engine.stats.running)
        total_running += engine.stats.running
        total_used += engine.stats.used_blocks
        _fill(engine, waiting)
    engine.check_integrity()
    stats = engine.stats
    reserved = stats.reserved_slot_steps
    return Rehearsal(
        steps=stats.steps,
        preemptions=stats.recomputes + stats.swaps,
        peak_running=peak_running,
        mean_running=total_running / stats.steps if stats.steps else 0.0,
        mean_blocks=total_used / total_running if total_running else 0.0,
        peak_used_blocks=stats.peak_used_blocks,
        touched_blocks=runner.touched_blocks,
        kv_waste_share=1 - stats.live_slot_steps / reserved if reserved else 0.0,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        new_tokens=stats.sampled_tokens,
        computed_tokens=stats.prefill_tokens + stats.decode_tokens,
        prefill_tokens=stats.prefill_tokens,
        padding_tokens=stats.padding_tokens,
        token_buckets=runner.shapes.token_buckets,
        executables=runner.num_executables,
        rejected={code: len(ids) for code, ids in rejected.items()},
        rejected_ids={code: tuple(ids[:MAX_EXAMPLES]) for code, ids in rejected.items()},
    )


def _endless(engine: Engine, request: Request, max_new: int | None) -> Request:
    """The request with nothing that ends its completions but their limit, unless the engine refuses
    it as it is. Beams count as so many samples."""
    if engine.fault(request) is not None:
        return request
    limit = request.params.max_tokens
    if max_new is not None:
        limit = max_new if limit is None else min(limit, max_new)
    params = SamplingParams(max_tokens=limit, ignore_eos=True, n=request.params.num_samples)
    return dataclasses.replace(request, params=params)


def _fill(engine: Engine, waiting: Iterator[Request]) -> None:
    """As many requests as a job would have given the engine by now."""
    most = FEED_FACTOR * engine.config.max_num_seqs
    while engine.num_unfinished() < most:
        request = next(waiting, None)
        if request is None:
            return
        engine.add_request(request)
