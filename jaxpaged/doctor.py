"""What an engine would use on this machine and why, and what to install if that is not the GPU."""

import pathlib
from collections.abc import Iterator

import jax

from jaxpaged.config import Attention, EngineConfig
from jaxpaged.engine import attention, compile_cache, device, limits, memory
from jaxpaged.engine.device import Device
from jaxpaged.engine.shortage import size
from jaxpaged.errors import ConfigError
from jaxpaged.job import versions

_NVIDIA = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""Signs of an NVIDIA GPU: its driver, or that of Windows below a Linux."""

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def findings(root: pathlib.Path = pathlib.Path("/")) -> Iterator[tuple[str, str]]:
    """Names and values, then, as "advice", what is to be done.

    Args:
        root: Where the system's files lie.

    Raises:
        ConfigError: The device that JAX is told to use cannot be started.
    """
    installed = versions.installed()
    yield "versions", ", ".join(f"{name} {installed[name]}" for name in ("python", "jax", "jaxlib"))
    plugins = {name: versions.version_of(name) for name in _PLUGINS}
    known = {name: version for name, version in plugins.items() if version is not None}
    yield "CUDA plugin", ", ".join(f"{name} {known[name]}" for name in known) or "not installed"
    place = device.here()
    yield "backend", place.platform
    for found in jax.devices():
        capability = getattr(found, "compute_capability", None)
        detail = f", compute capability {capability}" if capability else ""
        yield f"device {found.id}", f"{found.device_kind}{detail}"
    yield "memory available", size(memory.available_bytes())
    config = EngineConfig()
    implementation, reason = attention.choose(config, device=place)
    yield "attention", f"{implementation} ({reason})"
    for asked in ("llvm", "triton", "mosaic"):
        yield f"attention if {asked} is asked for", _if_asked_for(asked, place)
    dtype = limits.dtype(config, place)
    yield "weights and KV cache", f"{dtype} (the default on a {place.platform})"
    is_deterministic = "yes" if limits.is_deterministic(config, place) else "no"
    yield "deterministic", f"{is_deterministic} (the default on a {place.platform})"
    yield "compiled programs", str(compile_cache.folder())
    if place.is_cpu:
        yield from _advice(root, has_plugin=bool(known))


def _if_asked_for(asked: Attention, place: Device) -> str:
    """What a job that asks for these kernels would get."""
    try:
        return str(attention.choose(EngineConfig(attention=asked), device=place).implementation)
    except ConfigError as error:
        return f"refused ({error})"


def _advice(root: pathlib.Path, *, has_plugin: bool) -> Iterator[tuple[str, str]]:
    """Why no GPU is in use, if the machine seems to have one."""
    signs = [path for path in _NVIDIA if (root / path.lstrip("/")).exists()]
    if signs and not has_plugin:
        yield (
            "advice",
            f"there is an NVIDIA driver ({signs[0]}), and JAX is installed without CUDA: "
            "pip install 'jaxpaged[cuda12]'",
        )
    elif signs:
        yield (
            "advice",
            f"there is an NVIDIA driver ({signs[0]}) and JAX does not use it: look at nvidia-smi, "
            "at JAX_PLATFORMS, and whether the plugin's version is jaxlib's",
        )
    elif has_plugin:
        yield "advice", "JAX is installed with CUDA, and there is no NVIDIA driver on this machine"
