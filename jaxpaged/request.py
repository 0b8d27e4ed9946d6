"""What the engine is asked for and what it answers: immutable values, plain Python.

Knows nothing of rows, files or devices.
"""

import dataclasses
from typing import Literal

from jaxpaged.errors import ConfigError

FinishReason = Literal["stop", "length", "error"]

ErrorCode = Literal[
    "null_prompt",
    "empty_prompt",
    "bad_type",
    "invalid_utf8",
    "template_error",
    "prompt_too_long",
    "kv_capacity",
    "bad_row_params",
    "nonfinite_logits",
    "timeout",
    "cancelled",
]
"""Why a row could not be completed; the list is closed, so that users can match on it."""


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
        min_tokens: End-of-sequence and stop tokens cannot be sampled before this many tokens,
            and stop strings are not looked for.
        ignore_eos: The model's end-of-sequence tokens do not end the completion.

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
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings, got {self.stop!r}")
        limits = (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 1e4, "from 0 to 10,000"),
            ("top_k", -1 <= self.top_k < _INT32, "at least 1 and below 2**31, or 0 for off"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(0 <= t < _INT32 for t in self.stop_token_ids), "token ids"),
        )
        for name, is_good, rule in limits:
            if not is_good:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to complete it, as handed to the engine.

    Attributes:
        request_id: The caller's handle; comes back on the completion. Unique among live requests.
        prompt_ids: The prompt's token ids, special tokens included.
        params: How to sample.
        address: A stable 64-bit name of the row; with the job's seed it keys the row's random
            numbers, so that they do not depend on batch, order or neighbours.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    address: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result for one request.

    Attributes:
        request_id: The request's handle.
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
        error_code: Why there is no completion; None when there is one.
        error_message: The error in words, free of prompt text.
    """

    request_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason
    stop_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int = 0
    ends_in_partial_character: bool = False
    error_code: ErrorCode | None = None
    error_message: str | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled."""
        return len(self.token_ids)
