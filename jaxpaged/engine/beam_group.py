"""The beams of one request: sequences that advance together, fork and die as the search says.

A beam's next token is chosen here, on the host, when all beams have their candidates; until then
it rests. A beam that was preempted meanwhile is computed again and samples again: its first
candidates stand.
"""

import dataclasses

from jaxpaged.engine import stopping
from jaxpaged.engine.beam_search import BeamSearch, Hypothesis
from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.engine.generation import Generation, invalid
from jaxpaged.engine.prompt_scores import PromptScores
from jaxpaged.engine.sampling import INVALID_TOKEN, Sampled
from jaxpaged.engine.stopping import StopRule
from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import Completion, TokenLogprob
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence, SequenceStatus, token_array

_Candidates = list[tuple[int, float]]


class BeamGroup:
    """The beams of a request.

    Args:
        sequences: The first beam, alone.
        rule: What ends beams.
        tokenizer: Writes their text.
        scheduler: Is told of beams that fork and die.
        seed: Comes back on the completions.
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
        (first,) = sequences
        params = first.request.params
        assert params.beam_width is not None, "a request without beams has samples"
        self._first = first
        self._rule = rule
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._seed = seed
        self._search = BeamSearch(
            width=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            stop_ids=rule.token_ids,
            max_tokens=first.max_tokens,
        )
        self._beams = [first]
        self._num_beams = 1
        self._candidates: dict[Sequence, _Candidates] = {}
        # Of every step so far, the candidates of its running beams.
        self._steps: list[list[_Candidates]] = []
        self.prompt_scores = PromptScores(first.request)
        scheduler.add(first)

    @property
    def num_tokens(self) -> int:
        """Tokens that running beams have in all."""
        return sum(beam.num_output for beam in self._beams)

    def take(
        self, sequence: Sequence, token: int, sampled: Sampled, row: int
    ) -> list[Completion] | None:
        """Takes a beam's candidates; the best hypotheses once the search is over."""
        if token == INVALID_TOKEN:
            self.drop()
            return [invalid(sequence, self._seed)]
        if sequence in self._candidates:
            return None
        ids, logprobs = sampled.top_ids[row].tolist(), sampled.top_logprobs[row].tolist()
        self._candidates[sequence] = list(zip(ids, logprobs, strict=True))
        return None if len(self._candidates) < len(self._beams) else self._advance()

    def drop(self) -> None:
        """Takes the beams out of the scheduler."""
        for beam in self._beams:
            self._scheduler.finish(beam)
        self._beams = []

    def _advance(self) -> list[Completion] | None:
        candidates = [self._candidates[beam] for beam in self._beams]
        self._candidates.clear()
        self._steps.append(candidates)
        step = self._search.advance(candidates, self._stopped_by if self._rule.strings else None)
        if step.is_finished:
            self.drop()
            return self._completions()
        parents = {branch.parent for branch in step.branches}
        for number, beam in enumerate(self._beams):
            if number not in parents:
                self._scheduler.finish(beam)
        # A beam goes on as the first of its branches; forks are made before any token is added.
        beams: list[Sequence] = []
        for branch in step.branches:
            parent = self._beams[branch.parent]
            beams.append(self._forked(parent) if parent in beams else parent)
        for beam, branch in zip(beams, step.branches, strict=True):
            beam.token_ids.append(branch.token_id)
            self._scheduler.touch(beam)
        self._beams = beams
        return None

    def _forked(self, parent: Sequence) -> Sequence:
        child = dataclasses.replace(
            self._first,
            sample=self._num_beams,
            token_ids=token_array(),
            num_computed=0,
            num_cached=0,
            block_table=[],
            lane=None,
            forks=[],
            status=SequenceStatus.WAITING,
        )
        child.token_ids[:] = parent.token_ids
        self._num_beams += 1
        self._scheduler.fork(parent, child)
        return child

    def _stopped_by(self, beam: int, token: int) -> str | None:
        """The stop string that a beam's text has in it with this token."""
        sequence = self._beams[beam]
        output = [*sequence.output_ids, token]
        if len(output) <= sequence.request.params.min_tokens:
            return None
        text = Detokenizer(self._tokenizer, sequence.request.prompt_ids)
        new = [text.append(token) for token in output][-1]
        match = stopping.find_stop(text.text, len(new), self._rule) if new else None
        return None if match is None else match.string

    def _completions(self) -> list[Completion]:
        scores = self.prompt_scores.entries()
        return [
            dataclasses.replace(
                self._completion(hypothesis),
                sample=place,
                cached_tokens=self._first.num_cached,
                prompt_logprobs=scores,
            )
            for place, hypothesis in enumerate(self._search.best(self._first.request.params.n))
        ]

    def _completion(self, hypothesis: Hypothesis) -> Completion:
        """The hypothesis as it would have been sampled."""
        sequence = dataclasses.replace(
            self._first, token_ids=token_array(), block_table=[], forks=[]
        )
        generation = Generation(sequence, self._rule, self._tokenizer, seed=self._seed)
        completion = None
        for token in hypothesis.token_ids:
            assert completion is None, "a hypothesis ends where a sample would"
            completion = generation.take(token)
        assert completion is not None, "a hypothesis ends where a sample would"
        wants = sequence.request.params.logprobs is not None
        return dataclasses.replace(
            completion,
            cumulative_logprob=hypothesis.cumulative_logprob,
            score=hypothesis.score,
            logprobs=tuple(self._entries(hypothesis)) if wants else None,
        )

    def _entries(self, hypothesis: Hypothesis) -> list[TokenLogprob]:
        num_top = self._first.request.params.logprobs or 0
        entries: list[TokenLogprob] = []
        for step, (token, logprob, beam) in enumerate(
            zip(hypothesis.token_ids, hypothesis.logprobs, hypothesis.beams, strict=True)
        ):
            known = self._steps[step][beam]
            rank = 1 + [candidate for candidate, _ in known].index(token)
            entries.append(
                TokenLogprob(token_id=token, logprob=logprob, rank=rank, top=tuple(known[:num_top]))
            )
        return entries
