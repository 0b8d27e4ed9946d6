"""The device that JAX gives an engine."""

import jax

from jaxpaged.errors import ConfigError


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
