"""Sequences for tests of the cache: made of tokens, admitted, computed and given back."""

from jaxpaged.cache.block_manager import BlockManager
from jaxpaged.request import Request, SamplingParams
from jaxpaged.sequence import Sequence

BLOCK_SIZE = 4


def make_sequence(
    prompt: tuple[int, ...], *, request_id: int = 0, prompt_logprobs: int | None = None
) -> Sequence:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    request = Request(request_id=request_id, prompt_ids=prompt, params=params)
    return Sequence(request=request, max_tokens=100)


def computed(manager: BlockManager, sequence: Sequence) -> Sequence:
    """The sequence, admitted and with all its tokens computed in one step."""
    start = manager.admit(sequence)
    manager.prepare(sequence, start, sequence.num_tokens)
    manager.register(sequence, sequence.num_tokens)
    sequence.num_computed = sequence.num_tokens
    return sequence


def remembered(manager: BlockManager, prompt: tuple[int, ...]) -> None:
    """Leaves the prompt's full blocks in the prefix cache and holds none."""
    manager.free(computed(manager, make_sequence(prompt)))


def cached(manager: BlockManager, prompt: tuple[int, ...]) -> int:
    """Leading tokens of the prompt that the prefix cache knows."""
    return manager.cached_tokens(make_sequence((*prompt, 0)))
