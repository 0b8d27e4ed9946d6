"""The part of `make_golden` that generates: beams, penalties and log-probabilities.

With the packaged model and with tiny random ones, which tests write again from their settings.
What a case asks for is written in this package's words (`SamplingParams`), and asked for in
transformers' own. Every result is also found with noise on the logits, so that the order of
summation in float32 decides none of them.
"""

import hashlib
import json
import pathlib
import re
import sys
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers

ROOT = pathlib.Path(__file__).parents[1]

NUM_TOP = 5

# Largest noise, about what float32 sums in another order come to; the packaged model has more
# layers and larger logits.
TINY_NOISE = 3e-4
PACKAGED_NOISE = 2e-3
NUM_NOISY = 3

# Among them 2, the end-of-sequence token of the tokenizer that goes with tiny models.
FREQUENT_STOPS = [2, *range(40, 240, 10)]

TINY_MODELS: dict[str, dict[str, Any]] = {
    "frequent_stops": {"seed": 11, "eos_token_id": FREQUENT_STOPS},
    "biases": {"seed": 12, "heads": 4, "kv_heads": 1, "attention_bias": True, "mlp_bias": True},
    "tied_wide_heads": {"seed": 13, "heads": 6, "kv_heads": 3, "hidden": 48, "head_dim": 16},
    "mistral": {"seed": 14, "model_type": "mistral", "sliding_window": 8, "layers": 3},
}

ITS_WORDS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "beam_width": "num_beams",
    "n": "num_return_sequences",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "repetition_penalty": "repetition_penalty",
}

PACKAGED_PROMPTS = (
    "one_token", "chat_sum", "chat_turns", "sentence", "code_python", "json", "french", "chat_fact",
)  # fmt: skip


class Noise(transformers.LogitsProcessor):
    """Adds uniform noise to what tokens are chosen by."""

    def __init__(self, size: float, seed: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with noise."""
        drawn = torch.rand(scores.shape, generator=self._generator)
        return scores + self._size * (2 * drawn - 1)


class Model:
    """A model as transformers loads it, with the end-of-sequence tokens it has there."""

    def __init__(self, model: transformers.PreTrainedModel, noise: float) -> None:
        self._model = model.eval()
        self._noise = noise
        model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def beams(self, prompt_ids: list[int], params: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The beams that transformers finds; None if noise changes them."""
        found = self._generate(prompt_ids, params)
        logprobs = self._model.compute_transition_scores(
            found.sequences, found.scores, found.beam_indices
        )
        beams = []
        for row, score in enumerate(found.sequences_scores.tolist()):
            length = int((found.beam_indices[row] >= 0).sum())
            start = len(prompt_ids)
            beams.append(
                {
                    "token_ids": found.sequences[row, start : start + length].tolist(),
                    "logprobs": rounded(logprobs[row, :length]),
                    "score": round(score, 5),
                }
            )
        tokens = [beam["token_ids"] for beam in beams]
        return beams if self._is_decided(prompt_ids, params, tokens) else None

    @torch.inference_mode()
    def greedy(self, prompt_ids: list[int], params: dict[str, Any]) -> dict[str, Any] | None:
        """Greedy tokens, and how likely prompt and completion were; None if noise changes them.

        Log-probabilities are the model's own, before penalties, of one pass without cache.
        """
        found = self._generate(prompt_ids, params)
        tokens = found.sequences[0, len(prompt_ids) :].tolist()
        if not self._is_decided(prompt_ids, params, [tokens]):
            return None
        ids = torch.tensor([prompt_ids + tokens])
        logits = self._model(ids[:, :-1], use_cache=False).logits[0]
        cached = torch.cat(found.logits)
        if not torch.allclose(logits[len(prompt_ids) - 1 :], cached, atol=self._noise):
            raise SystemExit("logits with and without cache differ")
        logprobs, behind = logits.log_softmax(-1), len(prompt_ids) - 1
        return {
            "token_ids": tokens,
            "logprobs": likelihoods(logprobs[behind:], tokens),
            "prompt_logprobs": likelihoods(logprobs[:behind], prompt_ids[1:]),
        }

    def _is_decided(
        self, prompt_ids: list[int], params: dict[str, Any], tokens: list[list[int]]
    ) -> bool:
        """Whether noise on the logits leaves the tokens of all sequences as they are."""
        for seed in range(NUM_NOISY):
            found = self._generate(prompt_ids, params, [Noise(self._noise, seed)])
            rows = found.sequences[:, len(prompt_ids) :].tolist()
            if any(row[: len(own)] != own for row, own in zip(rows, tokens, strict=True)):
                return False
        return True

    def _generate(
        self,
        prompt_ids: list[int],
        params: dict[str, Any],
        processors: list[transformers.LogitsProcessor] | None = None,
    ) -> Any:  # noqa: ANN401 - one of two classes, by what is asked for
        return self._model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            logits_processor=transformers.LogitsProcessorList(processors or []),
            **{ITS_WORDS[name]: value for name, value in params.items() if name in ITS_WORDS},
        )


def likelihoods(logprobs: torch.Tensor, tokens: list[int]) -> dict[str, list[Any]]:
    """How likely each of the tokens was, and the likeliest ones in its place."""
    own = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None])
    top = logprobs.topk(NUM_TOP)
    return {
        "own": rounded(own[:, 0]),
        "ranks": (1 + (logprobs > own).sum(dim=1)).tolist(),
        "top_ids": top.indices.tolist(),
        "top": [rounded(row) for row in top.values],
    }


def rounded(values: torch.Tensor) -> list[float]:
    """Fewer digits than float32 is good for, more than tests compare."""
    return [round(value, 5) for value in values.tolist()]


def tiny_model(folder: pathlib.Path, settings: dict[str, Any]) -> tuple[Model, str]:
    """A tiny model by the tests' own writer, and a digest of its weights."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import write_tiny_llama

    write_tiny_llama(folder, **settings)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return Model(loaded, TINY_NOISE), digest(folder)


def digest(folder: pathlib.Path) -> str:
    """SHA-256 of all weights, in the order of their names."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    return hashlib.sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest()


def tiny_prompts(count: int, length: int) -> list[list[int]]:
    """Random bytes of the tiny tokenizer."""
    random = np.random.default_rng(length)
    return random.integers(3, 259, (count, length)).tolist()


def beam_grid() -> list[dict[str, Any]]:
    """Every rule with every penalty and width."""
    return [
        {
            "beam_width": width,
            "n": width - number % 2,
            "length_penalty": penalty,
            "early_stopping": rule,
            "max_tokens": 12,
        }
        for width in (2, 3, 4)
        for number, penalty in enumerate((0.0, 1.0, 2.0, -1.0))
        for rule in (True, False, "never")
    ]


TINY_BEAMS: list[dict[str, Any]] = [
    {"beam_width": 2, "n": 2, "max_tokens": 16},
    {"beam_width": 4, "n": 4, "max_tokens": 1},
    {"beam_width": 3, "n": 2, "max_tokens": 10, "repetition_penalty": 1.5},
    {"beam_width": 4, "n": 1, "max_tokens": 12, "length_penalty": 0.5, "early_stopping": "never"},
]
STOPPING_BEAMS: list[dict[str, Any]] = [
    {"beam_width": 3, "n": 3, "max_tokens": 10, "min_tokens": 5},
    {"beam_width": 4, "n": 4, "max_tokens": 10, "repetition_penalty": 1.3},
]
PACKAGED_BEAMS: list[dict[str, Any]] = [
    {"beam_width": 2, "n": 2, "max_tokens": 16, "early_stopping": True},
    {"beam_width": 3, "n": 2, "max_tokens": 16, "early_stopping": "never"},
    {"beam_width": 4, "n": 4, "max_tokens": 16, "length_penalty": 0.0},
]


def write_generations(
    packaged: transformers.PreTrainedModel,
    prompts: dict[str, list[int]],
    out: pathlib.Path,
    scratch: pathlib.Path,
) -> None:
    """beams.json and logprobs.json.

    Args:
        packaged: The packaged model, with its end-of-sequence tokens.
        prompts: Token ids of the prompts for it, by name.
        out: The folder of fixtures.
        scratch: A folder for tiny models.
    """
    models: dict[str, Model] = {"packaged": Model(packaged, PACKAGED_NOISE)}
    described: dict[str, dict[str, Any]] = {}
    for name, settings in TINY_MODELS.items():
        models[name], weights = tiny_model(scratch / name, settings)
        described[name] = {"settings": settings, "weights": weights}
    chosen = {name: prompts[name] for name in PACKAGED_PROMPTS}
    write(out / "beams.json", described, beam_cases(models, chosen))
    write(out / "logprobs.json", described, greedy_cases(models, chosen))


def beam_cases(models: dict[str, Model], prompts: dict[str, list[int]]) -> list[dict[str, Any]]:
    """What beams.json holds; of the prompts drawn, the first ones that noise leaves alone."""
    telling = telling_prompts(models["frequent_stops"])
    wanted = [("frequent_stops", params, 3, telling) for params in beam_grid()]
    wanted += [("frequent_stops", params, 3, tiny_prompts(40, 17)) for params in STOPPING_BEAMS]
    wanted += [
        (name, params, 2, tiny_prompts(40, length))
        for name, length in (("biases", 6), ("tied_wide_heads", 33), ("mistral", 21))
        for params in TINY_BEAMS
    ]
    wanted += [("packaged", params, 3, list(prompts.values())) for params in PACKAGED_BEAMS]
    cases = []
    for name, params, count, drawn in wanted:
        found = []
        for prompt_ids in drawn:
            beams = models[name].beams(prompt_ids, params)
            if beams is not None:
                case = {"model": name, "prompt_ids": prompt_ids, "params": params, "beams": beams}
                found.append(case)
            if len(found) == count:
                break
        else:
            raise SystemExit(f"{name}, {params}: {len(found)} of {count} prompts are decided")
        cases += found
    return cases


def telling_prompts(model: Model) -> list[list[int]]:
    """Prompts, those first whose beams differ most by the rule of early stopping."""

    def difference(prompt_ids: list[int]) -> int:
        at_once, soon, late = (
            model.beams(
                prompt_ids, {"beam_width": 3, "n": 3, "max_tokens": 12, "early_stopping": rule}
            )
            for rule in (True, False, "never")
        )
        return 2 * (soon != late) + (at_once != soon)

    return sorted(tiny_prompts(40, 9), key=difference, reverse=True)


def greedy_cases(models: dict[str, Model], prompts: dict[str, list[int]]) -> list[dict[str, Any]]:
    """What logprobs.json holds."""
    tiny = [name for name in TINY_MODELS if name != "mistral"]
    wanted = [
        (name, penalty, tiny_prompts(20, length))
        for name in tiny
        for length in (1, 16, 40)
        for penalty in (1.0, 1.3, 0.7)
    ]
    # Around the window, within it and far longer.
    wanted += [("mistral", 1.0, tiny_prompts(20, length)) for length in (1, 7, 8, 9, 16, 40, 70)]
    wanted += [("mistral", 1.2, tiny_prompts(20, 30))]
    wanted += [("packaged", 1.0, [prompts[name]]) for name in ("sentence", "json", "chat_sum")]
    wanted += [("packaged", 1.2, [prompts[name]]) for name in ("sentence", "french", "chat_fact")]
    cases = []
    for name, penalty, drawn in wanted:
        params = {"max_tokens": 20, "repetition_penalty": penalty}
        decided = ((ids, models[name].greedy(ids, params)) for ids in drawn)
        found = next(((ids, golden) for ids, golden in decided if golden is not None), None)
        if found is None:
            raise SystemExit(f"{name}, {penalty}: no prompt is decided")
        prompt_ids, golden = found
        cases.append({"model": name, "prompt_ids": prompt_ids, "params": params, **golden})
    return cases


def write(path: pathlib.Path, models: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """Indented JSON with each list of numbers on one line."""
    text = json.dumps({"models": models, "cases": cases}, indent=1)
    flat = re.sub(r"\[\s+((?:[-\d.e]+,?\s+)+)\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(flat + "\n")
