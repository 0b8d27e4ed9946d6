"""What prompts ask of a tokenizer; `jaxpaged.model.tokenizer.Tokenizer` gives it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxpaged.model.chat_templates import ChatTemplates


@runtime_checkable
class PromptTokenizer(Protocol):
    """Text to ids, with row text kept apart from control tokens."""

    vocab_size: int
    bos_id: int | None
    chat_templates: ChatTemplates

    def protect(self, text: str) -> str:
        """Row text whose literals of special tokens stay text."""
        ...

    def unprotect(self, text: str) -> str:
        """The text without the marks of `protect`."""
        ...

    def has_special_text(self, text: str) -> bool:
        """Whether the literal of a special token occurs."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ...
