"""The tokenizer of a GGUF file, rebuilt from its metadata.

Only what can be rebuilt exactly is: byte-level BPE with a pre-tokenizer of the table below, and
sentencepiece's BPE. Another model or pre-tokenizer is refused by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.model import tokenizer_json
from jaxpaged.model.chat_templates import DEFAULT, ChatTemplates
from jaxpaged.model.checkpoint import byte_level, gguf_sentencepiece
from jaxpaged.model.checkpoint.gguf_metadata import Metadata
from jaxpaged.model.tokenizer import Tokenizer

CHAT_TEMPLATE = "tokenizer.chat_template"
_NAMED_TEMPLATE = f"{CHAT_TEMPLATE}."

_PREFIX = "tokenizer.ggml."

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Control tokens that end a turn or a text, for files that name only one end-of-sequence token.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """What the name of a pre-tokenizer stands for."""

    steps: Mapping[str, Any]
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False
    ends: frozenset[str] = frozenset()


_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(steps=byte_level.GPT2),
    "smollm": _PreTokenizer(steps=byte_level.SMOLLM),
    "llama-bpe": _PreTokenizer(steps=byte_level.LLAMA3, ignore_merges=True, adds_bos=True),
    # Of all Qwens from the second on.
    "qwen2": _PreTokenizer(
        steps=byte_level.QWEN2, normalizer={"type": "NFC"}, ends=frozenset({"<|endoftext|>"})
    ),
}
# Needs no steps: its merges cross words.
_SENTENCEPIECE = _PreTokenizer(steps={}, adds_bos=True)


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer with its end-of-sequence tokens and chat template.

    Raises:
        CheckpointError: Metadata are missing or contradict each other, or the tokenizer is of a
            kind that cannot be rebuilt exactly.
    """
    tokens = metadata.list_of(str, _PREFIX + "tokens")
    if len(set(tokens)) != len(tokens):
        metadata.fail(_PREFIX + "tokens", "every token only once")
    kinds = metadata.list_of(int, _PREFIX + "token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        metadata.fail(_PREFIX + "token_type", f"an entry for each of {len(tokens)} tokens")
    definition, pre = _definition(metadata, tokens, kinds)
    added = [
        tokenizer_json.added_token(index, tokens[index], special=kind != _USER_DEFINED)
        for index, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    ids = _named_ids(metadata, len(tokens))
    ends = {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    ends |= {
        token["id"]
        for token in added
        if token["special"] and token["content"] in _TURN_ENDS | pre.ends
    }
    return Tokenizer(
        tokenizer_json.with_control_tokens(
            {**definition, "added_tokens": added}, named=ids.values(), others=ends
        ),
        bos_id=ids.get("bos"),
        eos_ids=ends,
        adds_bos=metadata.flag(_PREFIX + "add_bos_token", pre.adds_bos),
        chat_templates=chat_templates(metadata),
        where=metadata.where,
    )


def chat_templates(metadata: Metadata) -> ChatTemplates:
    """The chat templates: the default one, and those that have names.

    Raises:
        CheckpointError: Metadata are malformed.
    """
    tokens = metadata.list_of(str, _PREFIX + "tokens")
    named = {name: tokens[index] for name, index in _named_ids(metadata, len(tokens)).items()}
    keys = [CHAT_TEMPLATE, *(key for key in metadata.values if key.startswith(_NAMED_TEMPLATE))]
    more = {"unknown": "unk_token", "padding": "pad_token"}
    return ChatTemplates(
        sources={
            key.removeprefix(_NAMED_TEMPLATE) if key != CHAT_TEMPLATE else DEFAULT: (
                metadata.text(key)
            )
            for key in keys
            if metadata.values.get(key) is not None
        },
        bos_token=named.get("bos"),
        eos_token=named.get("eos"),
        more_tokens={more[name]: token for name, token in named.items() if name in more},
        where=f"{metadata.where}: {CHAT_TEMPLATE}",
    )


def _definition(
    metadata: Metadata, tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[dict[str, Any], _PreTokenizer]:
    """The definition but for the added tokens, and what its pre-tokenizer stands for."""
    model = metadata.text(_PREFIX + "model")
    if model == "gpt2":
        return _byte_level(metadata, tokens)
    if model == "llama":
        return gguf_sentencepiece.definition(metadata, tokens, kinds), _SENTENCEPIECE
    return metadata.fail(_PREFIX + "model", "'gpt2' or 'llama', which are what is supported")


def _named_ids(metadata: Metadata, num_tokens: int) -> dict[str, int]:
    """The ids of the tokens with a part to play, as far as the file names them."""
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    ids = {name: metadata.index(f"{_PREFIX}{name}_token_id", num_tokens) for name in names}
    return {name: index for name, index in ids.items() if index is not None}


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> tuple[dict[str, Any], _PreTokenizer]:
    pre = _PRE_TOKENIZERS.get(metadata.text(_PREFIX + "pre"))
    if pre is None:
        metadata.fail(
            _PREFIX + "pre", f"one of {', '.join(sorted(_PRE_TOKENIZERS))}, which are supported"
        )
    merges = [merge.split(" ") for merge in metadata.list_of(str, _PREFIX + "merges")]
    definition = byte_level.definition(
        {token: index for index, token in enumerate(tokens)},
        merges,
        steps=pre.steps,
        normalizer=pre.normalizer,
        ignore_merges=pre.ignore_merges,
    )
    return definition, pre
