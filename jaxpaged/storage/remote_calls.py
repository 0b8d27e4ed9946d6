"""Calls to a remote file system, repeated until it answers or waiting is no longer worth it.

A call must be one that can be repeated: the answer to an earlier try may be lost, not its effect.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from jaxpaged.errors import StorageError
from jaxpaged.storage import remote_faults
from jaxpaged.storage.remote_faults import Meaning

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)
"""Seconds between the tries; two minutes in all."""

FIRST_PAUSES = PAUSES[:3]
"""Until the store has answered once: its URL is more likely wrong than the store down."""

PATIENCE = 300.0
"""Seconds after which a call is not tried again, however long each try took."""

_REMEDIES: dict[Meaning, str] = {
    "no bucket": "there is no such bucket; make it, or correct the URL",
    "denied": "the credentials need the rights to list the bucket and to read, write and delete "
    "objects under this URL",
    "passing": "once the store answers again, running the job again continues",
}

_Result = TypeVar("_Result")


class Missing(StorageError, FileNotFoundError):
    """There is nothing under the name."""


class Exists(StorageError, FileExistsError):
    """It was a conditional write, and there is something under the name."""


class Unsupported(StorageError):
    """The store does not know this kind of request."""


_KINDS: dict[Meaning, type[StorageError]] = {
    "missing": Missing,
    "exists": Exists,
    "unsupported": Unsupported,
}


class RemoteCalls:
    """Makes calls, and makes a StorageError of everything that a file system raises.

    Args:
        sleep: How to wait between two tries.
    """

    def __init__(self, sleep: Callable[[float], object] = time.sleep) -> None:
        self._sleep = sleep
        self._has_answered = False

    def run(self, what: str, call: Callable[[], _Result]) -> _Result:
        """What the call gives.

        Args:
            what: What it does, for messages: "read s3://bucket/name".
            call: Has the same effect however often it is made.

        Raises:
            StorageError: It failed for good; one of its kinds above if it is one of those.
        """
        began, tries = time.monotonic(), 0
        while True:
            try:
                result = call()
            except Exception as error:
                tries += 1
                found = remote_faults.meaning(error)
                if found is None:
                    raise
                reason = remote_faults.reason(error)
            else:
                self._has_answered = True
                return result
            pauses = PAUSES if self._has_answered else FIRST_PAUSES
            is_over = tries > len(pauses) or time.monotonic() - began > PATIENCE
            if found != "passing" or is_over:
                self._fail(what, found, reason, tries)
            self._sleep(pauses[tries - 1])

    def _fail(self, what: str, found: Meaning, reason: str, tries: int) -> None:
        # Not from within `except`: a traceback shows the errors that led to one, secrets included.
        self._has_answered = self._has_answered or found in ("missing", "exists")
        often = f", {tries} times" if tries > 1 else ""
        why = {"missing": "it does not exist", "exists": "it exists already"}.get(found, reason)
        remedy = f"; {_REMEDIES[found]}" if found in _REMEDIES else ""
        raise _KINDS.get(found, StorageError)(f"cannot {what}: {why}{often}{remedy}")
