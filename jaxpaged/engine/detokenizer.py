"""Token ids to text, one token at a time, right for characters and spaces split over tokens."""

from jaxpaged.model.tokenizer import Tokenizer

# Enough tokens in front for a tokenizer to decide about the space before the first new one.
_LEAD = 4
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one completion as it grows.

    Text is the difference between two decodings that share a few tokens in front, the last ones
    of the prompt at first, so that a leading space survives. A character that is not complete yet
    is held back.

        ids   ... prefix ... read ... end
                  |--- known ---|
                  |------ decoded ------|     new text = decoded minus known
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_LEAD:])
        self._prefix = 0
        self._read = len(self._ids)
        self.text = ""

    def append(self, token_id: int) -> str:
        """The text that became certain with this token; also at the end of `text`."""
        self._ids.append(token_id)
        known, decoded = self._decode()
        if decoded.endswith(_REPLACEMENT) or len(decoded) <= len(known):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        self.text += decoded[len(known) :]
        return decoded[len(known) :]

    def finish(self) -> bool:
        """Adds what was held back; True if the text ends in the middle of a character.

        An incomplete character becomes one U+FFFD.
        """
        known, decoded = self._decode()
        rest = decoded[len(known) :]
        self._prefix, self._read = self._read, len(self._ids)
        whole = rest.rstrip(_REPLACEMENT)
        is_partial = len(whole) < len(rest)
        self.text += whole + (_REPLACEMENT if is_partial else "")
        return is_partial

    def _decode(self) -> tuple[str, str]:
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        return known, self._tokenizer.decode(self._ids[self._prefix :])
