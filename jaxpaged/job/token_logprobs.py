"""The log-probabilities of a text's tokens, packed: rows wait in memory and in the journal so.

As objects of Python's they would take ten times the room. Knows nothing of rows.
"""

import base64
import binascii
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jaxpaged.request import TokenLogprob

_TOP = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
_TOKEN = pa.struct(
    [
        ("token_id", pa.int32()),
        ("logprob", pa.float32()),
        ("rank", pa.int32()),
        ("top", pa.list_(_TOP)),
    ]
)
LOGPROBS_TYPE = pa.list_(_TOKEN)
"""The type of a column of them: for each token its id, its log-probability, its rank (1 is the
likeliest) and the likeliest tokens in its place. The middle two are null for a prompt's first."""

_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")

# Of no token: the likeliest has rank 1.
_NO_RANK = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens, as little-endian 32-bit numbers.

    Attributes:
        token_ids: The tokens.
        logprobs: How likely each was; 0 where nobody knows.
        ranks: Their ranks; 0 where nobody knows.
        top_counts: How many alternatives each has.
        top_ids: The alternatives of all tokens, one behind the other.
        top_logprobs: How likely those were.
    """

    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    top_counts: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def pack(cls, tokens: Sequence[TokenLogprob]) -> "TokenLogprobs":
        """The same as objects."""
        top = [pair for token in tokens for pair in token.top]
        return cls(
            token_ids=_ints([token.token_id for token in tokens]),
            logprobs=_floats([token.logprob or 0.0 for token in tokens]),
            ranks=_ints([_NO_RANK if token.rank is None else token.rank for token in tokens]),
            top_counts=_ints([len(token.top) for token in tokens]),
            top_ids=_ints([token_id for token_id, _ in top]),
            top_logprobs=_floats([logprob for _, logprob in top]),
        )

    @property
    def num_tokens(self) -> int:
        """The tokens."""
        return len(self.token_ids) // _INT.itemsize

    @property
    def num_bytes(self) -> int:
        """The memory it takes, about."""
        return sum(len(getattr(self, name)) for name in _NAMES)

    def to_json(self) -> dict[str, str]:
        """The same in JSON's types, to the bit."""
        return {name: base64.b64encode(getattr(self, name)).decode() for name in _NAMES}


_NAMES = tuple(field.name for field in dataclasses.fields(TokenLogprobs))


def from_json(value: Any) -> TokenLogprobs | None:  # noqa: ANN401  (JSON)
    """What `to_json` gave; None for anything else."""
    if type(value) is not dict or value.keys() != set(_NAMES):
        return None
    try:
        packed = {name: base64.b64decode(value[name], validate=True) for name in _NAMES}
    except (TypeError, ValueError, binascii.Error):
        return None
    return TokenLogprobs(**packed) if _is_whole(packed) else None


def to_arrow(rows: Sequence[TokenLogprobs | None]) -> pa.Array:
    """A column of type `LOGPROBS_TYPE`; null where there is nothing."""
    found = [row for row in rows if row is not None]
    ids, logprobs, ranks, counts, top_ids, top_logprobs = (_joined(name, found) for name in _NAMES)
    is_unknown = ranks == _NO_RANK
    top = pa.StructArray.from_arrays([pa.array(top_ids), pa.array(top_logprobs)], fields=list(_TOP))
    tokens = pa.StructArray.from_arrays(
        [
            pa.array(ids),
            pa.array(logprobs, mask=is_unknown),
            pa.array(ranks, mask=is_unknown),
            pa.ListArray.from_arrays(_offsets(counts), top, type=_TOKEN.field("top").type),
        ],
        fields=list(_TOKEN),
    )
    return lists(tokens, [None if row is None else row.num_tokens for row in rows])


def lists(items: pa.Array, lengths: Sequence[int | None]) -> pa.ListArray:
    """Consecutive items as lists of these lengths; null for None."""
    offsets = _offsets(np.array([length or 0 for length in lengths], np.int64))
    is_null = pa.array([length is None for length in lengths], pa.bool_())
    return pa.ListArray.from_arrays(offsets, items, type=pa.list_(items.type), mask=is_null)


def _offsets(lengths: npt.NDArray[Any]) -> pa.Array:
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return pa.array(ends).cast(pa.int32())


def _joined(name: str, rows: Sequence[TokenLogprobs]) -> npt.NDArray[Any]:
    joined = b"".join(getattr(row, name) for row in rows)
    return np.frombuffer(joined, _FLOAT if name.endswith("logprobs") else _INT)


def _is_whole(packed: dict[str, bytes]) -> bool:
    """Whether the lengths fit together, and the numbers are such as `pack` gives."""
    if any(len(value) % _INT.itemsize for value in packed.values()):
        return False
    num_tokens = len(packed["token_ids"])
    numbers = {name: np.frombuffer(packed[name], _INT) for name in _NAMES}
    whole = [numbers[name] for name in _NAMES if not name.endswith("logprobs")]
    return (
        num_tokens == len(packed["logprobs"]) == len(packed["ranks"]) == len(packed["top_counts"])
        and len(packed["top_ids"]) == len(packed["top_logprobs"])
        and all(bool((values >= 0).all()) for values in whole)
        and int(numbers["top_counts"].sum(dtype=np.int64)) == len(numbers["top_ids"])
    )


def _ints(values: Sequence[int]) -> bytes:
    return np.array(values, _INT).tobytes()


def _floats(values: Sequence[float]) -> bytes:
    return np.array(values, _FLOAT).tobytes()
