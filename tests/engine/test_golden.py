"""The packaged model against Hugging Face transformers: logits and exact greedy tokens.

The fixtures were made by `scripts/make_golden.py`; `tests/golden/README.md` says with what.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from forward import last_logits

from jaxpaged import Engine, EngineConfig, SamplingParams
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.llama import Llama
from jaxpaged.model.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def golden() -> list[dict]:
    return pq.read_table(GOLDEN / "greedy.parquet").to_pylist()


@pytest.fixture(scope="module")
def loaded(packaged_model) -> tuple[Llama, Tokenizer]:
    checkpoint = open_checkpoint(packaged_model)
    model = weights.load(checkpoint, dtype=jnp.dtype("float32"), layer_loop="scan")
    return model, checkpoint.tokenizer()


def test_there_is_something_to_compare(golden) -> None:
    assert len(golden) >= 16
    assert {len(row["tokens"]) for row in golden} == {32}
    lens = [len(row["prompt_ids"]) for row in golden]
    assert min(lens) == 1
    assert max(lens) > 256


@pytest.mark.parametrize(
    ("num_prompts", "max_num_seqs", "block_size", "token_budget"),
    [
        (20, 64, 16, 512),
        (6, 3, 7, 96),
        # All prompts, each way.
        pytest.param(20, 8, 64, 128, marks=pytest.mark.slow),
        pytest.param(20, 3, 7, 96, marks=pytest.mark.slow),
        pytest.param(20, 1, 16, 512, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_exactly_those_of_transformers(
    golden, loaded, num_prompts: int, max_num_seqs: int, block_size: int, token_budget: int
) -> None:
    golden = golden[:num_prompts]
    assert len(golden) == num_prompts
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        max_num_batched_tokens=token_budget,
        max_model_len=512,
        num_blocks=-(-6000 // block_size),
    )
    engine = Engine(*loaded, config)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    completions = engine.generate([row["prompt_ids"] for row in golden], params)
    for row, completion in zip(golden, completions, strict=True):
        assert list(completion.token_ids) == row["tokens"], row["name"]
    engine.check_integrity()


def test_texts_are_tokenized_and_spelled_as_by_transformers(golden, loaded) -> None:
    _, tokenizer = loaded
    for row in golden:
        assert tokenizer.encode(row["prompt"]) == row["prompt_ids"], row["name"]
        assert tokenizer.decode(row["tokens"], skip_special_tokens=False) == row["text"]


def test_logits_are_those_of_transformers(golden, loaded) -> None:
    model, _ = loaded
    for row in golden:
        logits = last_logits(model, row["prompt_ids"])
        # float32 sums over 30 layers in another order; logits reach 30.
        np.testing.assert_allclose(
            logits[row["top_ids"]], row["top_logits"], atol=2e-3, err_msg=row["name"]
        )


def test_logits_in_the_middle_of_prompts_are_those_of_transformers(golden, loaded) -> None:
    model, _ = loaded
    prompts = {row["name"]: row["prompt_ids"] for row in golden}
    full = np.load(GOLDEN / "logits.npz")
    names = [key.removesuffix(".logits") for key in full if key.endswith(".logits")]
    assert len(names) == 2
    for name in names:
        for position, expected in zip(
            full[f"{name}.positions"], full[f"{name}.logits"], strict=True
        ):
            logits = last_logits(model, prompts[name][: position + 1])
            np.testing.assert_allclose(logits, expected, atol=2e-3, err_msg=name)
