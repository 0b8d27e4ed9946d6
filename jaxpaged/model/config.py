"""What a model's `config.json` declares, as one checked value.

Knows nothing of weights or devices.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxpaged.model.config_families import (
    FAMILIES,
    NormPlaces,
    NormScale,
    QueryKeyNorm,
    TensorLayout,
)
from jaxpaged.model.config_fields import Fields
from jaxpaged.model.config_keys import check_keys
from jaxpaged.model.config_options import RoutedExperts, read_options
from jaxpaged.model.config_rope import RopeScaling, read_rope
from jaxpaged.model.config_windows import Windows, read_windows

Activation = Literal["silu", "gelu_tanh"]

# A file may lie; a value per layer is made before any tensor is looked for.
_MAX_LAYERS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape and the constants of one decoder; hashable.

    What has a default is off by default: a plain Llama leaves all of it out.

    Attributes:
        vocab_size: Rows of the embedding; may exceed the tokenizer's tokens.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP, or of each expert.
        num_layers: Decoder layers.
        num_heads: Query heads of a layer.
        num_kv_heads: Key/value heads of a layer; divides `num_heads`.
        head_dim: Width of a head; even.
        max_position_embeddings: Longest sequence the model was trained for, in tokens.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: None for plain rotary embedding.
        rms_norm_eps: Added to the mean square before its root.
        tie_word_embeddings: The head is the embedding.
        attention_bias: All four attention projections have a bias.
        mlp_bias: All three MLP projections have a bias.
        windows: Of every layer, the keys that a query sees, its own included; None where it sees
            all of them. All None unless given.
        qkv_bias: Queries, keys and values have a bias even if `attention_bias` is off.
        query_key_norm: RMS norms of queries and keys before they are rotated: "head" of each head,
            "width" of all heads of a token together.
        norm_places: Where a layer's norms are: "before" attention and MLP, "behind" them (before
            what they give is added to the stream), or "around" them.
        norm_scale: How a norm's weights are applied: to rows "rounded" to the model's dtype, in
            float32 before rounding ("wide"), or so with 1 added to them ("one_plus").
        activation: Of the MLP's gate.
        attention_scale: What scores are multiplied by; None is `head_dim ** -0.5`.
        score_cap: Scores become `cap * tanh(score / cap)`.
        logit_cap: So do logits.
        embedding_multiplier: What embeddings are multiplied by, rounded to the model's dtype.
        residual_multiplier: What attention and MLP give is multiplied by before it is added.
        logits_divisor: What logits are divided by.
        rotary_share: Which part of a head is rotated, from its beginning.
        rotary_layers: Of every layer, whether it rotates; empty where all do.
        local_rope_theta: Base of the wavelengths of layers with a window, which are not stretched;
            None where they rotate as the others.
        longest: Longest sequence that the rotation is made for, where the job stretches it; None is
            what the model's own rotation is made for.
        own_longest: That length before the job stretched it; None where it does not.
        rope_length: Longest sequence there will be, where frequencies depend on it; None is
            `max_position_embeddings`.
        tensor_layout: How the checkpoint names what the decoder knows as a Llama's: "phi3" holds
            queries, keys and values in one tensor and the MLP's gate and up in another, "mixtral"
            calls experts otherwise.
        experts: Each layer has several MLPs, and every token goes through a few; None for one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    windows: Windows = ()
    qkv_bias: bool = False
    query_key_norm: QueryKeyNorm = "none"
    norm_places: NormPlaces = "before"
    norm_scale: NormScale = "rounded"
    activation: Activation = "silu"
    attention_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    rotary_share: float = 1.0
    rotary_layers: tuple[bool, ...] = ()
    local_rope_theta: float | None = None
    longest: int | None = None
    own_longest: int | None = None
    rope_length: int | None = None
    tensor_layout: TensorLayout = "llama"
    experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if self.rotary_layers and len(self.rotary_layers) != self.num_layers:
            raise ValueError(f"{len(self.rotary_layers)} rotary_layers for {self.num_layers}")

    @property
    def max_window(self) -> int | None:
        """The widest window, or None if a layer sees all keys: what lies outside of it, no layer
        reads again."""
        widths = [window for window in self.windows if window is not None]
        return max(widths) if len(widths) == len(self.windows) else None

    @property
    def max_len(self) -> int:
        """The longest sequence that the rotation is made for.

        yarn and dynamic stretch what the model was trained for by their factor. Where the others
        are declared, `max_position_embeddings` is the stretched length already.
        """
        if self.longest is not None:
            return self.longest
        trained, scaling = self.max_position_embeddings, self.rope_scaling
        if scaling is None or scaling.rope_type not in ("yarn", "dynamic"):
            return trained
        if scaling.rope_type == "dynamic":
            return max(int(trained * scaling.factor), trained)
        return max(int(scaling.original_max_position_embeddings * scaling.factor), trained)

    @property
    def score_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rotary_width(self) -> int:
        """How much of a head is rotated; even."""
        return int(self.head_dim * self.rotary_share)

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys by position."""
        return not self.rotary_layers or self.rotary_layers[layer]

    def for_length(self, length: int) -> "ModelConfig":
        """The configuration of a decoder whose longest sequence has so many tokens.

        The same unless rotary frequencies depend on it.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):
            return self
        return dataclasses.replace(self, rope_length=length)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> "ModelConfig":
        """The value of a Hugging Face configuration of a family in `config_families`.

        Args:
            config: The parsed `config.json`.
            where: Names the file in errors.

        Raises:
            CheckpointError: Another family, a key is missing or malformed, or a key asks for a
                behaviour that is not supported; the message names the key.
        """
        check_keys(config, where)
        family = FAMILIES[config["model_type"]]
        fields = Fields(values={**family.defaults, **config}, where=where)
        num_heads = fields.size("num_attention_heads")
        num_kv_heads = fields.size("num_key_value_heads", num_heads)
        hidden_size = fields.size("hidden_size")
        head_dim = fields.size("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            fields.fail("num_key_value_heads", f"a divisor of {num_heads} heads")
        if head_dim % 2 or head_dim == 0:
            fields.fail("head_dim", f"an even width, not {head_dim}")
        num_layers = fields.size("num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            fields.fail("num_hidden_layers", f"at most {_MAX_LAYERS} layers")
        rope = read_rope(fields, family, head_dim)
        options = read_options(fields, family, num_layers=num_layers, hidden_size=hidden_size)
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.size("max_position_embeddings"),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rotary_share=rope.share,
            local_rope_theta=rope.local_theta,
            rms_norm_eps=fields.number("rms_norm_eps"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            windows=read_windows(fields, family, num_layers, options.rotary_layers),
            qkv_bias=family.has_qkv_bias,
            query_key_norm=family.query_key_norm,
            norm_places=family.norm_places,
            norm_scale=family.norm_scale,
            tensor_layout=family.tensor_layout,
            **options._asdict(),
        )
