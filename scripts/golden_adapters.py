"""Makes adapters.json and adapters.npz of tests/golden, by PEFT.

LoRA adapters of tiny models of tests/golden/families.json: PEFT builds each from a configuration of
its own and writes the folder. Only the numbers in the tensors are then put in place by
`tests/tiny_adapter.py`, and PEFT loads that folder. Logits and greedy tokens of the adapted model,
not merged, float32 on the CPU. Needs PyTorch, which no test needs:

    pip install torch transformers peft safetensors
    python scripts/golden_adapters.py --out tests/golden

Prints their SHA-256 for tests/golden/README.md. Takes less than a minute.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import tempfile
import warnings
from typing import Any

import golden_families
import numpy as np
import peft
import safetensors.numpy
import torch
import transformers

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import tiny_adapter  # noqa: E402 - found by the line above
from tiny import write_tiny_model  # noqa: E402 - the same

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# Name to the model and the settings of the adapter.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_all": ("llama", {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}),
    "llama_patterns": (
        "llama",
        {
            "target_modules": [*ATTENTION, "down_proj"],
            "r": 6,
            "lora_alpha": 12,
            "use_rslora": True,
            "rank_pattern": {"q_proj": 3, r"layers\.1\.self_attn\.v_proj": 9},
            "alpha_pattern": {"model.layers.0.mlp.down_proj": 30, "k_proj": 5},
        },
    ),
    "qwen2_layers": (
        "qwen2",
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2], "r": 8},
    ),
    "qwen3_excluded": (
        "qwen3",
        {"target_modules": "all-linear", "exclude_modules": ["o_proj", "layers.1.mlp.up_proj"]},
    ),
    "phi3_fused": (
        "phi3",
        {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "r": 5, "lora_alpha": 10},
    ),
    "gemma2_pattern": (
        "gemma2",
        {"target_modules": r".*\.layers\.[01]\.(self_attn|mlp)\.(q_proj|up_proj|down_proj)"},
    ),
    "mixtral_attention": ("mixtral", {"target_modules": ATTENTION, "r": 2, "lora_alpha": 4}),
}


def case(name: str, family: str, settings: dict[str, Any], scratch: pathlib.Path) -> dict[str, Any]:
    """What the fixture holds of an adapter, with the first seed that leaves no tie."""
    model = json.loads((ROOT / "tests/golden/families.json").read_text())[family]
    folder = scratch / f"{name}-model"
    write_tiny_model(folder, model["config"], model["shapes"], seed=model["seed"])
    described = scratch / f"{name}-described"
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    peft.get_peft_model(load(folder), config).save_pretrained(described)
    written = json.loads((described / "adapter_config.json").read_text())
    # A set, written in any order.
    if isinstance(written["target_modules"], list):
        written["target_modules"].sort()
    written["base_model_name_or_path"] = family
    tensors = safetensors.numpy.load_file(described / "adapter_model.safetensors")
    shapes = {key: list(tensors[key].shape) for key in sorted(tensors)}
    for seed in golden_families.SEEDS:
        adapter = scratch / f"{name}-{seed}"
        factors = tiny_adapter.random_factors(shapes, seed)
        tiny_adapter.write_adapter(adapter, written, factors)
        found = compute(folder, adapter, model["prompt_ids"])
        if found is not None:
            digest = hashlib.sha256(b"".join(factors[key].tobytes() for key in sorted(factors)))
            differing = sum(a != b for a, b in zip(found["tokens"], model["tokens"], strict=True))
            print(f"{name:18} seed {seed}, gap {found['min_gap']:.4f}, {differing} other tokens")
            return {
                "model": family,
                "config": written,
                "shapes": shapes,
                "seed": seed,
                "weights": digest.hexdigest(),
                **found,
            }
    raise SystemExit(f"{name}: every seed has a tie")


def load(folder: pathlib.Path) -> Any:  # noqa: ANN401 - of transformers
    """The model in a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def compute(
    folder: pathlib.Path, adapter: pathlib.Path, prompt: list[int]
) -> dict[str, Any] | None:
    """Greedy tokens and logits of the adapted model; None if a tie is too close."""
    with warnings.catch_warnings():
        # PEFT warns of tensors that are missing or not used.
        warnings.simplefilter("error", UserWarning)
        model = peft.PeftModel.from_pretrained(load(folder), adapter).eval()
    model.generation_config.eos_token_id = None
    generated = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=golden_families.NUM_TOKENS,
    )
    tokens = generated[0, len(prompt) :].tolist()
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0].float()
    decisive = logits[len(prompt) - 1 :]
    if decisive.argmax(-1).tolist() != tokens:
        raise SystemExit(f"{adapter.name}: tokens with and without cache differ")
    best = decisive.topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    if gap < golden_families.MIN_GAP:
        return None
    kept = logits[list(golden_families.POSITIONS)].numpy()
    return {"tokens": tokens, "min_gap": gap, "logits": kept}


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
            name: case(name, family, settings, pathlib.Path(scratch))
            for name, (family, settings) in ADAPTERS.items()
        }
    logits = {name: found.pop("logits") for name, found in cases.items()}
    np.savez_compressed(options.out / "adapters.npz", **logits)
    golden_families.write_lines(options.out / "adapters.json", cases)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for file in ("adapters.json", "adapters.npz"):
        content = (options.out / file).read_bytes()
        print(f"{file:22} {len(content):8} {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
