"""The frames of a log: JSON values one behind the other, each with its length and its checksum.

    payload's length      4 bytes, little-endian
    payload's CRC-32      4 bytes, little-endian
    payload               compact JSON in UTF-8

A crash leaves a log whose last frames are torn; reading ends in front of the first of them. Knows
nothing of rows.
"""

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterator

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
"""A longer payload is not written, and a length above this is no length."""

_HEADER = struct.Struct("<II")

# Half of a surrogate pair has no UTF-8; as three bytes of its own it comes back as it was. JSON's
# escapes would not do: two halves side by side would come back as one character.
_SURROGATES = "surrogatepass"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A whole frame.

    Attributes:
        value: What its payload says.
        end: The bytes of the log up to its end.
    """

    value: object
    end: int


def encode(value: object) -> bytes | None:
    """The frame of a JSON value; None if it is too long to be read again."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    payload = text.encode(errors=_SURROGATES)
    if len(payload) > MAX_PAYLOAD_BYTES:
        return None
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def read(data: bytes) -> Iterator[Frame]:
    """The frames from the front of a log up to the first that is not whole."""
    start = 0
    while start + _HEADER.size <= len(data):
        num_bytes, checksum = _HEADER.unpack_from(data, start)
        start += _HEADER.size
        payload = data[start : start + num_bytes]
        if not len(payload) == num_bytes <= MAX_PAYLOAD_BYTES or zlib.crc32(payload) != checksum:
            return
        start += num_bytes
        try:
            value = json.loads(payload.decode(errors=_SURROGATES), parse_constant=_refuse)
        # Brackets in brackets, deeper than Python can follow.
        except (ValueError, RecursionError):
            return
        yield Frame(value=value, end=start)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
