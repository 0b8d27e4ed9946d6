"""All samples of one request: finished together, or failed together."""

import dataclasses

from jaxpaged.engine import logprob_entries
from jaxpaged.engine.generation import Generation, wants_logprobs
from jaxpaged.engine.prompt_scores import PromptScores
from jaxpaged.engine.sampling import INVALID_TOKEN, Sampled
from jaxpaged.engine.stopping import StopRule
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence


class SampleGroup:
    """The samples of a request.

    Args:
        sequences: One per sample; the first one carries the prompt to the others.
        rule: What ends them.
        tokenizer: Writes their text.
        scheduler: Is told of samples that are over.
        seed: They are sampled with.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        rule: StopRule,
        tokenizer: Tokenizer,
        *,
        scheduler: Scheduler,
        seed: int,
    ) -> None:
        first = sequences[0]
        first.forks.extend(sequences[1:])
        self._params = first.request.params
        self._scheduler = scheduler
        self._generations = {
            sequence: Generation(sequence, rule, tokenizer, seed=seed) for sequence in sequences
        }
        self._done: list[Completion] = []
        self.prompt_scores = PromptScores(first.request)
        scheduler.add(first)

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled so far and that the host knows."""
        running = sum(sequence.num_output for sequence in self._generations)
        return running + sum(completion.completion_tokens for completion in self._done)

    def take(
        self, sequence: Sequence, token: int, sampled: Sampled, row: int
    ) -> list[Completion] | None:
        """Takes what a sample's step gave; all completions once the last sample is over."""
        sequence.num_pending -= 1
        logprob = None
        if wants_logprobs(self._params) and token != INVALID_TOKEN:
            num_top = self._params.logprobs or 0
            logprob = logprob_entries.entry(sampled, row, token=token, num_top=num_top)
        completion = self._generations[sequence].take(token, logprob)
        if completion is None:
            return None
        if completion.error_code is not None:
            self.drop()
            return [completion]
        self._scheduler.finish(sequence)
        del self._generations[sequence]
        self._done.append(completion)
        return None if self._generations else self._best()

    def drop(self) -> None:
        """Takes what is unfinished out of the scheduler."""
        for sequence in self._generations:
            sequence.forks.clear()
            self._scheduler.finish(sequence)
        self._generations.clear()

    def _best(self) -> list[Completion]:
        self._done.sort(key=lambda completion: completion.sample)
        if self._params.best_of is not None:
            # The sort is stable: of equally likely samples the first.
            self._done.sort(key=_unlikeliness)
        scores = self.prompt_scores.entries()
        cached = max(completion.cached_tokens for completion in self._done)
        return [
            dataclasses.replace(
                completion, sample=place, prompt_logprobs=scores, cached_tokens=cached
            )
            for place, completion in enumerate(self._done[: self._params.n])
        ]


def _unlikeliness(completion: Completion) -> float:
    assert completion.cumulative_logprob is not None, "best_of asks for log-probabilities"
    return -completion.cumulative_logprob
