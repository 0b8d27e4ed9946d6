"""Makes families.json, families.npz and ropes.json of tests/golden, by transformers.

Tiny models of each family: transformers builds each from a configuration of its own and writes
the folder. Only the numbers in the tensors are then put in place by `tests/tiny.py`, from the names
and shapes that were written, so that the fixture holds no weights. Logits and greedy tokens are
computed from that folder, float32 on the CPU, attention written out. Besides, the rotary
frequencies of every kind. Needs PyTorch, which no test needs:

    pip install torch transformers safetensors
    python scripts/golden_families.py --out tests/golden

Prints their SHA-256 for tests/golden/README.md. Takes less than a minute.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import tiny  # noqa: E402 - found by the line above

VOCAB_SIZE = 272
NUM_PROMPT = 45
NUM_TOKENS = 16
WINDOW = 8

# Where logits are kept: first tokens, around the window's edge, around borders of blocks of 4 and
# 16, the last prompt token, and behind greedy tokens.
POSITIONS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 44, 47, 48, 59)

# A smaller gap between the two best logits could be decided by the order of summation.
MIN_GAP = 2e-3
SEEDS = range(100)

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": tiny.BOS_ID,
    "eos_token_id": tiny.EOS_ID,
    "pad_token_id": tiny.UNK_ID,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Every pair has a factor of its own; heads of Phi-3 rotate half of their 16 numbers here.
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.0, 2.0, 4.5, 9.0]


def longrope(original: int) -> dict[str, Any]:
    """Phi-3's rotation; of 16 tokens, so that prompts are longer, or of more than there are."""
    return {
        "original_max_position_embeddings": original,
        "max_position_embeddings": 256 if original < 256 else original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": SHORT,
            "long_factor": LONG,
        },
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_31": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_shares": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "phi3_partial": ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    "phi3_short": ("phi3", longrope(256)),
    "phi3_long": ("phi3", longrope(16)),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 10.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}


# Name to model type, settings of its configuration and the longest sequence.
ROPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "default": ("llama", {}, 200),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 200),
    **{
        f"dynamic_{length}": (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": factor}},
            length,
        )
        for length, factor in ((61, 4.0), (256, 4.0), (257, 4.0), (1000, 2.0))
    },
    "llama3": ("llama", {"rope_parameters": LLAMA3}, 200),
    "llama3_original": (
        "llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}},
        200,
    ),
    "yarn": ("qwen2", {"rope_parameters": YARN}, 200),
    "yarn_not_truncated": ("qwen2", {"rope_parameters": YARN | {"truncate": False}}, 200),
    "yarn_beta": ("qwen2", {"rope_parameters": YARN | {"beta_fast": 9.0, "beta_slow": 0.5}}, 200),
    "yarn_factor": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.5}}, 200),
    "yarn_mscale": (
        "qwen2",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}},
        200,
    ),
    "yarn_without_original": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        200,
    ),
    "longrope_short": ("phi3", longrope(16), 16),
    "longrope_long": ("phi3", longrope(16), 17),
}


def frequencies(model_type: str, more: dict[str, Any], length: int) -> dict[str, Any]:
    """The rotary frequencies that transformers finds for sequences of a length."""
    settings = described_settings(model_type, more)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        model = transformers.AutoModelForCausalLM.from_config(config)
        found, factor = model.model.rotary_emb.inv_freq, 1.0
    else:
        compute_kind = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
        found, factor = compute_kind(config, torch.device("cpu"), seq_len=length)
    written = config.to_dict()
    written["architectures"] = None
    written.pop("transformers_version", None)
    return {
        "config": written,
        "length": length,
        "frequencies": found.double().tolist(),
        "attention_factor": factor,
    }


def described_settings(model_type: str, more: dict[str, Any]) -> dict[str, Any]:
    """All settings of a model's configuration."""
    settings = SHARED | more
    if model_type == "phi3" and "rope_parameters" in more:
        settings["rope_parameters"] = {"rope_theta": 10000.0} | more["rope_parameters"]
    return settings


def describe(model_type: str, more: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The `config.json` that transformers writes for a model, and its tensors' shapes."""
    config = transformers.AutoConfig.for_model(model_type, **described_settings(model_type, more))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text())
    written.pop("transformers_version", None)
    return {"config": written, "shapes": {key: list(tensors[key].shape) for key in sorted(tensors)}}


@torch.inference_mode()
def compute(folder: pathlib.Path, seed: int) -> dict[str, Any] | None:
    """Prompt, greedy tokens and logits of the model in a folder; None if a tie is too close."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise SystemExit(f"{folder.name}: transformers would not use these tensors: {report}")
    model = model.eval()
    random = np.random.default_rng(seed)
    prompt = random.integers(tiny.FIRST_BYTE_ID, 259, NUM_PROMPT).tolist()
    model.generation_config.eos_token_id = None
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, NUM_PROMPT, dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
    )
    tokens = generated[0, NUM_PROMPT:].tolist()
    # One pass over prompt and completion, without a cache.
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0].float()
    decisive = logits[NUM_PROMPT - 1 :]
    if decisive.argmax(-1).tolist() != tokens:
        raise SystemExit(f"{folder.name}: tokens with and without cache differ")
    best = decisive.topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    if gap < MIN_GAP:
        return None
    return {
        "prompt_ids": prompt,
        "tokens": tokens,
        "min_gap": gap,
        "logits": logits[list(POSITIONS)].numpy(),
    }


def case(name: str, model_type: str, more: dict[str, Any], scratch: pathlib.Path) -> dict[str, Any]:
    """What the fixture holds of a model, with the first seed that leaves no tie."""
    described = describe(model_type, more, scratch / f"{name}-described")
    for seed in SEEDS:
        folder = scratch / f"{name}-{seed}"
        tiny.write_tiny_model(folder, described["config"], described["shapes"], seed=seed)
        found = compute(folder, seed)
        if found is not None:
            tensors = safetensors.numpy.load_file(folder / "model.safetensors")
            digest = hashlib.sha256(b"".join(tensors[key].tobytes() for key in sorted(tensors)))
            print(f"{name:16} seed {seed}, gap {found['min_gap']:.4f}")
            return {**described, "seed": seed, "weights": digest.hexdigest(), **found}
    raise SystemExit(f"{name}: every seed has a tie")


def write_lines(path: pathlib.Path, found: dict[str, dict[str, Any]]) -> None:
    """An object a line."""
    lines = [f' "{name}": {json.dumps(one)}' for name, one in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Parses the arguments and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="tests/golden")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        cases = {
            name: case(name, model_type, more, pathlib.Path(scratch))
            for name, (model_type, more) in MODELS.items()
        }
    logits = {name: found.pop("logits") for name, found in cases.items()}
    np.savez_compressed(options.out / "families.npz", positions=np.array(POSITIONS), **logits)
    write_lines(options.out / "families.json", cases)
    ropes = {name: frequencies(*case) for name, case in ROPES.items()}
    write_lines(options.out / "ropes.json", ropes)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for file in ("families.json", "families.npz", "ropes.json"):
        content = (options.out / file).read_bytes()
        print(f"{file:22} {len(content):8} {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
