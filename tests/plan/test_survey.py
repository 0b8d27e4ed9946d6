"""Lengths of many texts, summed up."""

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.plan import cards
from jaxpaged.plan.survey import Lens


def test_bins_double_and_hold_every_length() -> None:
    lens = Lens()
    for value in (1, 2, 3, 4, 5, 8, 9, 16, 17, 100):
        lens.add(value)
    assert lens.histogram() == [
        (1, 1, 1),
        (2, 2, 1),
        (3, 4, 2),
        (5, 8, 2),
        (9, 16, 2),
        (17, 32, 1),
        (65, 128, 1),
    ]
    assert lens.total == 165
    assert lens.quantiles() == {"min": 1, "median": 5, "p90": 17, "p99": 100, "max": 100}


def test_no_lengths_have_no_quantiles() -> None:
    assert (Lens().quantiles(), Lens().histogram(), Lens().total) == ({}, [], 0)


@pytest.mark.parametrize(
    ("text", "num_bytes", "capability"),
    [
        ("24GiB", 24 * 2**30, 8.0),
        ("80 GB", 80 * 10**9, 8.0),
        ("512mib", 512 * 2**20, 8.0),
        ("L4", 22_500 * 2**20, 8.9),
        ("h200", 143_000 * 2**20, 9.0),
    ],
)
def test_cards_are_found_by_name_and_by_size(text: str, num_bytes: int, capability: float) -> None:
    card = cards.find(text)
    assert card.memory_bytes == num_bytes
    assert card.device.capability == capability
    assert card.available_bytes == int(num_bytes * 0.75)


@pytest.mark.parametrize("text", ["", "24", "GiB", "a1000", "-1GiB", "1e9GiB"])
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--device: expected one of l4"):
        cards.find(text)
