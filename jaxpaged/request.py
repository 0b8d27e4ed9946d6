"""What the engine is asked for and what it answers: immutable values, plain Python.

Knows nothing of rows, files or devices.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from jaxpaged.errors import ConfigError
from jaxpaged.interval import Interval

FinishReason = Literal["stop", "length", "error", "skipped"]
"""How a completion ended; "skipped" is a row that the job was told to pass over."""

ErrorCode = Literal[
    "null_prompt",
    "empty_prompt",
    "bad_type",
    "invalid_utf8",
    "template_error",
    "tokenizer_error",
    "prompt_too_long",
    "kv_capacity",
    "bad_row_params",
    "unknown_adapter",
    "nonfinite_logits",
    "timeout",
    "cancelled",
]
"""Why a row could not be completed; the list is closed, so that users can match on it."""


EarlyStopping = Literal[True, False, "never"]
"""When a beam search gives up its running beams; see `jaxpaged.engine.beam_search`."""

MAX_LOGPROBS = 20
"""Most alternatives of a token whose probability can be asked for."""

MAX_BEAMS = 16
"""Widest beam search."""

MAX_SAMPLES = 256
"""Most samples of a row."""

MAX_BIASED = 320
"""Most tokens of a row that `logit_bias`, `min_tokens` and one-token `bad_words` change."""

MAX_BAD_WORDS = 64
"""Most token sequences that the `bad_words` of a row come to, those of one token not counted."""

MAX_BAD_WORD_TOKENS = 8
"""Longest of them."""

# Parameters travel to the device as 32-bit numbers.
_INT32 = 2**31


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one completion are chosen and when it ends.

    Attributes:
        max_tokens: Most tokens to generate; None takes what `max_model_len` leaves.
        temperature: 0 is greedy (argmax); above 0 the logits are divided by it.
        top_k: Keep the k most likely tokens, of equal ones the lowest ids; 0 (or -1) keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this share.
        min_p: Keep tokens at least this share as likely as the most likely one.
        seed: The row's own seed; None derives one from the job's seed and the row's address.
        stop: Strings that end the completion; the text is cut before the match.
        stop_token_ids: Tokens that end the completion, besides the model's end-of-sequence set.
        include_stop: Keep the matched stop string in the text.
        stop_after: Stop strings count only behind this text, which the completion has to write or
            the prompt to end with; None counts them anywhere.
        min_tokens: End-of-sequence and stop tokens cannot be sampled before this many tokens,
            and stop strings are not looked for.
        ignore_eos: The model's end-of-sequence tokens do not end the completion.
        typical_p: Keep the tokens whose surprise is nearest to the expected one until their
            probability reaches this share (arXiv:2202.00666).
        repetition_penalty: Logits of tokens in prompt or completion are divided by it if positive
            and multiplied by it otherwise (arXiv:1909.05858); 1 changes nothing.
        presence_penalty: Taken off the logits of tokens in the completion so far.
        frequency_penalty: Taken off as many times as the token is in the completion so far.
        logit_bias: Pairs of a token id and what is added to its logit; -inf bans the token.
        bad_words: Texts that the completion must not contain, as the tokenizer writes them with
            and without a space in front.
        logprobs: For each sampled token its log-probability and so many of the likeliest
            alternatives; of the model's own distribution, before temperature and filters.
        prompt_logprobs: The same for each prompt token but the first.
        n: Completions of the prompt.
        best_of: Samples taken, of which the `n` with the highest cumulative log-probability are
            kept, the best first; None takes `n` and keeps their order.
        beam_width: Beams of a beam search, which gives the `n` best of them; None samples.
        length_penalty: A beam's score is its cumulative log-probability divided by its generated
            tokens to this power.
        early_stopping: True ends a beam search once `beam_width` beams have ended; False once no
            running beam can do better as far as its present score tells; "never" only once none
            can whatever follows.

    Raises:
        ConfigError: A value is out of its range; the message names the key.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    stop_after: str | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    RANGES: ClassVar[Mapping[str, Interval]] = {
        "max_tokens": Interval(least=1, has_none=True),
        "temperature": Interval(least=0, most=10_000),
        "top_k": Interval(
            least=-1, most=_INT32 - 1, words="at least 1 and below 2**31, or 0 for off"
        ),
        "top_p": Interval(above=0, most=1),
        "min_p": Interval(least=0, most=1),
        "seed": Interval(least=0, most=2**63 - 1, has_none=True, words="from 0 to 2**63 - 1"),
        "min_tokens": Interval(least=0),
        "typical_p": Interval(above=0, most=1),
        "repetition_penalty": Interval(above=0, most=10_000),
        "presence_penalty": Interval(least=-10_000, most=10_000),
        "frequency_penalty": Interval(least=-10_000, most=10_000),
        "logprobs": Interval(least=0, most=MAX_LOGPROBS, has_none=True),
        "prompt_logprobs": Interval(least=0, most=MAX_LOGPROBS, has_none=True),
        "n": Interval(least=1, most=MAX_SAMPLES),
        "best_of": Interval(
            least=1, most=MAX_SAMPLES, has_none=True, words=f"from n to {MAX_SAMPLES}"
        ),
        "beam_width": Interval(
            least=1, most=MAX_BEAMS, has_none=True, words=f"from n to {MAX_BEAMS}"
        ),
        "length_penalty": Interval(least=-100, most=100),
    }
    """What a number may be, by name."""

    def __post_init__(self) -> None:
        for name, interval in self.RANGES.items():
            if (value := getattr(self, name)) not in interval:
                raise ConfigError(f"{name} must be {interval}, got {value!r}")
        for name in ("best_of", "beam_width"):
            value = getattr(self, name)
            if value is not None and value < self.n:
                raise ConfigError(f"{name} must be {self.RANGES[name]}, got {value!r}")
        self._check_others()
        self._check_beams()

    @property
    def num_samples(self) -> int:
        """Sequences the request comes to at most at any time."""
        return self.beam_width or self.best_of or self.n

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at earlier tokens."""
        has_penalty = self.presence_penalty or self.frequency_penalty or self.bad_words
        return bool(has_penalty) or self.repetition_penalty != 1.0

    def _check_others(self) -> None:
        """What is no number."""
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings, got {self.stop!r}")
        rules = (
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(0 <= t < _INT32 for t in self.stop_token_ids), "token ids"),
            ("logit_bias", all(map(_is_bias, self.logit_bias)), "token ids with finite numbers"),
            ("stop_after", self.stop_after != "", "a non-empty text"),
            ("bad_words", all(self.bad_words), "non-empty strings"),
            ("early_stopping", self.early_stopping in (True, False, "never"), "true, false, never"),
        )
        for name, is_good, rule in rules:
            if not is_good:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    def _check_beams(self) -> None:
        if self.beam_width is None:
            return
        if self.temperature > 0 or self.best_of is not None:
            name = "temperature" if self.temperature > 0 else "best_of"
            raise ConfigError(f"beam_width and {name} exclude each other; leave one of them out")
        if self.stop_after is not None:
            raise ConfigError("beam_width and stop_after exclude each other; leave one of them out")


def _is_bias(pair: tuple[int, float]) -> bool:
    token, value = pair
    return 0 <= token < _INT32 and (value == -math.inf or abs(value) <= 1e4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to complete it, as handed to the engine.

    Attributes:
        request_id: The caller's handle; comes back on the completion. Unique among live requests.
        prompt_ids: The prompt's token ids, special tokens included.
        params: How to sample.
        address: A stable 64-bit name of the row; with the job's seed it keys the row's random
            numbers, so that they do not depend on batch, order or neighbours.
        adapter: The name of the adapter that completes it; None for the model as it is.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    address: int = 0
    adapter: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely the model found one token.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability; None for a prompt's first token.
        rank: 1 for the likeliest token; None for a prompt's first token.
        top: The likeliest tokens with their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample of a request.

    A request with `n` samples gives `n` completions, all at once and in order; one that cannot be
    completed gives one, with an error.

    Attributes:
        request_id: The request's handle.
        sample: Which of the request's samples, from 0.
        text: The generated text, cut at the stop string; "" for an error.
        token_ids: Every token sampled, the ones behind the cut and the end-of-sequence included;
            empty for an error.
        finish_reason: "stop" (stop token or string), "length" (a limit) or "error".
        stop_reason: The stop string or the stop token's id as text for "stop"; the limit that
            was reached ("max_tokens", "max_model_len" or "kv_capacity") for "length".
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Leading prompt tokens whose blocks came from the prefix cache.
        seed: The seed the row was sampled with (the row's own, or the job's).
        ends_in_partial_character: The completion ended inside a character; its text ends in U+FFFD.
        cumulative_logprob: Sum of the log-probabilities of the sampled tokens; None unless
            logprobs, best_of or beams asked for it.
        score: A beam's score; None without beam search.
        logprobs: One entry per sampled token; None unless asked for.
        prompt_logprobs: One entry per prompt token; None unless asked for.
        error_code: Why there is no completion; None when there is one.
        error_message: The error in words, free of prompt text.
    """

    request_id: int
    sample: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason
    stop_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int = 0
    ends_in_partial_character: bool = False
    cumulative_logprob: float | None = None
    score: float | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error_code: ErrorCode | None = None
    error_message: str | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled."""
        return len(self.token_ids)
