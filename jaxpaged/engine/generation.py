"""One sequence with its text: takes sampled tokens and says when the completion is over."""

from typing import Literal

from jaxpaged.engine import stopping
from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.engine.sampling import INVALID_TOKEN
from jaxpaged.engine.stopping import StopRule
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion
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

    def take(self, token: int) -> Completion | None:
        """Appends a sampled token; the completion if that ended it.

        Checked in this order: stop token, stop string, limit; so a stop string completed by the
        last allowed token counts as "stop". Before `min_tokens` stop strings are not looked for.
        """
        if token == INVALID_TOKEN:
            return self._invalid()
        sequence = self.sequence
        sequence.token_ids.append(token)
        if token in self._rule.token_ids:
            return self._stopped_by_token(self._rule.token_ids[token])
        new = self._detokenizer.append(token)
        if new and sequence.num_sampled > sequence.request.params.min_tokens:
            match = stopping.find_stop(self._detokenizer.text, len(new), self._rule)
            if match is not None:
                text = self._detokenizer.text[: match.end]
                return self._completion(text, "stop", match.string)
        if sequence.num_sampled >= sequence.max_tokens:
            is_partial = self._detokenizer.finish()
            text, reason = self._detokenizer.text, sequence.limit_reason
            return self._completion(text, "length", reason, is_partial=is_partial)
        return None

    def _stopped_by_token(self, reason: str) -> Completion:
        is_partial = self._detokenizer.finish()
        text = self._detokenizer.text
        if self._rule.include_stop and reason in self._rule.strings:
            text += reason
        return self._completion(text, "stop", reason, is_partial=is_partial)

    def _completion(
        self,
        text: str,
        finish_reason: Literal["stop", "length"],
        stop_reason: str,
        *,
        is_partial: bool = False,
    ) -> Completion:
        sequence = self.sequence
        return Completion(
            request_id=sequence.request.request_id,
            text=text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_tokens=sequence.num_prompt,
            seed=self._seed,
            ends_in_partial_character=is_partial,
        )

    def _invalid(self) -> Completion:
        sequence = self.sequence
        return Completion(
            request_id=sequence.request.request_id,
            finish_reason="error",
            prompt_tokens=sequence.num_prompt,
            seed=self._seed,
            error_code="nonfinite_logits",
            error_message=f"the logits behind token {sequence.num_tokens} are not finite",
        )
