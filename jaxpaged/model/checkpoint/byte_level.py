"""How byte-level tokenizers cut a text before they merge, and what a vocabulary makes of that.

The expressions are those that the models were trained with. Knows nothing of files.
"""

from collections.abc import Iterable, Mapping
from typing import Any

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}

GPT2 = {**_BYTE_LEVEL, "use_regex": True}

SMOLLM = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2],
}


def _split(expression: str) -> dict[str, Any]:
    cut = {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [cut, {**_BYTE_LEVEL, "use_regex": False}]}


LLAMA3 = _split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN2 = _split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def definition(
    vocab: Mapping[str, int],
    merges: Iterable[Iterable[str]],
    *,
    steps: Mapping[str, Any],
    normalizer: Mapping[str, Any] | None = None,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """The content of a `tokenizer.json` but for the added tokens.

    Args:
        vocab: Token to id, bytes written as GPT-2 does.
        merges: Pairs, the first to be merged first.
        steps: How a text is cut.
        normalizer: What is done to it before.
        ignore_merges: What is cut out is looked up as a whole first.
    """
    return {
        "version": "1.0",
        "normalizer": normalizer,
        "pre_tokenizer": steps,
        "post_processor": None,
        "decoder": GPT2,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(vocab),
            "merges": [list(merge) for merge in merges],
        },
    }
