"""Sentencepiece's BPE in a GGUF file, rewritten as the merges of a `tokenizer.json`.

Sentencepiece joins the neighbours whose union is the piece with the best score; the `tokenizers`
library joins the pair of the lowest rank. Listing, for each piece from the best score down, every
pair that makes it gives the same choices.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.model.checkpoint.gguf_metadata import Metadata

_PREFIX = "tokenizer.ggml."
_SPACE = "▁"

# Longer ones would make finding their merges slow; real ones have a few dozen.
_MAX_PIECE_CHARS = 1024

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def definition(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """The content of a `tokenizer.json` but for the added tokens.

    Raises:
        CheckpointError: Metadata are missing, or ask for what cannot be rebuilt exactly.
    """
    if not set(kinds) <= {_NORMAL, _UNKNOWN, _CONTROL, _BYTE}:
        metadata.fail(
            _PREFIX + "token_type",
            "only 1, 2, 3 and 6: user-defined and unused tokens of a tokenizer of model 'llama' "
            "are not supported",
        )
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.values.get(_PREFIX + key):
            metadata.fail(_PREFIX + key, "nothing: changing the text first is not supported")
    unknown = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN]
    vocab = {token: index for index, token in enumerate(tokens)}
    if any(f"<0x{byte:02X}>" not in vocab for byte in range(256)) or len(unknown) != 1:
        metadata.fail(_PREFIX + "tokens", "a token for each of 256 bytes and one unknown token")
    has_prefix = metadata.flag(_PREFIX + "add_space_prefix", True)
    return {
        "version": "1.0",
        "normalizer": _normalizer(has_prefix),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(has_prefix),
        "model": {
            "type": "BPE",
            "unk_token": unknown[0],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(metadata, vocab, kinds),
        },
    }


def _merges(
    metadata: Metadata, vocab: Mapping[str, int], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    scores = metadata.list_of(float, _PREFIX + "scores")
    if len(scores) != len(vocab):
        metadata.fail(_PREFIX + "scores", f"an entry for each of {len(vocab)} tokens")
    pieces = [piece for piece, index in vocab.items() if kinds[index] == _NORMAL]
    longest = max(map(len, pieces), default=0)
    if longest > _MAX_PIECE_CHARS:
        metadata.fail(_PREFIX + "tokens", f"pieces of at most {_MAX_PIECE_CHARS} characters")
    pieces.sort(key=lambda piece: scores[vocab[piece]], reverse=True)
    return [
        (piece[:n], piece[n:])
        for piece in pieces
        # The longer left side first: in a run of equal characters the leftmost pair wins.
        for n in range(len(piece) - 1, 0, -1)
        if piece[:n] in vocab and piece[n:] in vocab
    ]


def _normalizer(has_prefix: bool) -> dict[str, Any]:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    return {"type": "Sequence", "normalizers": [*prefix, spaces]}


def _decoder(has_prefix: bool) -> dict[str, Any]:
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    steps = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([strip] if has_prefix else []),
    ]
    return {"type": "Sequence", "decoders": steps}
