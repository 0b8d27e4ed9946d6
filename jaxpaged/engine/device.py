"""The device an engine computes on: the one that JAX has here, or one described."""

import dataclasses
from typing import NamedTuple

import jax

from jaxpaged.errors import ConfigError

# XLA splits products of few rows along the summed dimension, by a rule of thumb. Each part's sums
# are written in float32, read again and added up by a kernel of their own: in decode steps of Llama
# 1B and 8B that is 6 to 10 % of all bytes that move, and one kernel in eight.
GPU_COMPILER_OPTIONS = {"xla_disable_hlo_passes": "splitk-rewriter"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What decides how a model runs on a device.

    Attributes:
        platform: JAX's name of its kind: cpu, gpu or tpu.
        name: The device's own name.
        capability: Compute capability of an NVIDIA GPU; None of anything else.
    """

    platform: str
    name: str
    capability: float | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, whose memory is the machine's."""
        return self.platform == "cpu"


class Place(NamedTuple):
    """Where an engine runs: the device, and the bytes free there beside the weights."""

    device: Device
    available_bytes: int


def here() -> Device:
    """The device that JAX has on this machine.

    Raises:
        ConfigError: The device that is asked for cannot be started.
    """
    platform = backend()
    device = jax.devices()[0]
    said = getattr(device, "compute_capability", None) if platform == "gpu" else None
    try:
        # Of an AMD GPU it is the name of an architecture.
        capability = float(said)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        capability = None
    return Device(platform=platform, name=device.device_kind, capability=capability)


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
