"""The job that an output folder remembers, for commands that have no job file."""

from jaxpaged.errors import ConfigError, OutputConflictError
from jaxpaged.job.output import history
from jaxpaged.job.output.history import History
from jaxpaged.job.units import Units
from jaxpaged.storage.store import Store

_ROWS_PER_PART = "output.rows_per_part"
_EXPLODE = "output.explode"
_SAMPLES = "sampling.n"


def read(store: Store) -> History:
    """What the folder remembers.

    Raises:
        OutputConflictError: No job began there, or a record cannot be understood.
        StorageError: The folder cannot be read.
    """
    known = history.read(store)
    if known is None:
        raise OutputConflictError(
            f"{store.url} holds no output of jaxpaged's: there is no {history.JOB} in it; name the "
            "folder that a job file has as output.path"
        )
    return known


def units(known: History, store: Store) -> Units:
    """How the job's rows are cut into parts.

    Raises:
        OutputConflictError: The folder's record does not say it.
    """
    rows_per_part = _count(known, _ROWS_PER_PART, store)
    # A job of before there was such a key has a row for each row.
    each = _count(known, _SAMPLES, store) if known.job.result_keys.get(_EXPLODE) else 1
    try:
        return Units(segments=known.segments, rows_per_part=rows_per_part, rows_each=each)
    except ConfigError:
        # More parts than there are names: no job could have begun so.
        raise _unusable(store, _ROWS_PER_PART, rows_per_part) from None


def _count(known: History, key: str, store: Store) -> int:
    value = known.job.result_keys.get(key)
    if type(value) is int and value > 0:
        return value
    raise _unusable(store, key, value)


def _unusable(store: Store, key: str, value: object) -> OutputConflictError:
    return OutputConflictError(
        f"{store.url}/{history.JOB} cannot be used: its {key} is {value!r}; restore the file"
    )
