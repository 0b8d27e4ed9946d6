"""Blocks of llama.cpp's quantisations: random ones, and what they stand for, number by number.

Written from the layouts in ggml's `block_*` structures, one plain loop for each; scales are powers
of two, so that every product is exact and results can be compared bit by bit.
"""

import struct
from collections.abc import Callable, Iterator

import numpy as np

Blocks = np.ndarray
_F16_ONE_HALF, _F16_ONE_EIGHTH = b"\x00\x38", b"\x00\x30"

_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def random_blocks(kind: str, count: int, seed: int = 0) -> bytes:
    """As many blocks, random but for their scales."""
    size, _, scale_places, _ = KINDS[kind]
    blocks = bytearray()
    for index in range(count):
        block = bytearray(np.random.default_rng([seed, index]).bytes(size))
        for number, place in enumerate(scale_places):
            block[place : place + 2] = (_F16_ONE_HALF, _F16_ONE_EIGHTH)[(number + index) % 2]
        blocks += block
    return bytes(blocks)


def decoded(kind: str, content: bytes) -> np.ndarray:
    """The numbers that blocks stand for, in float32."""
    size, _, _, decode = KINDS[kind]
    blocks = [content[begin : begin + size] for begin in range(0, len(content), size)]
    return np.array([value for block in blocks for value in decode(block)], np.float32)


def _f16(block: bytes, place: int) -> float:
    return struct.unpack_from("<e", block, place)[0]


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _nibbles(packed: bytes) -> list[int]:
    """The low halves of all bytes, then the high ones."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def _q8_0(block: bytes) -> list[float]:
    return [_f16(block, 0) * _signed(byte) for byte in block[2:]]


def _q4_0(block: bytes) -> list[float]:
    return [_f16(block, 0) * (q - 8) for q in _nibbles(block[2:])]


def _q4_1(block: bytes) -> list[float]:
    return [_f16(block, 0) * q + _f16(block, 2) for q in _nibbles(block[4:])]


def _q5_0(block: bytes) -> list[float]:
    high = int.from_bytes(block[2:6], "little")
    nibbles = _nibbles(block[6:])
    return [_f16(block, 0) * ((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(nibbles)]


def _q5_1(block: bytes) -> list[float]:
    high = int.from_bytes(block[4:8], "little")
    nibbles = _nibbles(block[8:])
    d, m = _f16(block, 0), _f16(block, 2)
    return [d * (q | (high >> i & 1) << 4) + m for i, q in enumerate(nibbles)]


def _q2_k(block: bytes) -> Iterator[float]:
    scales, qs, d, dmin = block[:16], block[16:80], _f16(block, 80), _f16(block, 82)
    for i in range(256):
        half, within = divmod(i, 128)
        shift, place = divmod(within, 32)
        q = qs[32 * half + place] >> (2 * shift) & 3
        scale = scales[i // 16]
        yield d * (scale & 15) * q - dmin * (scale >> 4)


def _q3_k(block: bytes) -> Iterator[float]:
    high, qs, scales, d = block[:32], block[32:96], block[96:108], _f16(block, 108)
    for i in range(256):
        half, within = divmod(i, 128)
        shift, place = divmod(within, 32)
        low = qs[32 * half + place] >> (2 * shift) & 3
        bit = high[place] >> (4 * half + shift) & 1
        group = i // 16
        scale = scales[group % 8] >> (4 * (group // 8)) & 15
        scale |= (scales[8 + group % 4] >> (2 * (group // 4)) & 3) << 4
        yield d * (scale - 32) * (low - (0 if bit else 4))


def _scale_and_min(packed: bytes, group: int) -> tuple[int, int]:
    """Six bits each, of eight groups in twelve bytes."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, high_scale, high_min = packed[group + 4], packed[group - 4] >> 6, packed[group] >> 6
    return low & 15 | high_scale << 4, low >> 4 | high_min << 4


def _q4_k(block: bytes) -> Iterator[float]:
    d, dmin, scales, qs = _f16(block, 0), _f16(block, 2), block[4:16], block[16:]
    for i in range(256):
        group, place = divmod(i, 32)
        q = qs[32 * (group // 2) + place] >> (4 * (group % 2)) & 15
        scale, least = _scale_and_min(scales, group)
        yield d * scale * q - dmin * least


def _q5_k(block: bytes) -> Iterator[float]:
    d, dmin, scales, high, qs = (
        _f16(block, 0),
        _f16(block, 2),
        block[4:16],
        block[16:48],
        block[48:],
    )
    for i in range(256):
        group, place = divmod(i, 32)
        q = qs[32 * (group // 2) + place] >> (4 * (group % 2)) & 15
        q |= (high[place] >> group & 1) << 4
        scale, least = _scale_and_min(scales, group)
        yield d * scale * q - dmin * least


def _q6_k(block: bytes) -> Iterator[float]:
    low, high, scales, d = block[:128], block[128:192], block[192:208], _f16(block, 208)
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, place = divmod(within, 32)
        q = low[64 * half + 32 * (quarter % 2) + place] >> (4 * (quarter // 2)) & 15
        q |= (high[32 * half + place] >> (2 * quarter) & 3) << 4
        yield d * _signed(scales[i // 16]) * (q - 32)


def _iq4_nl(block: bytes) -> list[float]:
    return [_f16(block, 0) * _NONLINEAR[q] for q in _nibbles(block[2:])]


def _iq4_xs(block: bytes) -> Iterator[float]:
    d, high, low, qs = _f16(block, 0), int.from_bytes(block[2:4], "little"), block[4:8], block[8:]
    for group in range(8):
        scale = low[group // 2] >> (4 * (group % 2)) & 15 | (high >> (2 * group) & 3) << 4
        for q in _nibbles(qs[16 * group : 16 * group + 16]):
            yield d * (scale - 32) * _NONLINEAR[q]


# Bytes of a block, numbers in it, where its 16-bit scales are, and its decoder.
KINDS: dict[str, tuple[int, int, tuple[int, ...], Callable[[bytes], object]]] = {
    "Q8_0": (34, 32, (0,), _q8_0),
    "Q4_0": (18, 32, (0,), _q4_0),
    "Q4_1": (20, 32, (0, 2), _q4_1),
    "Q5_0": (22, 32, (0,), _q5_0),
    "Q5_1": (24, 32, (0, 2), _q5_1),
    "Q2_K": (84, 256, (80, 82), _q2_k),
    "Q3_K": (110, 256, (108,), _q3_k),
    "Q4_K": (144, 256, (0, 2), _q4_k),
    "Q5_K": (176, 256, (0, 2), _q5_k),
    "Q6_K": (210, 256, (208,), _q6_k),
    "IQ4_NL": (18, 32, (0,), _iq4_nl),
    "IQ4_XS": (136, 256, (0,), _iq4_xs),
}
