"""The characters that stand for bytes in a byte-level vocabulary, as GPT-2 assigned them."""


def _characters() -> tuple[str, ...]:
    as_themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in as_themselves]
    places = {byte: 0x100 + place for place, byte in enumerate(others)}
    return tuple(chr(places.get(byte, byte)) for byte in range(0x100))


BYTE_CHARACTERS = _characters()
"""By byte."""

BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
"""By character."""
