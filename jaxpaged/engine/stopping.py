"""Which tokens and strings end a completion. Pure functions, no state."""

import collections.abc
import dataclasses

from jaxpaged.model.tokenizer import Tokenizer
from jaxpaged.request import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """What ends one completion, with the model's tokens and special stop strings resolved.

    Attributes:
        token_ids: Tokens that end it, each with the `stop_reason` it is reported by.
        special_texts: The stop strings among them that are special tokens, by token.
        strings: Stop strings to look for in the text.
        include_stop: Keep the stop string in the text.
        bad_word_ids: The token sequences that must not be sampled.
    """

    token_ids: dict[int, str]
    special_texts: dict[int, str]
    strings: tuple[str, ...]
    include_stop: bool
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


def stop_rule(params: SamplingParams, tokenizer: Tokenizer) -> StopRule:
    """The stop rule of a request.

    A stop string that is a special token of the model stops by that token: special tokens are no
    part of the text, so it would never be found there.
    """
    ids = {} if params.ignore_eos else {token: str(token) for token in tokenizer.eos_ids}
    ids |= {token: str(token) for token in params.stop_token_ids}
    known = tokenizer.special_tokens
    special = {known[text]: text for text in params.stop if text in known}
    return StopRule(
        token_ids=ids | special,
        special_texts=special,
        strings=params.stop,
        include_stop=params.include_stop,
        bad_word_ids=tuple(_bad_word_ids(params.bad_words, tokenizer)),
    )


def _bad_word_ids(
    words: collections.abc.Iterable[str], tokenizer: Tokenizer
) -> collections.abc.Iterator[tuple[int, ...]]:
    """Each word as the tokenizer writes it in the middle of a text and behind a space."""
    for word in words:
        found = {tuple(tokenizer.encode_text(text)) for text in (word, f" {word.lstrip()}")}
        yield from sorted(ids for ids in found if ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A stop string in the text: which one, and where the text ends because of it."""

    string: str
    end: int


def find_stop(text: str, num_new: int, rule: StopRule) -> Match | None:
    """The earliest stop string that the last `num_new` characters of the text completed.

    Of two that begin at the same place the longer one wins.
    """
    found: list[tuple[int, int, str]] = []
    for string in rule.strings:
        at = text.find(string, max(0, len(text) - num_new - len(string) + 1))
        if at >= 0:
            found.append((at, -len(string), string))
    if not found:
        return None
    at, _, string = min(found)
    return Match(string=string, end=at + len(string) if rule.include_stop else at)
