"""Whether some process writes to an output folder at this moment, as far as a reader can tell.

Changes nothing there, unlike `attempt.is_alive`, which a writer asks.
"""

import datetime

from jaxpaged.job.output import attempt
from jaxpaged.job.output.attempt import LEASE_SECONDS, AttemptFacts
from jaxpaged.storage.store import Store


def is_running(
    store: Store, last: AttemptFacts | None, now: datetime.datetime | None = None
) -> bool:
    """Whether a writer is at work.

    Where the store has no lock, the last attempt counts as one until it was silent for too long.
    That goes by this machine's clock, which may differ from the writer's.

    Args:
        store: The output.
        last: Its latest attempt.
        now: The moment; None for this one.
    """
    is_locked = store.is_locked()
    if is_locked is not None:
        return is_locked
    silent = None if last is None or last.end is not None else seconds_silent(last, now)
    return silent is not None and silent < LEASE_SECONDS


def is_running_now(store: Store) -> bool:
    """The same for this moment and the latest attempt.

    Raises:
        StorageError: The folder cannot be read.
    """
    return is_running(store, attempt.last_attempt(store))


def seconds_silent(facts: AttemptFacts, now: datetime.datetime | None = None) -> float | None:
    """How long ago the attempt gave a sign of life; None if nobody knows."""
    now = now or datetime.datetime.now(datetime.UTC)
    heard = [_moment(facts.beat.get("time")), _moment(facts.begin.get("began"))]
    known = [moment for moment in heard if moment is not None]
    return max(0.0, (now - max(known)).total_seconds()) if known else None


def _moment(text: object) -> datetime.datetime | None:
    """The moment that a record names, if it names one."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
