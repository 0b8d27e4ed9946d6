"""A vocabulary in tiktoken's format: a line for each token, its bytes in base64 and its rank.

The ranks are ids, and say what is merged first. Knows nothing of how a text is cut before.
"""

import base64
import binascii
import re
from collections.abc import Mapping

from jaxpaged.errors import CheckpointError
from jaxpaged.model.byte_characters import BYTE_CHARACTERS

# Longer ones would make finding their merges slow; real ones have up to a hundred or so.
_MAX_TOKEN_BYTES = 1024

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,9}")


def is_tiktoken(content: bytes) -> bool:
    """Whether a file's content begins as such files do."""
    return _LINE.fullmatch(content[:2048].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def read(content: bytes, where: str) -> dict[bytes, int]:
    """Rank by token.

    Raises:
        CheckpointError: A line is malformed, or ranks are not 0, 1, 2 and so on.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        if _LINE.fullmatch(line) is None:
            raise CheckpointError(f"{where}: line {number} is not a token in base64 and its rank")
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise CheckpointError(f"{where}: line {number} is not base64") from None
        if len(token) > _MAX_TOKEN_BYTES or token in ranks or int(rank) != len(ranks):
            raise CheckpointError(
                f"{where}: line {number}: expected another token of at most {_MAX_TOKEN_BYTES} "
                f"bytes with rank {len(ranks)}"
            )
        ranks[token] = len(ranks)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{where}: has no token for byte {missing[0]}")
    return ranks


def vocabulary(ranks: Mapping[bytes, int]) -> dict[str, int]:
    """Token to id, bytes written as GPT-2 does."""
    return {_text(token): rank for token, rank in ranks.items()}


def merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a third, the first to be merged first.

    tiktoken joins the neighbours whose union has the lowest rank, and that is every pair that makes
    it, by the rank of what it makes.
    """
    return [
        (_text(token[:at]), _text(token[at:]))
        for token in ranks
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]


def _text(token: bytes) -> str:
    return "".join(BYTE_CHARACTERS[byte] for byte in token)
