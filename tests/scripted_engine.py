"""An engine without a model, for jobs: what it answers and when is the test's choice."""

import dataclasses
import math
import time
from collections.abc import Callable

from jaxpaged.histogram import Histogram
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, Request, TokenLogprob


def _times() -> Histogram:
    return Histogram(bounds=[0.1, 1.0])


@dataclasses.dataclass(kw_only=True)
class ScriptedStats:
    """The counters that a job reads; the real engine's would load JAX."""

    device: str = "none"
    dtype: str = "float32"
    weight_dtype: str = "float32"
    kv_dtype: str = "float32"
    implementation: str = "scripted"
    num_blocks: int = 8
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    used_blocks: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sampled_tokens: int = 0
    padding_tokens: int = 0
    live_slot_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    copied_blocks: int = 0
    recomputes: int = 0
    swaps: int = 0
    starved_steps: int = 0
    executables: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_times: Histogram = dataclasses.field(default_factory=_times)
    decode_times: Histogram = dataclasses.field(default_factory=_times)
    host_seconds: float = 0.0
    compile_seconds: float = 0.0
    steps: int = 0


class ScriptedEngine:
    """Completes each request after a number of steps.

    Args:
        tokenizer: The job's.
        answer: The completion's text, by the prompt's text.
        vary: The text of a row's sample from that and the sample's number, where there are many.
        num_steps: After how many steps a request is done.
        max_model_len: Longer prompts are row errors, as in the real engine.
        max_num_seqs: Requests that run at once.
        pause: Seconds a step takes.
        is_recording: Keep every request in `requests`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        answer: Callable[[str], str] = lambda text: f"[{text}]",
        vary: Callable[[str, int], str] = lambda text, sample: f"{text}{'+' * sample}",
        num_steps: Callable[[Request], int] = lambda request: 1,
        max_model_len: int = 4096,
        max_num_seqs: int = 8,
        pause: float = 0.0,
        is_recording: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.description = "a scripted engine"
        self.stats = ScriptedStats()
        self.requests: list[Request] = []
        self._answer = answer
        self._vary = vary
        self._num_steps = num_steps
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._pause = pause
        self._is_recording = is_recording
        self._left: dict[int, int] = {}
        self._live: dict[int, Request] = {}
        self._prefilled: set[int] = set()
        self.max_unfinished = 0

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self._live
        if self._is_recording:
            self.requests.append(request)
        self._live[request.request_id] = request
        self._prefilled.discard(request.request_id)
        self._left[request.request_id] = self._num_steps(request)
        self.max_unfinished = max(self.max_unfinished, len(self._live))

    def warm_up(self) -> None:
        assert self.has_work(), "the engine is warmed up by requests that wait"

    def has_work(self) -> bool:
        return bool(self._live)

    def num_unfinished(self) -> int:
        return len(self._live)

    def abort(self) -> list[int]:
        dropped = list(self._live)
        self._live.clear()
        self._left.clear()
        return dropped

    def step(self) -> list[Completion]:
        if self._pause:
            time.sleep(self._pause)
        running = list(self._live)[: self._max_num_seqs]
        self.stats.steps += 1
        self.stats.running = len(running)
        self.stats.waiting = len(self._live) - len(running)
        done = []
        for request_id in running:
            self._count(self._live[request_id])
            self._left[request_id] -= 1
            if self._left[request_id] <= 0:
                del self._left[request_id]
                done += self._complete(self._live.pop(request_id))
        return done

    def check_integrity(self) -> None:
        assert self._left.keys() == self._live.keys()

    def _count(self, request: Request) -> None:
        """A request's first step computes its prompt, each later one the token before."""
        if request.request_id in self._prefilled:
            self.stats.decode_tokens += 1
        else:
            self._prefilled.add(request.request_id)
            self.stats.prefill_tokens += len(request.prompt_ids)
        self.stats.sampled_tokens += 1

    def _complete(self, request: Request) -> list[Completion]:
        ids = request.prompt_ids
        if len(ids) < self._max_model_len:
            return [self._sample(request, sample) for sample in range(request.params.n)]
        error = Completion(
            request_id=request.request_id,
            finish_reason="error",
            prompt_tokens=len(ids),
            error_code="prompt_too_long",
            error_message=f"{len(ids)} tokens",
            seed=request.params.seed or 0,
        )
        return [error]

    def _sample(self, request: Request, sample: int) -> Completion:
        ids, params = request.prompt_ids, request.params
        text = self._answer(self.tokenizer.decode(ids))
        if params.n > 1:
            text = self._vary(text, sample)
        limit = params.max_tokens
        is_cut = limit is not None and len(text) > limit
        tokens = tuple(range(len(text[:limit])))
        asked = (params.logprobs, params.best_of, params.beam_width)
        total = None if asked == (None, None, None) else sum(map(_logprob, tokens))
        prompt = None
        if params.prompt_logprobs is not None:
            first = TokenLogprob(token_id=ids[0], logprob=None, rank=None)
            prompt = (first, *(_scored(token, params.prompt_logprobs) for token in ids[1:]))
        return Completion(
            request_id=request.request_id,
            sample=sample,
            text=text[:limit],
            token_ids=tokens,
            finish_reason="length" if is_cut else "stop",
            stop_reason="max_tokens" if is_cut else "</s>",
            prompt_tokens=len(ids),
            seed=params.seed or 0,
            cumulative_logprob=total,
            score=None if params.beam_width is None or total is None else total / len(tokens),
            logprobs=None
            if params.logprobs is None
            else tuple(_scored(token, params.logprobs) for token in tokens),
            prompt_logprobs=prompt,
        )


def _logprob(token: int) -> float:
    return -(1 + token % 7) / 8


def _scored(token: int, num_top: int) -> TokenLogprob:
    """A token of rank 2, the alternatives of which end with one that cannot be."""
    top = [(token + 1, 0.0), (token, _logprob(token)), (token + 2, -math.inf)]
    return TokenLogprob(token_id=token, logprob=_logprob(token), rank=2, top=tuple(top[:num_top]))
