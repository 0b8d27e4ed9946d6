"""One sequence with its text: takes sampled tokens and says when the completion is over.

Knows nothing of the other samples of its request.
"""

import math
from typing import Literal

from jaxpaged.engine import stopping
from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.engine.sampling import INVALID_TOKEN
from jaxpaged.engine.stopping import StopRule
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, SamplingParams, TokenLogprob
from jaxpaged.sequence import Sequence


class Generation:
    """A sequence, its stop rule and the text sampled so far."""

    def __init__(
        self, sequence: Sequence, rule: StopRule, tokenizer: Tokenizer, *, seed: int
    ) -> None:
        self.sequence = sequence
        self._rule = rule
        self._seed = seed
        self._detokenizer = Detokenizer(tokenizer, sequence.request.prompt_ids)
        self._logprobs: list[TokenLogprob] = []
        # Where in the text stop strings begin to count; None until the marker was written.
        is_behind = stopping.is_behind_marker(rule, sequence.request.prompt_ids, tokenizer)
        self._stops_begin = 0 if is_behind else None

    def take(self, token: int, logprob: TokenLogprob | None = None) -> Completion | None:
        """Appends a sampled token; the completion if that ended it.

        Args:
            token: The token.
            logprob: How likely it was; None if nobody asked.

        Checked in this order: stop token, stop string, limit; so a stop string completed by the
        last allowed token counts as "stop". One completed by the incomplete character at the end
        comes before either. In the first `min_tokens` tokens stop strings are not looked for.
        """
        if token == INVALID_TOKEN:
            return invalid(self.sequence, self._seed)
        sequence = self.sequence
        sequence.token_ids.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        if token in self._rule.token_ids and not self._is_too_early(token):
            return self._end("stop", self._rule.token_ids[token], self._included(token))
        completion = self._stopped_by_string(self._detokenizer.append(token))
        if token == self._rule.after_id and self._stops_begin is None:
            self._stops_begin = len(self._detokenizer.text)
        if completion is None and sequence.num_output >= sequence.max_tokens:
            return self._end("length", sequence.limit_reason)
        return completion

    def _stopped_by_string(self, new: str) -> Completion | None:
        """The completion if `new`, the last of the text, completed a stop string."""
        self._look_for_marker(len(new))
        if self._stops_begin is None:
            return None
        if not new or self.sequence.num_output <= self.sequence.request.params.min_tokens:
            return None
        match = stopping.find_stop(
            self._detokenizer.text, len(new), self._rule, begin=self._stops_begin
        )
        if match is None:
            return None
        return self._completion(self._detokenizer.text[: match.end], "stop", match.string)

    def _look_for_marker(self, num_new: int) -> None:
        """Notes where the text ends behind which stop strings count, once that is written."""
        marker = self._rule.after
        if self._stops_begin is not None or marker is None:
            return
        text = self._detokenizer.text
        at = text.find(marker, max(0, len(text) - num_new - len(marker) + 1))
        if at >= 0:
            self._stops_begin = at + len(marker)

    def _is_too_early(self, token: int) -> bool:
        """Whether the token is a stop string that does not count yet."""
        return self._stops_begin is None and token in self._rule.late_ids

    def _included(self, token: int) -> str:
        """What a stop token adds to the text: the stop string it is, if that is asked for."""
        return self._rule.special_texts.get(token, "") if self._rule.include_stop else ""

    def _end(
        self, finish_reason: Literal["stop", "length"], stop_reason: str, tail: str = ""
    ) -> Completion:
        """The completion, unless the text that was held back completes a stop string."""
        held = self._detokenizer.finish()
        completion = self._stopped_by_string(held)
        if completion is not None:
            return completion
        text = self._detokenizer.text + tail
        return self._completion(text, finish_reason, stop_reason, is_partial=bool(held))

    def _completion(
        self,
        text: str,
        finish_reason: Literal["stop", "length"],
        stop_reason: str,
        *,
        is_partial: bool = False,
    ) -> Completion:
        sequence = self.sequence
        params = sequence.request.params
        # Not `sum`, which rounds by compensation from Python 3.12 on and without it before.
        total = math.fsum(entry.logprob or 0.0 for entry in self._logprobs)
        return Completion(
            request_id=sequence.request.request_id,
            sample=sequence.sample,
            text=text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached,
            seed=self._seed,
            cumulative_logprob=total if wants_logprobs(params) else None,
            logprobs=tuple(self._logprobs) if params.logprobs is not None else None,
            ends_in_partial_character=is_partial,
        )


def wants_logprobs(params: SamplingParams) -> bool:
    """Whether the log-probabilities of sampled tokens are needed."""
    return params.logprobs is not None or params.best_of is not None or bool(params.beam_width)


def invalid(sequence: Sequence, seed: int) -> Completion:
    """The completion of a request for which the model gave no numbers."""
    return Completion(
        request_id=sequence.request.request_id,
        finish_reason="error",
        prompt_tokens=sequence.num_prompt,
        seed=seed,
        error_code="nonfinite_logits",
        error_message=f"the logits behind token {len(sequence.token_ids)} are not finite",
    )
