"""A dense Llama in NumPy: no pool, no batch, no tricks, float64. What the engine must equal."""

import numpy as np

from jaxpaged.model.checkpoint import Checkpoint
from jaxpaged.model.config import ModelConfig, RopeScaling


class Oracle:
    """One sequence at a time, every token attending to all that its layer lets it see."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config: ModelConfig = checkpoint.config
        self._tensors = {
            name: checkpoint.tensor(name).astype(np.float64) for name in checkpoint.shapes()
        }

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Logits behind every token, `[T, V]`."""
        x = self._tensors["model.embed_tokens.weight"][token_ids]
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(x, f"{prefix}.input_layernorm")
            x = x + self._attention(normed, prefix, self.config.windows[layer])
            x = x + self._mlp(self._norm(x, f"{prefix}.post_attention_layernorm"), prefix)
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self._linear(self._norm(x, "model.norm"), head)

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation; fails where the two best logits are too close to tell."""
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            last = self.logits(ids)[-1]
            best, second = np.sort(last)[-1], np.sort(last)[-2]
            assert best - second > 1e-3, f"a tie behind {len(ids)} tokens: choose another seed"
            ids.append(int(np.argmax(last)))
        return ids[len(prompt_ids) :]

    def _attention(self, x: np.ndarray, prefix: str, window: int | None) -> np.ndarray:
        config, num_tokens = self.config, x.shape[0]
        q, k, v = (
            self._linear(x, f"{prefix}.self_attn.{name}_proj").reshape(
                num_tokens, -1, config.head_dim
            )
            for name in "qkv"
        )
        q, k = self._rotate(q), self._rotate(k)
        group = config.num_heads // config.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim)
        behind = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
        is_seen = (behind >= 0) & (behind < (window or num_tokens))
        scores = np.where(is_seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, v).reshape(num_tokens, -1)
        return self._linear(attended, f"{prefix}.self_attn.o_proj")

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[0])[:, None] * self._frequencies(half)
        rotation = np.exp(1j * angles)[:, None, :]
        rotated = (x[..., :half] + 1j * x[..., half:]) * rotation
        return np.concatenate([rotated.real, rotated.imag], axis=-1)

    def _frequencies(self, half: int) -> np.ndarray:
        plain = self.config.rope_theta ** (-np.arange(half) / half)
        scaling = self.config.rope_scaling
        if scaling is None:
            return plain
        if scaling.rope_type == "linear":
            return plain / scaling.factor
        return np.array([llama3_frequency(frequency, scaling) for frequency in plain])

    def _mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        gate = self._linear(x, f"{prefix}.mlp.gate_proj")
        up = self._linear(x, f"{prefix}.mlp.up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}.mlp.down_proj")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.rms_norm_eps) * self._tensors[f"{name}.weight"]


def llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's rule for one frequency, case by case as it is usually written."""
    context = scaling.original_max_position_embeddings
    wavelength = 2 * np.pi / frequency
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
