"""A sentencepiece model (`tokenizer.model`), read without a protobuf library.

Reads the pieces and the few settings that decide what a text's tokens are, within the bounds of the
file; knows nothing of what becomes of them.
"""

import dataclasses
import struct
from collections.abc import Iterator
from typing import NoReturn

from jaxpaged.errors import CheckpointError

_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

_MAX_PIECES = 2_000_000

# Of the file: pieces, how it was trained, what is done to a text first.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE = 3
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES = 2, 3, 4
_NORMAL = 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieces:
    """What a file says.

    Attributes:
        pieces: The tokens, by id.
        scores: A piece with a better score is merged first.
        kinds: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 a byte.
        model: "bpe" or another kind of model.
        has_charsmap: The text is rewritten by a table first.
        has_prefix: A space is put in front of a text.
        removes_spaces: Spaces that follow each other become one.
    """

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    model: str
    has_charsmap: bool
    has_prefix: bool
    removes_spaces: bool


def read(content: bytes, where: str) -> SentencePieces:
    """The pieces and settings in a file's content.

    Raises:
        CheckpointError: It is not such a file, or is damaged.
    """
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer = normalizer = b""
    for field, value in _fields(content, where):
        if field == _PIECES and isinstance(value, bytes):
            piece, score, kind = _piece(value, where)
            pieces.append(piece)
            scores.append(score)
            kinds.append(kind)
            if len(pieces) > _MAX_PIECES:
                _fail(where, f"more than {_MAX_PIECES:,} pieces")
        elif field == _TRAINER and isinstance(value, bytes):
            trainer = value
        elif field == _NORMALIZER and isinstance(value, bytes):
            normalizer = value
    if not pieces:
        _fail(where, "no pieces")
    # A field that is left out has its default: unigram, and all the changes of a text.
    trained = dict(_fields(trainer, where))
    changes = dict(_fields(normalizer, where))
    kind = trained.get(_MODEL_TYPE, 1)
    return SentencePieces(
        pieces=pieces,
        scores=scores,
        kinds=kinds,
        model=_KINDS.get(kind, str(kind)) if isinstance(kind, int) else "unknown",
        has_charsmap=bool(changes.get(_CHARSMAP, b"")),
        has_prefix=bool(changes.get(_DUMMY_PREFIX, 1)),
        removes_spaces=bool(changes.get(_EXTRA_SPACES, 1)),
    )


def _piece(content: bytes, where: str) -> tuple[str, float, int]:
    text, score, kind = b"", 0.0, _NORMAL
    for field, value in _fields(content, where):
        if field == _PIECE and isinstance(value, bytes):
            text = value
        elif field == _SCORE and isinstance(value, float):
            score = value
        elif field == _TYPE and isinstance(value, int):
            kind = value
    try:
        return text.decode(), score, kind
    except UnicodeDecodeError:
        _fail(where, "a piece that is not UTF-8")


def _fields(content: bytes, where: str) -> Iterator[tuple[int, bytes | int | float]]:
    """The fields of one message, in order, each with its number."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at, where)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(content, at, where)
            yield field, value
            continue
        if kind == _BYTES:
            size, at = _varint(content, at, where)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            _fail(where, f"a field of wire type {kind}")
        if size > len(content) - at:
            _fail(where, "a field that is longer than the file")
        value = content[at : at + size]
        at += size
        yield field, struct.unpack("<f", value)[0] if kind == _FIXED32 else value


def _varint(content: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return _fail(where, "a number that does not end")


def _fail(where: str, what: str) -> NoReturn:
    raise CheckpointError(f"{where}: not a sentencepiece model: it has {what}; download it again")
