"""Devices that a plan can be made for without having one: a card by name, or so much memory."""

import dataclasses
import re

from jaxpaged.engine.device import Device
from jaxpaged.errors import ConfigError

XLA_SHARE = 0.75
"""Of a card's memory XLA takes so much for all it does, unless it is told otherwise."""

_MIB = 2**20
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", re.IGNORECASE)
_UNITS = {"gib": 2**30, "gb": 10**9, "mib": _MIB, "mb": 10**6}
# Of a card of which only the memory is said: the oldest that the kernels are made for.
_ASSUMED_CAPABILITY = 8.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU.

    Attributes:
        device: What decides how a model runs on it.
        memory_bytes: Its memory, about what its driver says, rounded down.
    """

    device: Device
    memory_bytes: int

    @property
    def available_bytes(self) -> int:
        """What a process has of it."""
        return int(self.memory_bytes * XLA_SHARE)


def _card(name: str, capability: float, mib: int) -> Card:
    device = Device(platform="gpu", name=name, capability=capability)
    return Card(device=device, memory_bytes=mib * _MIB)


CARDS = {
    "l4": _card("NVIDIA L4", 8.9, 22_500),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", 8.9, 24_000),
    "a100": _card("NVIDIA A100 80 GB", 8.0, 81_000),
    "h100": _card("NVIDIA H100 80 GB", 9.0, 81_000),
    "h200": _card("NVIDIA H200 141 GB", 9.0, 143_000),
}
"""By name, by rising memory."""


def find(text: str) -> Card:
    """The card of that name, or one with so much memory, as in 24GiB.

    Raises:
        ConfigError: It is neither.
    """
    if text.lower() in CARDS:
        return CARDS[text.lower()]
    names = ", ".join(CARDS)
    num_bytes = parse_size(text, "--device", expected=f"one of {names}, or a size such as 24GiB")
    device = Device(platform="gpu", name=f"a GPU with {text}", capability=_ASSUMED_CAPABILITY)
    return Card(device=device, memory_bytes=num_bytes)


def parse_size(text: str, option: str, expected: str = "a size such as 256MiB") -> int:
    """Bytes, from a number with a unit.

    Raises:
        ConfigError: It is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option}: expected {expected}; found {text!r}")
    return int(float(found[1]) * _UNITS[found[2].lower()])
