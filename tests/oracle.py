"""A dense decoder in NumPy: no pool, no batch, no tricks, float64. What the engine must equal."""

from collections.abc import Sequence

import numpy as np

from jaxpaged.model.checkpoint import Checkpoint
from jaxpaged.model.config import ModelConfig
from jaxpaged.model.config_rope import RopeScaling


class Oracle:
    """One sequence at a time, every token attending to all that its layer lets it see."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config: ModelConfig = checkpoint.config
        self._tensors = {
            name: checkpoint.tensor(name).astype(np.float64) for name in checkpoint.shapes()
        }

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Logits behind every token, `[T, V]`."""
        config = self.config
        x = self._tensors["model.embed_tokens.weight"][token_ids] * config.embedding_multiplier
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}"
            before, behind = _NORMS[config.norm_places]
            for part, compute in enumerate((self._attention, self._mlp)):
                normed = self._norm(x, f"{prefix}.{before[part]}") if before else x
                output = compute(normed, layer)
                output = self._norm(output, f"{prefix}.{behind[part]}") if behind else output
                x = x + output * config.residual_multiplier
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        logits = self._linear(self._norm(x, "model.norm"), head) / config.logits_divisor
        return _capped(logits, config.logit_cap)

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation; fails where the two best logits are too close to tell."""
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            last = self.logits(ids)[-1]
            best, second = np.sort(last)[-1], np.sort(last)[-2]
            assert best - second > 1e-3, f"a tie behind {len(ids)} tokens: choose another seed"
            ids.append(int(np.argmax(last)))
        return ids[len(prompt_ids) :]

    def _attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        config, num_tokens, prefix = self.config, x.shape[0], f"model.layers.{layer}.self_attn"
        width = config.head_dim
        counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        parts = self._parts(x, prefix, "qkv_proj", ("q_proj", "k_proj", "v_proj"), counts)
        heads = []
        for name, part in zip("qkv", parts, strict=True):
            if name != "v" and config.query_key_norm == "width":
                part = self._norm(part, f"{prefix}.{name}_norm")
            part = part.reshape(num_tokens, -1, width)
            if name != "v" and config.query_key_norm == "head":
                part = self._norm(part, f"{prefix}.{name}_norm")
            heads.append(part if name == "v" else self._rotate(part, layer))
        q, k, v = heads
        group = config.num_heads // config.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scale = 1 / np.sqrt(width) if config.attention_scale is None else config.attention_scale
        scores = _capped(np.einsum("qhd,khd->hqk", q, k) * scale, config.score_cap)
        window = config.windows[layer] or num_tokens
        behind = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
        scores = np.where((behind >= 0) & (behind < window), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, v).reshape(num_tokens, -1)
        return self._linear(attended, f"{prefix}.o_proj")

    def _rotate(self, x: np.ndarray, layer: int) -> np.ndarray:
        config = self.config
        if config.rotary_layers and not config.rotary_layers[layer]:
            return x
        half = int(x.shape[-1] * config.rotary_share) // 2
        turned, kept = x[..., : 2 * half], x[..., 2 * half :]
        scaling, theta = config.rope_scaling, config.rope_theta
        if config.local_rope_theta is not None and config.windows[layer] is not None:
            scaling, theta = None, config.local_rope_theta
        trained = config.max_position_embeddings
        length = config.rope_length or trained
        angles = np.arange(x.shape[0])[:, None] * frequencies(theta, half, scaling, length, trained)
        rotation = np.exp(1j * angles)[:, None, :] * (scaling.attention_factor if scaling else 1)
        rotated = (turned[..., :half] + 1j * turned[..., half:]) * rotation
        return np.concatenate([rotated.real, rotated.imag, kept], axis=-1)

    def _mlp(self, x: np.ndarray, layer: int) -> np.ndarray:
        prefix = f"model.layers.{layer}.mlp"
        if self.config.experts is not None:
            return self._routed(x, layer)
        gate, up = self._parts(x, prefix, "gate_up_proj", ("gate_proj", "up_proj"), [1, 1])
        return self._linear(_ACTIVATIONS[self.config.activation](gate) * up, f"{prefix}.down_proj")

    def _routed(self, x: np.ndarray, layer: int) -> np.ndarray:
        """Row by row: the likeliest experts, each by its share."""
        experts, prefix = self.config.experts, f"model.layers.{layer}.mlp"
        names = ("gate_proj", "up_proj", "down_proj")
        if f"{prefix}.gate.weight" not in self._tensors:
            prefix, names = f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")
        logits = self._linear(x, f"{prefix}.gate")
        odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
        odds /= odds.sum(axis=-1, keepdims=True)
        output = np.zeros_like(x)
        for row in range(x.shape[0]):
            best = np.argsort(-odds[row])[: experts.per_token]
            shares = odds[row, best] / (odds[row, best].sum() if experts.is_normed else 1)
            for expert, share in zip(best, shares, strict=True):
                gate, up, down = (f"{prefix}.experts.{expert}.{name}" for name in names)
                hidden = _ACTIVATIONS[self.config.activation](self._linear(x[row], gate))
                output[row] += share * self._linear(hidden * self._linear(x[row], up), down)
        return output

    def _parts(
        self, x: np.ndarray, prefix: str, fused: str, names: Sequence[str], shares: list[int]
    ) -> list[np.ndarray]:
        """The projections of one input, cut out of a fused one where there is such a tensor."""
        if f"{prefix}.{fused}.weight" not in self._tensors:
            return [self._linear(x, f"{prefix}.{name}") for name in names]
        every = self._linear(x, f"{prefix}.{fused}")
        ends = np.cumsum(shares)[:-1] * every.shape[-1] // sum(shares)
        return np.split(every, ends, axis=-1)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        scale = self._tensors[f"{name}.weight"] + (self.config.norm_scale == "one_plus")
        return x / np.sqrt(mean_square + self.config.rms_norm_eps) * scale


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS = {"silu": lambda x: x / (1 + np.exp(-x)), "gelu_tanh": _gelu_tanh}

# Of attention and MLP: the norms before them and those behind.
_NORMS = {
    "before": (("input_layernorm", "post_attention_layernorm"), None),
    "behind": (None, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "around": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}


def frequencies(
    theta: float, half: int, scaling: RopeScaling | None, length: int, trained: int
) -> np.ndarray:
    """Radians per position of every rotated pair, each kind as its paper has it.

    Args:
        theta: Base of the wavelengths.
        half: Pairs.
        scaling: None for plain rotation.
        length: The longest sequence.
        trained: dynamic: what the model was trained for.
    """
    plain = theta ** (-np.arange(half) / half)
    kind = scaling.rope_type if scaling else "default"
    if scaling is None:
        return plain
    if kind == "linear":
        return plain / scaling.factor
    if kind == "dynamic":
        longer = scaling.factor * max(length, trained) / trained - scaling.factor + 1
        return (theta * longer ** (half / (half - 1))) ** (-np.arange(half) / half)
    if kind == "longrope":
        is_long = length > scaling.original_max_position_embeddings
        return plain / np.array(scaling.long_factors if is_long else scaling.short_factors)
    if kind == "yarn":
        return yarn_frequencies(theta, half, scaling)
    return np.array([llama3_frequency(frequency, scaling) for frequency in plain])


def yarn_frequencies(theta: float, half: int, scaling: RopeScaling) -> np.ndarray:
    """YaRN, pair by pair: by how often a frequency turns in the original context."""
    bounds = [
        half
        * np.log(scaling.original_max_position_embeddings / (turns * 2 * np.pi))
        / np.log(theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.is_truncated:
        bounds = [np.floor(bounds[0]), np.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], 2 * half - 1)
    found = []
    for pair in range(half):
        plain = theta ** (-pair / half)
        share = min(max((pair - low) / (high - low), 0), 1)
        found.append(share * plain / scaling.factor + (1 - share) * plain)
    return np.array(found)


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
