"""What does not fit, said in one way: what is needed, what there is, the cheapest changes."""

from collections.abc import Sequence

from jaxpaged.errors import CapacityError

MOST_CHANGES = 3


def shortage(
    what: str, *, needed: int | None, available: int, changes: Sequence[str], where: str = ""
) -> CapacityError:
    """The error.

    Args:
        what: Is too large, with its numbers.
        needed: Bytes; None if that is not known.
        available: Bytes.
        changes: What would help, the cheapest first; the first three are shown.
        where: What the memory must be free beside.
    """
    beside = f" beside {where}" if where else ""
    listed = "; ".join(f"({at}) {text}" for at, text in enumerate(changes[:MOST_CHANGES], start=1))
    amount = "more" if needed is None else size(needed)
    return CapacityError(
        f"{what}: {amount} needed, {size(available)} available{beside}. Cheapest changes: {listed}"
    )


def size(num_bytes: int) -> str:
    """The number as people read it."""
    if num_bytes < 2**30 / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
