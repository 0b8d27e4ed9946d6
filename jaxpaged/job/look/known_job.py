"""The job that an output folder remembers, for commands that have no job file."""

from jaxpaged.errors import ConfigError, OutputConflictError
from jaxpaged.job.output import history
from jaxpaged.job.output.history import History
from jaxpaged.job.units import Units
from jaxpaged.storage.store import Store

_ROWS_PER_PART = "output.rows_per_part"


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
    rows_per_part = known.job.result_keys.get(_ROWS_PER_PART)
    try:
        if type(rows_per_part) is int and rows_per_part > 0:
            return Units(segments=known.segments, rows_per_part=rows_per_part)
    except ConfigError:
        pass  # more parts than there are names: no job could have begun so
    raise OutputConflictError(
        f"{store.url}/{history.JOB} cannot be used: its {_ROWS_PER_PART} is {rows_per_part!r}; "
        "restore the file"
    )
