"""How much memory there is, and how many blocks of the KV pool that makes."""

import collections.abc
import ctypes
import gc
import math
import os
import pathlib
import resource
import sys

import jax
import jax.numpy as jnp

from jaxpaged.cache.capacity import PoolCapacity, blocks_for
from jaxpaged.config import DType, EngineConfig, KVDType, WeightDType
from jaxpaged.engine.shortage import shortage, size
from pallas_kernels import weight_format

_CGROUP = pathlib.Path("/sys/fs/cgroup")
_PROC = pathlib.Path("/proc")

# Version 2, then version 1: the folder of the memory controller and its files.
_LIMITS = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Bytes this process can still take on the default device, after what it already holds.

    On the CPU the smaller of what the machine has available and what the container's limit
    leaves.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return available_host_bytes(_PROC, _CGROUP)
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def resident_bytes() -> int:
    """Main memory this process holds right now; where the system does not say, its peak so far."""
    try:
        pages = int((_PROC / "self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # macOS counts bytes, other systems kilobytes.
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def used_bytes() -> int:
    """Bytes in use on the default device: on a CPU what this process holds of main memory."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return resident_bytes()
    return (device.memory_stats() or {}).get("bytes_in_use", 0)


def give_back() -> None:
    """Returns to the system what was freed, of which compiling leaves hundreds of MiB.

    Only glibc keeps so much, and only there is there a way to do this.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        gc.collect()
        trim(0)


def available_host_bytes(proc: pathlib.Path, cgroup: pathlib.Path) -> int:
    """Bytes of main memory this process can still take.

    The least of what the machine has available and what each control group that holds this
    process leaves.

    Args:
        proc: Where the kernel's tables are mounted; without it, all of the machine's memory
            counts as available.
        cgroup: Where control groups are mounted; limits of versions 1 and 2 are honoured.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":") for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for group in _group_paths(proc):
        for controller, limit_file, usage_file in _LIMITS:
            folder = cgroup / controller / group
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is not None and usage is not None:
                # Cached files count as usage but make way, as they do in MemAvailable.
                cached = _stat(folder / "memory.stat", "inactive_file")
                available = min(available, limit - usage + cached)
    return max(0, available)


def _group_paths(proc: pathlib.Path) -> set[pathlib.PurePosixPath]:
    """The control groups of this process and all groups around them, relative to the mount."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    # Each line is `hierarchy:controllers:/path`.
    own = [pathlib.PurePosixPath(line.split(":", 2)[2].lstrip("/")) for line in lines]
    return {pathlib.PurePosixPath(), *(p for path in own for p in (path, *path.parents))}


def check_weights(
    shapes: collections.abc.Mapping[str, tuple[int, ...]],
    *,
    dtype: DType,
    weight_dtype: WeightDType | None = None,
    available: int,
) -> None:
    """Refuses weights that cannot fit, before any of them is read.

    Args:
        shapes: Of every tensor.
        dtype: They are loaded as.
        weight_dtype: What those of linear maps are quantised to.
        available: Bytes free on the device.

    Raises:
        CapacityError: They need more than there is.
    """
    numbers = sum(math.prod(shape) for shape in shapes.values())
    needed = _weights_bytes(shapes, dtype, weight_dtype)
    if needed > available:
        changes = [
            f"free {size(needed - available)} of memory, or take a device that has it",
            f"a model of at most {numbers * available // needed:,} parameters; this one has "
            f"{numbers:,}",
        ]
        narrow = _weights_bytes(shapes, dtype, "int8")
        is_routed = any(".experts." in name for name in shapes)
        if weight_dtype is None and not is_routed and narrow < needed:
            changes.insert(0, f"engine.weight_dtype: int8, which needs {size(narrow)}")
        if dtype == "float32":
            halved = size(_weights_bytes(shapes, "bfloat16", weight_dtype))
            changes.insert(0, f"engine.dtype: bfloat16, which needs {halved}")
        what = f"the weights in {dtype}"
        if weight_dtype is not None:
            what += f" with linear maps in {weight_dtype}"
        raise shortage(what, needed=needed, available=available, changes=changes)


def _weights_bytes(
    shapes: collections.abc.Mapping[str, tuple[int, ...]],
    dtype: DType,
    weight_dtype: WeightDType | None,
) -> int:
    num_bytes = 0
    for name, shape in shapes.items():
        if weight_dtype is not None and name.endswith("_proj.weight"):
            # Checkpoints have `[out, in]`.
            num_bytes += weight_format.num_bytes(shape[1], shape[0], weight_dtype)
        else:
            num_bytes += math.prod(shape) * jnp.dtype(dtype).itemsize
    return num_bytes


def resolve_capacity(
    config: EngineConfig,
    *,
    available: int,
    bytes_per_token: int,
    max_model_len: int,
    narrower: collections.abc.Mapping[KVDType, int] | None = None,
) -> PoolCapacity:
    """The pool for this engine: `num_blocks` as configured, or from the memory share.

    The share gives never more blocks than `max_num_seqs` sequences of `max_model_len` tokens need.

    Args:
        config: The engine's settings.
        available: Bytes free on the device after loading the weights.
        bytes_per_token: Bytes of one token's keys and values over all layers.
        max_model_len: Most tokens of a sequence.
        narrower: Bytes of a token in formats that take less, for the advice in errors.

    Raises:
        CapacityError: The pool does not fit, or the memory share holds not even one block.
    """
    block_bytes = bytes_per_token * config.block_size
    narrow = narrower or {}
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_bytes
        if wanted > available:
            most = available // block_bytes
            changes = [f"engine.num_blocks: at most {most:,}, or leave it out"] if most else []
            slots = config.num_blocks * config.block_size
            changes += [
                f"engine.kv_dtype: {name}, with which they need {size(slots * num_bytes)}"
                for name, num_bytes in narrow.items()
                if slots * num_bytes <= available
            ]
            raise shortage(
                f"engine.num_blocks: {config.num_blocks:,} blocks of the KV pool",
                needed=wanted,
                available=available,
                where="weights and temporary arrays",
                changes=[*changes, f"free {size(wanted - available)} of memory"],
            )
        num_blocks = config.num_blocks
    else:
        most = config.max_num_seqs * blocks_for(max_model_len, config.block_size)
        share = int(available * config.memory_utilization)
        num_blocks = min(most, share // block_bytes)
        if num_blocks < 1:
            changes = [
                f"engine.kv_dtype: {name}, with which it needs {size(config.block_size * num)}"
                for name, num in narrow.items()
                if config.block_size * num <= share
            ]
            least = block_bytes / available if available else math.inf
            if least <= 1:
                raised = math.ceil(least * 100) / 100
                changes.insert(0, f"engine.memory_utilization: at least {raised}")
            raise shortage(
                f"engine.memory_utilization: {config.memory_utilization} of {size(available)} for "
                f"the KV pool, of which one block holds {config.block_size:,} tokens",
                needed=block_bytes,
                available=share,
                changes=[*changes, "a smaller engine.block_size", "more free memory"],
            )
    return PoolCapacity(
        num_blocks=num_blocks, block_size=config.block_size, bytes_per_token=bytes_per_token
    )


def _number(path: pathlib.Path) -> int | None:
    """The file's number; None where there is no such file or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: pathlib.Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get(name, 0))
