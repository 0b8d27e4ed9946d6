"""How many finished rows the journal holds, without touching it."""

import re
from collections.abc import Callable

from jaxpaged.job.output import journal, journal_frame, journal_record
from jaxpaged.job.units import Unit
from jaxpaged.storage.store import Store

_NAME = re.compile(r"[0-9]{6}")


def num_rows(store: Store, wanted: Callable[[int], Unit | None]) -> int:
    """The rows that the next run would find in the logs; one log at a time is in memory.

    Args:
        store: The output; nobody should write to it meanwhile.
        wanted: The unit with an index if it is still to be made.

    Raises:
        StorageError: A log cannot be read.
    """
    names = [name for name in store.logs(journal.FOLDER) if _NAME.fullmatch(name)]
    units = [wanted(int(name)) for name in names]
    return sum(_num_rows(store, unit) for unit in units if unit is not None)


def _num_rows(store: Store, unit: Unit) -> int:
    frames = journal_frame.read(store.read_log(f"{journal.FOLDER}/{unit.index:06d}") or b"")
    head = next(frames, None)
    if head is None or head.value != journal_record.head(unit):
        return 0
    addresses = set()
    for frame in frames:
        record = journal_record.decode(frame.value)
        if record is None:
            break
        addresses.add(record[0])
    return len(addresses)
