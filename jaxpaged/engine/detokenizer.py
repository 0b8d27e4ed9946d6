"""Token ids to text, one token at a time, right for characters and spaces split over tokens."""

import codecs
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxpaged.model.byte_characters import BYTES

# Enough tokens in front for a tokenizer to decide about the space before the first new one.
_LEAD = 4
# A character has at most four bytes: a part of one has at most three, of a token each or fewer.
_PART = 3
_REPLACEMENT = "\ufffd"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@runtime_checkable
class TokenDecoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids` without special tokens; U+FFFD for what is not UTF-8."""
        ...

    def token_text(self, token_id: int, /) -> str | None:
        """The vocabulary's entry for an id; None for an id without a token."""
        ...


class Detokenizer:
    """The text of one completion as it grows.

    Text is the difference between two decodings that share a few tokens in front, the last ones
    of the prompt at first, so that a leading space survives. A character that is not complete yet
    is held back; one that the prompt began belongs to the completion. Bytes that no further ones
    can complete are text as the tokenizer decodes them.

        ids   0 ... read ... settled ... end
              |-known-|         |--held--|      at most three tokens are held
              |------decoded----|               new text = decoded minus known
    """

    def __init__(self, tokenizer: TokenDecoder, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-(_LEAD + 2 * _PART) :])
        self._read = self._settled(0)
        self._forget(self._lead_start())
        self.text = ""

    def append(self, token_id: int) -> str:
        """The text that became certain with this token; also at the end of `text`."""
        # A special token has no text, and would not keep the space of a token behind it. Twice,
        # because a token that is only a space may lose it at the beginning.
        if not self._tokenizer.decode([token_id, token_id]):
            return ""
        self._ids.append(token_id)
        settled = self._settled(self._read)
        if settled == self._read:
            return ""
        new = self._new_text(settled)
        begin, self._read = self._read, settled
        self._forget(begin)
        self.text += new
        return new

    def finish(self) -> str:
        """What was held back, now also at the end of `text`.

        It ends in one U+FFFD for the character that is not complete; "" if there is none.
        """
        if self._read == len(self._ids):
            return ""
        held = self._new_text(len(self._ids)).rstrip(_REPLACEMENT) + _REPLACEMENT
        del self._ids[self._read :]
        self.text += held
        return held

    def _new_text(self, end: int) -> str:
        known = self._tokenizer.decode(self._ids[: self._read])
        decoded = self._tokenizer.decode(self._ids[:end])
        if decoded.startswith(known):
            return decoded[len(known) :]
        # Byte fallback: an invalid byte spoils the whole run, also what was known of it.
        return self._tokenizer.decode(self._ids[self._read : end])

    def _settled(self, begin: int) -> int:
        """Where the character begins that the ids from `begin` on leave incomplete; or the end."""
        if not self._tokenizer.decode(self._ids).endswith(_REPLACEMENT):
            return len(self._ids)
        last = self._ids[begin:][-_PART:]
        pieces = [_token_bytes(self._tokenizer.token_text(token) or "") for token in last]
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(b"".join(pieces))
        num_held = len(utf8.getstate()[0])
        end = len(self._ids)
        while num_held > 0:
            num_held -= len(pieces.pop())
            end -= 1
        return end

    def _lead_start(self) -> int:
        """Where the known text can begin: best not inside a character, which would spoil it."""
        starts = [max(0, self._read - _LEAD - more) for more in range(_PART + 1)]
        return min(starts, key=self._num_replaced)

    def _num_replaced(self, start: int) -> int:
        return self._tokenizer.decode(self._ids[start : self._read]).count(_REPLACEMENT)

    def _forget(self, begin: int) -> None:
        del self._ids[:begin]
        self._read -= begin


def _token_bytes(text: str) -> bytes:
    """The bytes of a token, where decoding has shown that it is not plain text."""
    fallback = _BYTE_FALLBACK.fullmatch(text)
    if fallback is not None:
        return bytes.fromhex(fallback[1])
    if all(character in BYTES for character in text):
        return bytes(BYTES[character] for character in text)
    return text.encode()
