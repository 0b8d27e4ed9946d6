"""The device's own error of too little memory, as one that says what to change."""

import contextlib
import re
from collections.abc import Iterator, Sequence

import jax

from jaxpaged.config import EngineConfig
from jaxpaged.engine import memory
from jaxpaged.engine.shortage import shortage

_BYTES = re.compile(r"allocat\w* (\d+) bytes")

# Less of it than before, where what was left free was not enough.
_SMALLER_SHARE = 0.8


@contextlib.contextmanager
def told(what: str, changes: Sequence[str]) -> Iterator[None]:
    """Around what allocates on the device.

    Args:
        what: Is being done.
        changes: What would help, the cheapest first.

    Raises:
        CapacityError: The device ran out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        found = _BYTES.search(str(error))
        raise shortage(
            f"{what}: the device ran out of memory",
            needed=int(found[1]) if found else None,
            available=memory.available_bytes(),
            changes=changes,
        ) from error


def remedies(config: EngineConfig) -> list[str]:
    """What takes less memory, for an engine that was running already."""
    share = round(config.memory_utilization * _SMALLER_SHARE, 2)
    pool = f"engine.memory_utilization: {share}"
    if config.num_blocks is not None:
        pool = f"engine.num_blocks: {max(1, int(config.num_blocks * _SMALLER_SHARE)):,}"
    lanes = f"engine.max_num_seqs: {max(1, config.max_num_seqs // 2)}"
    return [pool, lanes, "end what else takes memory of the device"]
