"""How much memory there is, and how many blocks of the KV pool that makes."""

import collections.abc
import ctypes
import gc
import math
import os
import pathlib

import jax
import jax.numpy as jnp

from jaxpaged.cache.capacity import PoolCapacity, blocks_for
from jaxpaged.config import DType, EngineConfig
from jaxpaged.errors import CapacityError

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
    shapes: collections.abc.Mapping[str, tuple[int, ...]], *, dtype: DType, available: int
) -> None:
    """Refuses weights that cannot fit, before any of them is read.

    Args:
        shapes: Of every tensor.
        dtype: They are loaded as.
        available: Bytes free on the device.

    Raises:
        CapacityError: They need more than there is.
    """
    needed = sum(math.prod(shape) for shape in shapes.values()) * jnp.dtype(dtype).itemsize
    if needed > available:
        raise CapacityError(
            f"the weights need {size(needed)} in {dtype}, {size(available)} are available; free "
            "memory, use a smaller model" + (", or engine.dtype bfloat16" * (dtype == "float32"))
        )


def resolve_capacity(
    config: EngineConfig, *, available: int, bytes_per_token: int, max_model_len: int
) -> PoolCapacity:
    """The pool for this engine: `num_blocks` as configured, or from the memory share.

    The share gives never more blocks than `max_num_seqs` sequences of `max_model_len` tokens need.

    Args:
        config: The engine's settings.
        available: Bytes free on the device after loading the weights.
        bytes_per_token: Bytes of one token's keys and values over all layers.
        max_model_len: Most tokens of a sequence.

    Raises:
        CapacityError: The pool does not fit, or the memory share holds not even one block.
    """
    block_bytes = bytes_per_token * config.block_size
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_bytes
        if wanted > available:
            raise CapacityError(
                f"engine.num_blocks: {config.num_blocks} blocks need {size(wanted)}, "
                f"{size(available)} are available; use at most {available // block_bytes} blocks"
            )
        num_blocks = config.num_blocks
    else:
        most = config.max_num_seqs * blocks_for(max_model_len, config.block_size)
        share = int(available * config.memory_utilization)
        num_blocks = min(most, share // block_bytes)
        if num_blocks < 1:
            raise CapacityError(
                f"engine.memory_utilization: {config.memory_utilization} of {size(available)} "
                f"available is {size(share)}, one block of {config.block_size} tokens needs "
                f"{size(block_bytes)}; raise the share, free memory, or use a smaller dtype"
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


def size(num_bytes: int) -> str:
    """The number as people read it."""
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
