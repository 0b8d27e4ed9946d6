"""Who computes attention in an engine, and why: the device's best, or what the settings ask for."""

from typing import NamedTuple

from jaxpaged.config import EngineConfig
from jaxpaged.engine.device import Device
from jaxpaged.errors import ConfigError
from jaxpaged.model.config import ModelConfig
from pallas_kernels import Implementation, llvm, triton

# Of NVIDIA GPUs that the Triton kernels are compiled for: Ampere and what came after.
_LEAST_CAPABILITY = 8.0
# The only one that the Mosaic GPU kernel is compiled for: Hopper.
_HOPPER = 9.0


class Choice(NamedTuple):
    """An implementation, and why it is that one, for the report and the log."""

    implementation: Implementation
    reason: str


def choose(config: EngineConfig, model: ModelConfig | None = None, *, device: Device) -> Choice:
    """The implementation for a model on a device; without a model, for a usual one.

    Raises:
        ConfigError: Kernels were asked for that the device, the model or the settings rule out.
    """
    if config.attention == "xla":
        return Choice("xla", "engine.attention says so")
    if device.is_cpu and config.attention != "mosaic":
        if config.attention == "triton":
            reason = "engine.attention says so; interpreted, there is no GPU"
            return Choice("triton_interpreted", reason)
        return _on_cpu(config, model)
    if config.attention == "llvm":
        raise ConfigError(
            "engine.attention is llvm, and these kernels are for CPUs, the device is a "
            f"{device.platform}; use auto or xla"
        )
    capability, found = device.capability or 0.0, _found(device)
    if config.attention == "mosaic":
        return _mosaic(config, model, capability, found)
    dtype = config.dtype or "bfloat16"
    kv_dtype = config.kv_dtype or dtype
    ruled_out = None
    if capability < _LEAST_CAPABILITY:
        ruled_out = f"{found}, the kernels need {_LEAST_CAPABILITY}"
    elif not triton.is_compiled(dtype, kv_dtype):
        ruled_out = f"the kernels are not made for {dtype} weights with a {kv_dtype} pool"
    elif model and model.head_dim > triton.WIDEST_HEAD:
        ruled_out = f"heads are {model.head_dim} wide, the kernels serve {triton.WIDEST_HEAD}"
    if ruled_out and config.attention == "triton":
        raise ConfigError(f"engine.attention is triton, and {ruled_out}; use auto or xla")
    return Choice("xla", ruled_out) if ruled_out else Choice("triton", found)


def _on_cpu(config: EngineConfig, model: ModelConfig | None) -> Choice:
    dtype = config.dtype or "float32"
    ruled_out = llvm.unserved(
        dtype=dtype,
        kv_dtype=config.kv_dtype or dtype,
        head_dim=model.head_dim if model else None,
    )
    if model and model.experts is not None:
        ruled_out = "the kernels for CPUs have no grouped products, which routed experts need"
    if not ruled_out:
        return Choice("llvm", "compiled for this CPU, linear maps too")
    if config.attention == "llvm":
        raise ConfigError(f"engine.attention is llvm, and {ruled_out}; use auto or xla")
    return Choice("xla", ruled_out)


def _found(device: Device) -> str:
    """What to say of the device's kind."""
    if device.capability is not None:
        return f"compute capability {device.capability}"
    return f"the device is a {device.platform}" + (f", {device.name}" * (device.platform == "gpu"))


def _mosaic(
    config: EngineConfig, model: ModelConfig | None, capability: float, found: str
) -> Choice:
    ruled_out = None
    if capability != _HOPPER:
        ruled_out = f"{found}, the kernel is for {_HOPPER} (H100, H200)"
    else:
        try:
            # Needs a newer JAX than the rest.
            from pallas_kernels import mosaic
        except ImportError as error:
            ruled_out = str(error)
        else:
            if model:
                ruled_out = mosaic.unserved(
                    (config.dtype or "bfloat16", config.kv_dtype or config.dtype or "bfloat16"),
                    num_heads=model.num_heads,
                    num_kv_heads=model.num_kv_heads,
                    head_dim=model.head_dim,
                    block_size=config.block_size,
                )
    if ruled_out:
        raise ConfigError(f"engine.attention is mosaic, and {ruled_out}; use auto")
    return Choice("mosaic", "engine.attention says so; prefill by the Triton kernels")
