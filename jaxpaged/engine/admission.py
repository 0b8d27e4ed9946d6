"""From a request to a sequence, or to the reason why it can never be completed."""

import dataclasses
import hashlib

from jaxpaged.cache.capacity import PoolCapacity, blocks_for
from jaxpaged.engine import lane_params
from jaxpaged.engine.logprobs import MAX_ALTERNATIVES
from jaxpaged.engine.stopping import StopRule
from jaxpaged.request import ErrorCode, Request, SamplingParams
from jaxpaged.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits every request of one engine has to keep.

    Attributes:
        max_model_len: Most tokens of a sequence.
        capacity: What the pool holds.
        vocab_size: Token ids are below it.
        seed: The job's seed.
        max_num_seqs: Lanes: a beam search needs one per beam.
        adapters: The names of the model's adapters, by their numbers from 1.
    """

    max_model_len: int
    capacity: PoolCapacity
    vocab_size: int
    seed: int
    max_num_seqs: int
    adapters: tuple[str, ...] = ()

    def fault(self, request: Request, rule: StopRule) -> tuple[ErrorCode, str] | None:
        """Code and message of what makes the request impossible, or None."""
        prompt, params = request.prompt_ids, request.params
        room = self.max_model_len - len(prompt)
        if request.adapter is not None and request.adapter not in self.adapters:
            known = ", ".join(map(repr, self.adapters)) or "none"
            return "unknown_adapter", f"no adapter {request.adapter!r}; the engine has: {known}"
        if not prompt:
            return "empty_prompt", "the prompt has no tokens"
        if max(prompt) >= self.vocab_size or min(prompt) < 0:
            return "bad_type", f"a prompt token id is outside the vocabulary of {self.vocab_size}"
        unknown = [token for token in params.stop_token_ids if token >= self.vocab_size]
        if unknown:
            return "bad_row_params", (
                f"stop token id {unknown[0]} is outside the vocabulary of {self.vocab_size}"
            )
        if room < 1:
            return "prompt_too_long", (
                f"the prompt has {len(prompt)} tokens; with room for one more at most "
                f"{self.max_model_len - 1} fit max_model_len {self.max_model_len}"
            )
        unfit = lane_params.fault(
            params,
            stop_ids=rule.token_ids,
            bad_word_ids=rule.bad_word_ids,
            vocab_size=self.vocab_size,
        )
        if unfit is not None:
            return "bad_row_params", unfit
        if params.beam_width and params.beam_width + len(rule.token_ids) > MAX_ALTERNATIVES:
            return "bad_row_params", (
                f"{params.beam_width} beams with {len(rule.token_ids)} stop tokens; at most "
                f"{MAX_ALTERNATIVES} together work"
            )
        if (params.beam_width or 1) > self.max_num_seqs:
            return "bad_row_params", (
                f"beam_width is {params.beam_width}, engine.max_num_seqs is {self.max_num_seqs}; "
                "every beam needs a place in the batch"
            )
        # Without max_tokens the pool's size is a limit like others; a wish it cannot hold is not.
        wanted = min(params.max_tokens or 1, room)
        needed = blocks_for(len(prompt) + wanted - 1, self.capacity.block_size)
        # Beams advance together: all of them have to fit, at worst without a block in common.
        needed *= params.beam_width or 1
        if needed > self.capacity.num_blocks:
            return "kv_capacity", (
                f"{len(prompt)} prompt tokens and up to {wanted} new ones need {needed} blocks of "
                f"{self.capacity.block_size}, the pool has {self.capacity.num_blocks}; raise "
                "engine.num_blocks or memory_utilization, lower max_tokens, or cut the prompt"
            )
        return None

    def sequences(self, request: Request, rule: StopRule) -> list[Sequence]:
        """The waiting sequences of a request without fault: one per sample, or the first beam."""
        params = request.params
        num = 1 if params.beam_width else params.num_samples
        return [self.sequence(request, rule, sample=sample) for sample in range(num)]

    def sequence(self, request: Request, rule: StopRule, *, sample: int) -> Sequence:
        """A waiting sequence for one sample, or one beam, of a request without fault."""
        max_tokens, reason = self._token_limit(request)
        params = request.params
        address = request.address if params.seed is None else None
        return Sequence(
            request=request,
            sample=sample,
            max_tokens=max_tokens,
            limit_reason=reason,
            stop_ids=tuple(rule.token_ids),
            bad_word_ids=rule.bad_word_ids,
            key=random_key(self.row_seed(params), address, sample),
            adapter=0 if request.adapter is None else 1 + self.adapters.index(request.adapter),
            is_held=params.beam_width is not None,
        )

    def row_seed(self, params: SamplingParams) -> int:
        """The row's own seed, or the job's."""
        return self.seed if params.seed is None else params.seed

    def _token_limit(self, request: Request) -> tuple[int, str]:
        """The tightest limit on sampled tokens, and its name.

        The last token needs no slot in the pool: nothing attends to it.
        """
        num_prompt = len(request.prompt_ids)
        num_beams = request.params.beam_width or 1
        size = self.capacity.block_size
        held = self.capacity.num_blocks // num_beams * size
        limits = [
            (self.max_model_len - num_prompt, "max_model_len"),
            (held + 1 - num_prompt, "kv_capacity"),
        ]
        if request.params.max_tokens is not None:
            limits.insert(0, (request.params.max_tokens, "max_tokens"))
        return min(limits, key=lambda limit: limit[0])


def random_key(seed: int, address: int | None, sample: int = 0) -> tuple[int, int]:
    """Two 32-bit words that key a sequence's random numbers.

    Args:
        seed: The job's seed, or the row's own.
        address: The row's address; None for a row with a seed of its own, which is keyed by it
            alone, so that equal seeds give equal random numbers in different rows.
        sample: Which of the row's samples.
    """
    words = f"{seed}/{'row' if address is None else address}/{sample}"
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
