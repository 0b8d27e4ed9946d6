"""Which tokens and strings end a completion. Pure functions, no state."""

import collections.abc
import dataclasses
from collections.abc import Sequence

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
        after: The text behind which stop strings begin to count; None where they always do.
        after_id: The special token that it is, which is no part of the text; None if it is none.
        late_ids: Those of `token_ids` that are stop strings and wait for it, too.
    """

    token_ids: dict[int, str]
    special_texts: dict[int, str]
    strings: tuple[str, ...]
    include_stop: bool
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    after: str | None = None
    after_id: int | None = None
    late_ids: frozenset[int] = frozenset()


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
        after=params.stop_after,
        after_id=known.get(params.stop_after or ""),
        late_ids=frozenset(special.keys() - ids.keys()) if params.stop_after else frozenset(),
    )


def is_behind_marker(rule: StopRule, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether stop strings count from the first token on.

    So it is where no text has to come before them, or where that is what the prompt ends with but
    for white space: a template that is told not to think writes an empty thought itself.
    """
    if rule.after is None:
        return True
    # A character has at least one token or a share of one; white space behind may have more.
    last = prompt_ids[-len(rule.after.encode()) - 16 :]
    text = tokenizer.decode(last, skip_special_tokens=False)
    return text.rstrip().endswith(rule.after.rstrip())


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


def find_stop(text: str, num_new: int, rule: StopRule, *, begin: int = 0) -> Match | None:
    """The earliest stop string that the last `num_new` characters of the text completed.

    Of two that begin at the same place the longer one wins. What is in front of `begin` is no
    part of any.
    """
    found: list[tuple[int, int, str]] = []
    for string in rule.strings:
        at = text.find(string, max(begin, len(text) - num_new - len(string) + 1))
        if at >= 0:
            found.append((at, -len(string), string))
    if not found:
        return None
    at, _, string = min(found)
    return Match(string=string, end=at + len(string) if rule.include_stop else at)
