"""Log-probabilities of a prompt's tokens, gathered from the chunks it was computed in."""

from jaxpaged.engine import logprob_entries
from jaxpaged.engine.sampling import Sampled
from jaxpaged.request import Request, TokenLogprob


class PromptScores:
    """What is known of a request's prompt so far."""

    def __init__(self, request: Request) -> None:
        self._prompt = request.prompt_ids
        self._num_top = request.params.prompt_logprobs
        self._entries: dict[int, TokenLogprob] = {}

    def take(self, start: int, scored: Sampled) -> None:
        """Takes the scores of the tokens from position `start` on; again after a recompute."""
        if self._num_top is None:
            return
        for row in range(len(scored.logprobs)):
            position = start + row
            self._entries[position] = logprob_entries.entry(
                scored, row, token=self._prompt[position], num_top=self._num_top
            )

    def entries(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per prompt token, the first without a probability; None if nobody asked."""
        if self._num_top is None:
            return None
        first = TokenLogprob(token_id=self._prompt[0], logprob=None, rank=None)
        return (first, *(self._entries[place] for place in range(1, len(self._prompt))))
