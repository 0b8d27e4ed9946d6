"""Each family as Hugging Face transformers computes it; tests/golden/README.md says with what.

Logits behind tokens around window edges and borders of blocks, prefilled in chunks; greedy tokens
and their log-probabilities decoded by the engine; rotary frequencies of every kind.
"""

import json
import logging
import pathlib

import jax.numpy as jnp
import numpy as np
import oracle
import parity
import pytest
from flax import nnx
from forward import last_logits
from oracle import Oracle

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.errors import ConfigError
from jaxpaged.model import rope, unpaged, weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_families import FAMILIES

CASES = parity.cases()
ROPES = json.loads((parity.GOLDEN / "ropes.json").read_text())
TOLERANCE = 1e-4

# By the kernels for CPUs the others only repeat what these have between them.
_KERNEL_CASES = ("mistral", "qwen3", "phi3_partial", "gemma2", "gemma3")
BY_KERNELS = [
    pytest.param("llvm", name, marks=() if name in _KERNEL_CASES else pytest.mark.slow)
    for name in parity.served_by_kernels()
]
# Their options are numbers only, or parts of others', which the decoder without a pool has in
# common with the engine.
_SAME_STEP = (
    "llama_linear",
    "llama_dynamic",
    "llama_biases",
    "qwen2_yarn",
    "qwen2_windows",
    "qwen3_moe_shares",
    "phi3",
    "phi3_short",
)
BY_XLA = [
    pytest.param("xla", name, marks=pytest.mark.slow if name in _SAME_STEP else ())
    for name in CASES
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes a case's model, once."""
    written: dict[str, pathlib.Path] = {}

    def find(name: str) -> pathlib.Path:
        if name not in written:
            written[name] = CASES[name].write(tmp_path_factory.mktemp("family") / name)
        return written[name]

    return find


def load(folder: pathlib.Path, dtype: str = "float32", layer_loop="scan"):
    return weights.load(
        open_checkpoint(folder), dtype=jnp.dtype(dtype), layer_loop=layer_loop, max_model_len=64
    )


def test_every_family_and_every_case_is_described() -> None:
    assert {case.config["model_type"] for case in CASES.values()} == FAMILIES.keys()
    assert list(parity.FEATURES) == list(CASES)


def test_the_page_of_families_has_every_case_and_no_difference() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "families.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    cases = {name: case for (name, *case) in rows if name != "case"}
    assert list(cases) == [f"`{name}`" for name in CASES]
    for name, (model_type, features, *errors, equal) in cases.items():
        case = CASES[name.strip("`")]
        assert (model_type, features) == (case.config["model_type"], parity.FEATURES[case.name])
        measured = [error for error in errors if error != parity.NOT_SERVED]
        assert len(errors) == 4
        assert len(measured) == (4 if case.name in parity.served_by_kernels() else 2)
        assert max(map(float, measured)) < TOLERANCE
        assert equal == "yes"


@pytest.mark.parametrize(("attention", "name"), [*BY_XLA, *BY_KERNELS])
def test_engine_computes_what_transformers_does(attention: str, name: str) -> None:
    found = parity.measure(CASES[name], attention)
    assert found.tokens_equal
    assert found.logit_error < TOLERANCE
    assert found.logprob_error < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_decoder_without_a_pool_and_the_oracle_do_too(folder_of, name: str) -> None:
    case = CASES[name]
    folder = folder_of(name)
    graph, state = nnx.split(load(folder))
    found = unpaged.logits(graph, state, np.array(case.token_ids), np.array(case.positions))
    np.testing.assert_allclose(found, case.logits, atol=TOLERANCE)
    dense = Oracle(open_checkpoint(folder)).logits(case.token_ids)[case.positions]
    np.testing.assert_allclose(dense, case.logits, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_every_key_that_transformers_writes_is_known(folder_of, name: str, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        open_checkpoint(folder_of(name))
    assert not caplog.records


@pytest.mark.parametrize("name", ["smollm3", "olmo2", "gemma3", "mixtral"])
def test_unrolled_layers_give_the_same_logits(folder_of, name: str) -> None:
    case = CASES[name]
    model = load(folder_of(name), layer_loop="unrolled")
    last = last_logits(model, case.token_ids[: case.positions[-1] + 1], block_size=4)
    np.testing.assert_allclose(last, case.logits[-1], atol=TOLERANCE)


# In `qwen3_moe` rounding sends a token to another expert, in transformers too, and its logits are
# far off then.
@pytest.mark.parametrize(
    "name", ["qwen3", "granite", "olmo2", "gemma2", "gemma3", "qwen3_moe_shares"]
)
def test_bfloat16_logits_are_near(folder_of, name: str) -> None:
    case = CASES[name]
    model = load(folder_of(name), dtype="bfloat16")
    last = last_logits(model, case.token_ids[: case.positions[-1] + 1])
    assert np.abs(last - case.logits[-1]).max() < 0.06 * np.abs(case.logits[-1]).max()


def test_kernels_for_cpus_do_not_serve_experts(folder_of) -> None:
    folder = folder_of("mixtral")
    with pytest.raises(
        ConfigError, match=r"attention is llvm, and .* routed experts need; use auto"
    ):
        Engine.load(folder, EngineConfig(attention="llvm", max_model_len=64))
    engine = Engine.load(folder, EngineConfig(max_model_len=64, num_blocks=8))
    assert engine.stats.implementation == "xla"
    with pytest.raises(ValueError, match="no kernels for CPUs"):
        weights.load(
            open_checkpoint(folder),
            dtype=jnp.dtype("float32"),
            layer_loop="scan",
            attention="llvm",
        )


@pytest.mark.parametrize(
    ("attention", "name"),
    [
        *(("xla", name) for name in ("qwen3", "olmo2", "gemma3", "qwen3_moe")),
        *(("llvm", name) for name in ("qwen3", "olmo2", "gemma3")),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_batch(folder_of, attention: str, name: str) -> None:
    case = CASES[name]
    config = EngineConfig(
        attention=attention,
        max_num_seqs=4,
        block_size=4,
        num_blocks=96,
        max_model_len=64,
        deterministic=True,
        prefix_cache=False,
    )
    engine = Engine.load(folder_of(name), config)
    params = SamplingParams(max_tokens=6, logprobs=1, ignore_eos=True)
    prompts = [tuple(case.prompt_ids[:length]) for length in (45, 9, 31, 16)]

    def run(*chosen: int) -> dict[int, list[float]]:
        for index in chosen:
            request = Request(request_id=index, prompt_ids=prompts[index], params=params)
            engine.add_request(request)
        done = {}
        while engine.has_work():
            for completion in engine.step():
                done[completion.request_id] = [one.logprob for one in completion.logprobs]
        return done

    together = run(0, 1, 2, 3)
    assert [len(values) for values in together.values()] == [6] * 4
    for index in range(4):
        assert run(index)[index] == together[index]


@pytest.mark.parametrize(("length", "is_told"), [(16, False), (64, True)])
def test_longer_rows_than_the_original_context_are_told(folder_of, caplog, length, is_told) -> None:
    config = EngineConfig(max_model_len=length, num_blocks=8)
    with caplog.at_level(logging.WARNING):
        Engine.load(folder_of("phi3_long"), config)
    assert ("above the model's original context of 16 tokens" in caplog.text) == is_told


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_follow_each_kinds_formula(name: str) -> None:
    golden = ROPES[name]
    config = ModelConfig.from_hf(golden["config"], "config.json").for_length(golden["length"])
    (found,), kinds = rope.kinds(config)
    assert set(kinds) == {0}
    np.testing.assert_allclose(found.frequencies, golden["frequencies"], rtol=2e-6)
    assert found.scale == pytest.approx(golden["attention_factor"])
    written_out = oracle.frequencies(
        config.rope_theta,
        len(golden["frequencies"]),
        config.rope_scaling,
        golden["length"],
        config.max_position_embeddings,
    )
    np.testing.assert_allclose(written_out, golden["frequencies"], rtol=2e-6)
