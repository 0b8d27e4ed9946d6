"""Shapes of the Llama models that whole steps and whole engines are tried in. Loads no JAX."""

from jaxpaged.model.config import ModelConfig


def llama(*, hidden: int, mlp: int, layers: int, head_dim: int, is_tied: bool) -> ModelConfig:
    """A model of the Llama 3 family; 32 query heads and 8 key/value heads."""
    return ModelConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=is_tied,
        attention_bias=False,
        mlp_bias=False,
    )


LLAMA_1B = llama(hidden=2048, mlp=8192, layers=16, head_dim=64, is_tied=True)
LLAMA_8B = llama(hidden=4096, mlp=14336, layers=32, head_dim=128, is_tied=False)
MODELS = {"llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B}
"""Of the shapes of Llama 3.2 1B and Llama 3.1 8B."""
