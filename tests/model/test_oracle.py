"""The plain forward pass that the engine is compared with keeps to the windows itself."""

import pathlib

import numpy as np
import pytest
import tiny
from oracle import Oracle

from jaxpaged.model.checkpoint import open_checkpoint

IDS = [3, 77, 130, 9, 200, 45, 61, 18]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("oracle")


def oracle(scratch: pathlib.Path, window: int | None) -> Oracle:
    folder = scratch / str(window)
    if not folder.exists():
        tiny.write_tiny_llama(folder, model_type="mistral", sliding_window=window)
    return Oracle(open_checkpoint(folder))


def test_window_of_one_sees_the_token_alone(scratch):
    narrow = oracle(scratch, 1)
    alone = [narrow.logits([token])[0] for token in IDS]
    np.testing.assert_allclose(narrow.logits(IDS), alone, atol=1e-9)


def test_window_as_long_as_the_text_sees_everything(scratch):
    everything = oracle(scratch, None).logits(IDS)
    np.testing.assert_array_equal(oracle(scratch, len(IDS)).logits(IDS), everything)
    np.testing.assert_array_equal(oracle(scratch, len(IDS) - 1).logits(IDS)[:-1], everything[:-1])
    assert np.abs(oracle(scratch, len(IDS) - 1).logits(IDS)[-1] - everything[-1]).max() > 1e-3


@pytest.mark.parametrize(("distance", "is_seen"), [(4, True), (5, False)])
def test_two_layers_of_window_three_reach_four_tokens_back(scratch, distance, is_seen):
    windowed = oracle(scratch, 3)
    changed = list(IDS)
    changed[-1 - distance] = 222
    difference = np.abs(windowed.logits(changed)[-1] - windowed.logits(IDS)[-1]).max()
    assert (difference > 1e-6) == is_seen
    assert is_seen or difference == 0.0
