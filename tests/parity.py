"""How near this package comes to transformers on the tiny models of tests/golden/families.json.

Used by the tests, which judge it, and by `scripts/parity_table.py`, which writes it down.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tiny
from forward import last_logits

from jaxpaged import Engine, EngineConfig, Request, SamplingParams
from jaxpaged.model import weights
from jaxpaged.model.checkpoint import open_checkpoint
from jaxpaged.request import Completion

GOLDEN = pathlib.Path(__file__).parent / "golden"

# What a case shows, in the order of the fixture.
FEATURES: Mapping[str, str] = {
    "llama": "Llama 1, 2, 3",
    "llama_31": "Llama 3.1, 3.2: llama3 RoPE",
    "llama_linear": "linear RoPE",
    "llama_dynamic": "dynamic RoPE, within the trained context",
    "llama_biases": "biases in attention and MLP",
    "mistral": "sliding window",
    "qwen2": "Qwen2, Qwen2.5: bias on queries, keys, values",
    "qwen2_yarn": "yarn RoPE, tied head",
    "qwen2_windows": "windows from a layer on",
    "qwen3": "query/key norms, own head width",
    "mixtral": "2 of 5 experts",
    "qwen3_moe": "3 of 6 experts, shares that add up to 1",
    "qwen3_moe_shares": "2 of 4 experts, shares as they are",
    "phi3": "fused tensors, sliding window",
    "phi3_partial": "half of each head rotated",
    "phi3_short": "longrope within the original context",
    "phi3_long": "longrope beyond it",
    "granite": "multipliers of embedding, attention, residual, logits",
    "smollm3": "layers without RoPE, tied head",
    "olmo2": "norms behind, query/key norms over the whole width",
    "gemma2": "GeGLU, four norms with offset, soft caps, alternating windows, scaled embedding",
    "gemma3": "query/key norms, two RoPE bases, linear RoPE in full layers",
}

NOT_SERVED = "none"
"""In the place of an error in the table."""

# Chunks of 9 tokens over blocks of 4: neither divides the prompt or the other.
CHUNK, BLOCK = 9, 4
# Prompts begun at other lengths share the batch, so that decode meets all places of a block.
SHORTER = (0, 3, 14, 30)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model of the fixture, with what transformers makes of it."""

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, list[int]]
    seed: int
    weights: str
    prompt_ids: list[int]
    tokens: list[int]
    min_gap: float
    positions: list[int]
    logits: np.ndarray

    @property
    def token_ids(self) -> list[int]:
        """Prompt and greedy tokens."""
        return self.prompt_ids + self.tokens

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """The folder with the model that transformers read."""
        tiny.write_tiny_model(folder, self.config, self.shapes, seed=self.seed)
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        digest = hashlib.sha256(b"".join(tensors[key].tobytes() for key in sorted(tensors)))
        assert digest.hexdigest() == self.weights, "tiny models changed: make the fixture again"
        return folder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How near one implementation of attention comes.

    Attributes:
        logit_error: Largest difference of a logit behind the positions of the fixture, prefilled
            in chunks.
        logprob_error: Largest difference of a greedy token's log-probability, decoded by the
            engine, at the fixture's positions.
        tokens_equal: Whether all greedy tokens are the same, alone and beside other rows.
    """

    logit_error: float
    logprob_error: float
    tokens_equal: bool


@functools.cache
def cases() -> Mapping[str, Case]:
    """Name to case."""
    content = json.loads((GOLDEN / "families.json").read_text())
    with np.load(GOLDEN / "families.npz") as arrays:
        positions = arrays["positions"].tolist()
        return {
            name: Case(name=name, positions=positions, logits=arrays[name], **found)
            for name, found in content.items()
        }


def served_by_kernels() -> list[str]:
    """The cases that the kernels for CPUs serve: all without routed experts."""
    return [name for name, case in cases().items() if "num_experts_per_tok" not in case.config]


def measure(case: Case, attention: str) -> Parity:
    """Runs a case by "xla" or "llvm"."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = case.write(pathlib.Path(scratch) / case.name)
        logit_error = _logit_error(case, folder, attention)
        completions = _complete(case, folder, attention)
    first = len(case.prompt_ids)
    errors = []
    for position, row in zip(case.positions, case.logits, strict=True):
        if position >= first - 1:
            step = position - first + 1
            wide = row.astype(np.float64)
            expected = wide[case.tokens[step]] - np.logaddexp.reduce(wide)
            errors.append(abs(completions[0].logprobs[step].logprob - expected))
    return Parity(
        logit_error=logit_error,
        logprob_error=float(max(errors)),
        tokens_equal=[list(one.token_ids) for one in completions]
        == [case.tokens, *([case.tokens[count:] for count in SHORTER[1:] if count < 16])],
    )


def _logit_error(case: Case, folder: pathlib.Path, attention: str) -> float:
    model = weights.load(
        open_checkpoint(folder), dtype=jnp.dtype("float32"), layer_loop="scan", attention=attention
    )
    return max(
        float(
            np.abs(
                last_logits(
                    model, case.token_ids[: position + 1], token_budget=CHUNK, block_size=BLOCK
                )
                - row
            ).max()
        )
        for position, row in zip(case.positions, case.logits, strict=True)
    )


def _complete(case: Case, folder: pathlib.Path, attention: str) -> list[Completion]:
    """The prompt, and the prompt with the first greedy tokens behind it, in one batch."""
    config = EngineConfig(
        attention=attention, max_num_seqs=4, block_size=BLOCK, num_blocks=96, max_model_len=64
    )
    engine = Engine.load(folder, config)
    shorter = [count for count in SHORTER if count < len(case.tokens)]
    for count in shorter:
        params = SamplingParams(
            max_tokens=len(case.tokens) - count, logprobs=1, ignore_eos=True, temperature=0.0
        )
        prompt = (*case.prompt_ids, *case.tokens[:count])
        engine.add_request(Request(request_id=count, prompt_ids=prompt, params=params))
    done = {}
    while engine.has_work():
        done |= {completion.request_id: completion for completion in engine.step()}
    return [done[count] for count in shorter]
