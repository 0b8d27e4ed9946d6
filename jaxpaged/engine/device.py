"""The device that JAX gives an engine."""

import jax

from jaxpaged.errors import ConfigError

# XLA splits products of few rows along the summed dimension, by a rule of thumb. Each part's sums
# are written in float32, read again and added up by a kernel of their own: in decode steps of Llama
# 1B and 8B that is 6 to 10 % of all bytes that move, and one kernel in eight.
GPU_COMPILER_OPTIONS = {"xla_disable_hlo_passes": "splitk-rewriter"}


def backend() -> str:
    """JAX's default backend: cpu, gpu or tpu.

    Raises:
        ConfigError: The device that is asked for cannot be started.
    """
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["the platform is not there"])[0]
        raise ConfigError(
            f"JAX cannot start its device: {reason}; unset JAX_PLATFORMS, or install what the "
            "device needs (for NVIDIA GPUs: pip install 'jaxpaged[cuda12]')"
        ) from None


def compiler_options() -> dict[str, str]:
    """What XLA is told beside the program, on this backend."""
    return GPU_COMPILER_OPTIONS if backend() == "gpu" else {}
