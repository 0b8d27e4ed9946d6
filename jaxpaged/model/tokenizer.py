"""Text to token ids and back, with control tokens kept apart from text that looks like them.

Wraps the `tokenizers` library. Knows nothing of the files a tokenizer comes from.

Row text is data: a literal such as `<|im_end|>` inside it must stay text, while the same literal
in a template is the control token. `protect` marks the characters of such literals before a
template places the row's text, each by a noncharacter in front, in the manner of a backslash
(shown as "°"); `encode` reads the marks and drops them:

    row text    a</s>b
    protect     a°<°/°s°>b
    template    <s>a°<°/°s°>b</s>
    encode      [1] "a</s>b" [2]
"""

import functools
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from jaxpaged.errors import CheckpointError, JaxPagedError
from jaxpaged.model import tokenizer_json
from jaxpaged.model.chat_template import ChatTemplate, TemplateError
from jaxpaged.model.chat_templates import ChatTemplates

# Unicode reserves noncharacters for a program's own use. Row text may hold one all the same: it
# is then marked itself.
_MARK = "\ufdd0"

_MARKED = re.compile(f"{_MARK}(.?)", re.DOTALL)


class TokenizerError(JaxPagedError):
    """The tokenizer of the model cannot make tokens of a text."""


class Tokenizer:
    """A tokenizer with what generation needs to know of it; does not change.

    Args:
        definition: The content of a `tokenizer.json`, as `tokenizer_json.checked` returns it.
        bos_id: The beginning-of-sequence token; None when there is none.
        eos_ids: Every token that ends a completion.
        adds_bos: The model wants the beginning-of-sequence token in front of a prompt.
        chat_templates: The model's.
        where: Names the file in errors.

    Attributes:
        bos_id: As given.
        eos_ids: As given.
        adds_bos: As given; never without a `bos_id`.
        chat_templates: As given.
        chat_template: The default one; None when the model has none.
        special_tokens: Literal to id of every control token.
        vocab_size: One more than the largest id.

    Raises:
        CheckpointError: The library refuses the definition, or the default template is malformed.
    """

    def __init__(
        self,
        definition: tokenizer_json.Definition,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        adds_bos: bool,
        chat_templates: ChatTemplates,
        where: str,
    ) -> None:
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.adds_bos = adds_bos and bos_id is not None
        self.chat_templates = chat_templates
        self.chat_template = _default_template(chat_templates)
        self._tokenizer = _load(definition, where)
        # Kept as text, a tenth of the size of the objects; parsed again by the first marked text.
        self._definition = json.dumps(definition)
        self.special_tokens = tokenizer_json.special_tokens(definition)
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self._literals = _Literals(self.special_tokens)
        self._makes_literals = tokenizer_json.makes_literals(definition)

    @property
    def definition(self) -> tokenizer_json.Definition:
        """The content of a `tokenizer.json` that makes this tokenizer."""
        return json.loads(self._definition)

    def has_special_text(self, text: str) -> bool:
        """Whether the literal of a control token occurs in `text`."""
        return self._literals.pattern.search(text) is not None

    def protect(self, text: str) -> str:
        """Row text in which no literal of a control token is left, wherever it is placed.

        Literals that only come about together with neighbouring text are broken too. Text
        without any comes back as it is.
        """
        spans = [match.span() for match in self._literals.pattern.finditer(text)]
        spans += self._literals.spans_at_edges(text)
        if _MARK in text:
            spans += [match.span() for match in re.finditer(_MARK, text)]
        # White space stays bare: a template may strip it and would leave its mark to what follows.
        marked = {i for begin, end in spans for i in range(begin, end) if not text[i].isspace()}
        if not marked:
            return text
        return "".join(
            _MARK + character if i in marked else character for i, character in enumerate(text)
        )

    def unprotect(self, text: str) -> str:
        """`text` without the marks of `protect`."""
        return _MARKED.sub(r"\1", text)

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, which must be valid Unicode (no lone surrogates).

        Literals of control tokens are control tokens, protected ones are text. Where the model
        wants a beginning-of-sequence token there is one in front, and no second one when `text`
        already begins with it.

        Raises:
            TokenizerError: The model's tokenizer fails on this text.
        """
        if _MARK in text or self._makes_literals:
            ids = self._fenced.encode(text)
        else:
            ids = _encoded(self._tokenizer, text)
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """The token ids of `text` alone, with no beginning-of-sequence token in front.

        Raises:
            TokenizerError: The model's tokenizer fails on this text.
        """
        return _encoded(self._tokenizer, text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, spaces as they are.

        Sentencepiece-like tokenizers drop the space of the first token, which begins a text: the
        text of a continuation is what decoding adds to that of the ids before it.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's entry for an id; None for an id without a token."""
        return self._tokenizer.id_to_token(token_id)

    @functools.cached_property
    def _fenced(self) -> "_FencedTokenizer":
        return _FencedTokenizer(json.loads(self._definition), self.special_tokens)


class _Literals:
    """The literals of the control tokens, and where they or parts of them occur in a text."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = [literal for literal in literals if literal]
        longest_first = sorted(self._literals, key=len, reverse=True)
        # Without any literal: a pattern that matches nothing.
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = max(map(len, self._literals), default=0)
        self._heads = {text[:n] for text in self._literals for n in range(1, len(text))}
        self._tails = {text[n:] for text in self._literals for n in range(1, len(text))}

    def spans_at_edges(self, text: str) -> list[tuple[int, int]]:
        """What of `text` could complete a literal together with text before or behind it."""
        if len(text) < self._longest and any(text in literal for literal in self._literals):
            return [(0, len(text))]
        spans = []
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-n:] in self._heads:
                spans.append((len(text) - n, len(text)))
                break
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if text[:n] in self._tails:
                spans.append((0, n))
                break
        return spans


class _FencedTokenizer:
    """The same tokenizer with control tokens renamed to what no row can spell.

    Their ids, flags and places are the same, so that text around them is split exactly as by the
    original; their literals have become plain text.
    """

    def __init__(
        self, definition: tokenizer_json.Definition, special_tokens: Mapping[str, int]
    ) -> None:
        # Drawn afresh: no file written before this process can contain it.
        fence = f"\ufdd1{secrets.token_hex(8)}"
        self._names = {text: f"{fence}{i}\ufdd1" for text, i in special_tokens.items()}
        self._tokenizer = _load(tokenizer_json.renamed(definition, self._names), "tokenizer")
        literals = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
        self._pattern = re.compile(f"{_MARKED.pattern}|({literals or '(?!)'})", re.DOTALL)

    def encode(self, text: str) -> list[int]:
        """Ids of marked text: marked characters are text, unmarked literals control tokens."""
        fenced = self._pattern.sub(
            lambda match: self._names[match[2]] if match[2] is not None else match[1], text
        )
        return _encoded(self._tokenizer, fenced)


def _encoded(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise TokenizerError(f"the model's tokenizer fails on this text: {error}") from None


def _is_of_library(error: BaseException) -> bool:
    """A panic of the library's, say of an expression that backtracks, is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _default_template(chat_templates: ChatTemplates) -> ChatTemplate | None:
    try:
        return chat_templates.default()
    except TemplateError as error:
        raise CheckpointError(f"{chat_templates.where}: {error}") from None


def _load(definition: tokenizer_json.Definition, where: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
        # Left out at random, merges would give a text other tokens each time.
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise CheckpointError(f"{where}: not a usable tokenizer: {error}") from None
    for token in definition.get("added_tokens", ()):
        given = tokenizer.token_to_id(token["content"])
        if given != token["id"]:
            raise CheckpointError(
                f"{where}: token {token['content']!r} has id {token['id']}, but the tokenizers "
                f"library would give it {given}: added tokens follow each other behind the "
                "vocabulary; save the tokenizer again with transformers"
            )
    # A file may ask for both; a prompt is never cut or padded in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
