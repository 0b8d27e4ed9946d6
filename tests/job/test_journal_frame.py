import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.job.output import journal_frame

TEXT = st.text(st.characters(exclude_categories=()))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=10,
)
VALUES = [{"text": "first"}, [1, None], "\0ß🦋\ud800"]


def encode(value: object) -> bytes:
    frame = journal_frame.encode(value)
    assert frame is not None
    return frame


def frame_of(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), zlib.crc32(payload)) + payload


def values(log: bytes) -> list[object]:
    return [frame.value for frame in journal_frame.read(log)]


@given(st.lists(JSON, max_size=4))
def test_a_log_says_what_was_written(written):
    log = b"".join(encode(value) for value in written)

    found = list(journal_frame.read(log))

    assert [frame.value for frame in found] == written
    assert [frame.end for frame in found][-1:] == [len(log)][: len(written)]


TEXTS = ["\ud83d\ude00", "\ude00\ud83d", "\ud83d", "😀", "\0\x1f\x7f\u2028"]


@pytest.mark.parametrize("text", TEXTS)
def test_halves_of_surrogate_pairs_stay_halves(text):
    assert values(encode([text, {text: text}])) == [[text, {text: text}]]


def test_reading_ends_in_front_of_a_torn_frame_wherever_it_is_torn():
    frames = [encode(value) for value in VALUES]
    log = b"".join(frames)
    ends = [len(b"".join(frames[:count])) for count in range(len(frames) + 1)]

    for num_bytes in range(len(log) + 1):
        found = list(journal_frame.read(log[:num_bytes]))

        assert [frame.end for frame in found] == [end for end in ends[1:] if end <= num_bytes]
        assert [frame.value for frame in found] == VALUES[: len(found)]


def test_reading_ends_in_front_of_a_flipped_bit_wherever_it_is():
    frames = [encode(value) for value in VALUES]
    log = bytearray(b"".join(frames))
    ends = [len(b"".join(frames[:count])) for count in range(1, len(frames) + 1)]

    for place in range(len(log)):
        for bit in range(8):
            log[place] ^= 1 << bit
            assert values(bytes(log)) == VALUES[: sum(end <= place for end in ends)]
            log[place] ^= 1 << bit


@pytest.mark.parametrize(
    "payload",
    [
        b"",  # what a file system leaves of a crash: zeros are a length of 0 and the right CRC
        b"{",
        b"1 2",
        b"NaN",
        b"-Infinity",
        b"\xff",
        b"[" * 100_000 + b"]" * 100_000,
        b"9" * 5000,
    ],
)
def test_a_right_checksum_does_not_make_it_json(payload):
    log = encode("before") + frame_of(payload) + encode("behind")

    assert values(log) == ["before"]


def test_zeros_are_no_frames():
    assert values(encode("before") + bytes(4096)) == ["before"]


@pytest.mark.parametrize("num_bytes", [0, 3, 5, 2**31, 2**32 - 1])
def test_a_lying_length_ends_reading(num_bytes):
    lie = struct.pack("<I", num_bytes) + frame_of(b"1234")[4:]

    assert values(encode("before") + lie + encode("behind")) == ["before"]


def test_what_is_too_long_is_not_written():
    longest = "x" * (journal_frame.MAX_PAYLOAD_BYTES - 2)

    assert values(encode(longest)) == [longest]
    assert journal_frame.encode(longest + "x") is None
    assert values(frame_of(f'"{longest}x"'.encode())) == []


def test_a_number_that_json_does_not_know_is_our_own_mistake():
    with pytest.raises(ValueError, match="JSON"):
        journal_frame.encode(float("nan"))
