"""Sampling parameters as arrays: one row per lane, made on the host, kept on the device.

Knows nothing of logits; what a field does to them is said where it is read.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from jaxpaged.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED, SamplingParams
from jaxpaged.shapes import AnyArray

ALWAYS = 2**31 - 1
"""In `bias_until`: the entry never ends."""

NOT_A_TOKEN = -1
"""Unused places of `bad_words`."""

# Float32 has no smaller number of full precision; a penalty of 0 would divide by it.
_LEAST_PENALTY = float(np.finfo(np.float32).tiny)


class LaneParams(NamedTuple):
    """The sampling parameters of every lane; the rows of one lane lack the axis B."""

    temperature: Float[AnyArray, " B"]
    """0 is greedy."""
    top_k: Int[AnyArray, " B"]
    """0 keeps all."""
    top_p: Float[AnyArray, " B"]
    """1 keeps all."""
    min_p: Float[AnyArray, " B"]
    """0 keeps all."""
    typical_p: Float[AnyArray, " B"]
    """1 keeps all."""
    repetition_penalty: Float[AnyArray, " B"]
    """1 changes nothing."""
    presence_penalty: Float[AnyArray, " B"]
    """0 changes nothing."""
    frequency_penalty: Float[AnyArray, " B"]
    """0 changes nothing."""
    keys: UInt32[AnyArray, "B 2"]
    """Random key of each sequence."""
    num_prompt: Int[AnyArray, " B"]
    """Leading tokens of the history that were not sampled."""
    num_logprobs: Int[AnyArray, " B"]
    """-1 for no log-probabilities, 0 for the sampled token's alone, k for k alternatives too."""
    is_beam: Bool[AnyArray, " B"]
    """Log-probabilities are those a beam search adds up; alternatives are always wanted."""
    bias_ids: Int[AnyArray, "B E"]
    """Tokens whose logits change; unused entries are out of the vocabulary."""
    bias_values: Float[AnyArray, "B E"]
    """What is added to their logits; -inf bans."""
    bias_until: Int[AnyArray, "B E"]
    """The entry counts while fewer tokens than this were sampled."""
    bad_words: Int[AnyArray, "B J Q"]
    """Token sequences the completion must not contain, of two tokens or more, at the right end."""


def lane_params(
    sampling: SamplingParams,
    *,
    key: tuple[int, int],
    num_prompt: int,
    stop_ids: Iterable[int],
    bad_word_ids: Iterable[tuple[int, ...]],
    vocab_size: int,
) -> LaneParams:
    """The rows of one lane, for parameters without `fault`.

    Args:
        sampling: What the row asks for.
        key: Two 32-bit words that key the sequence's random numbers.
        num_prompt: Prompt tokens.
        stop_ids: Every token that ends the sequence; banned before `min_tokens` are sampled.
        bad_word_ids: The token sequences of the row's bad words.
        vocab_size: Marks unused entries.
    """
    row = LaneParams(*(field[0] for field in empty(1, vocab_size)))
    bias = _bias(sampling, stop_ids, bad_word_ids)
    sequences = _sequences(bad_word_ids)
    assert max(len(bias) - MAX_BIASED, len(sequences) - MAX_BAD_WORDS) <= 0, "see fault()"
    for place, ((token, until), value) in enumerate(bias.items()):
        row.bias_ids[place], row.bias_until[place] = token, until
        row.bias_values[place] = value
    for place, tokens in enumerate(sequences):
        row.bad_words[place, -len(tokens) :] = tokens
    # Samples of which the best are kept are compared by their log-probability.
    wanted = sampling.logprobs if sampling.logprobs is not None else -1
    if sampling.best_of is not None:
        wanted = max(wanted, 0)
    penalty = max(sampling.repetition_penalty, _LEAST_PENALTY)
    return row._replace(
        temperature=np.asarray(sampling.temperature, np.float32),
        top_k=np.asarray(max(0, sampling.top_k), np.int32),
        top_p=np.asarray(sampling.top_p, np.float32),
        min_p=np.asarray(sampling.min_p, np.float32),
        typical_p=np.asarray(sampling.typical_p, np.float32),
        repetition_penalty=np.asarray(penalty, np.float32),
        presence_penalty=np.asarray(sampling.presence_penalty, np.float32),
        frequency_penalty=np.asarray(sampling.frequency_penalty, np.float32),
        keys=np.asarray(key, np.uint32),
        num_prompt=np.asarray(num_prompt, np.int32),
        num_logprobs=np.asarray(wanted, np.int32),
        is_beam=np.asarray(sampling.beam_width is not None),
    )


def empty(num_lanes: int, vocab_size: int) -> LaneParams:
    """Greedy lanes that want nothing else."""

    def full(shape: tuple[int, ...], value: float | int, dtype: type) -> np.ndarray:
        return np.full((num_lanes, *shape), value, dtype)

    return LaneParams(
        temperature=full((), 0, np.float32),
        top_k=full((), 0, np.int32),
        top_p=full((), 1, np.float32),
        min_p=full((), 0, np.float32),
        typical_p=full((), 1, np.float32),
        repetition_penalty=full((), 1, np.float32),
        presence_penalty=full((), 0, np.float32),
        frequency_penalty=full((), 0, np.float32),
        keys=full((2,), 0, np.uint32),
        num_prompt=full((), 0, np.int32),
        num_logprobs=full((), -1, np.int32),
        is_beam=full((), False, np.bool_),
        bias_ids=full((MAX_BIASED,), vocab_size, np.int32),
        bias_values=full((MAX_BIASED,), 0, np.float32),
        bias_until=full((MAX_BIASED,), 0, np.int32),
        bad_words=full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NOT_A_TOKEN, np.int32),
    )


def fault(
    sampling: SamplingParams,
    *,
    stop_ids: Iterable[int],
    bad_word_ids: Iterable[tuple[int, ...]],
    vocab_size: int,
) -> str | None:
    """What of the parameters does not fit a lane, or None."""
    unknown = [token for token, _ in sampling.logit_bias if token >= vocab_size]
    if unknown:
        return f"logit_bias of token {unknown[0]}, which the vocabulary of {vocab_size} lacks"
    num_biased = len(_bias(sampling, stop_ids, bad_word_ids))
    if num_biased > MAX_BIASED:
        return (
            f"logit_bias, min_tokens and bad_words change {num_biased} tokens; "
            f"at most {MAX_BIASED} work"
        )
    sequences = _sequences(bad_word_ids)
    if len(sequences) > MAX_BAD_WORDS:
        return (
            f"bad_words come to {len(sequences)} sequences of tokens; at most {MAX_BAD_WORDS} work"
        )
    longest = max(map(len, sequences), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        return f"a bad word has {longest} tokens; at most {MAX_BAD_WORD_TOKENS} work"
    return None


def _bias(
    sampling: SamplingParams, stop_ids: Iterable[int], bad_word_ids: Iterable[tuple[int, ...]]
) -> dict[tuple[int, int], float]:
    """What is added to a token's logit, by the token and the number of tokens it ends at.

    Each pair comes once: the device may add the entries of a token in any order, and only with
    one finite number per token is that order of no account.
    """
    bias: dict[tuple[int, int], float] = {}
    for token, value in sampling.logit_bias:
        bias[token, ALWAYS] = bias.get((token, ALWAYS), 0.0) + value
    for tokens in bad_word_ids:
        if len(tokens) == 1:
            bias[tokens[0], ALWAYS] = float("-inf")
    if sampling.min_tokens:
        for token in stop_ids:
            bias[token, min(sampling.min_tokens, ALWAYS)] = float("-inf")
    return bias


def _sequences(bad_word_ids: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The bad words of several tokens, each once."""
    return [*dict.fromkeys(tokens for tokens in bad_word_ids if len(tokens) > 1)]
