"""A folder that behaves as an object store does where writers are concerned."""

import pathlib

from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.storage.local_store import LocalStore


class StoreClock:
    """The store's own clock, set by the test.

    Attributes:
        now: Seconds.
        written: When each name was written last.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.written: dict[str, float] = {}


class LocklessStore(LocalStore):
    """Nothing but the attempts tells its writers apart.

    Args:
        path: The folder.
        clock: Shared by all who use the folder.
        name: Of this process; what it has not published yet lies apart from that of others.
    """

    excludes_writers = False

    def __init__(self, path: pathlib.Path, clock: StoreClock, name: str) -> None:
        super().__init__(path, private=PRIVATE, durability="process")
        self._clock = clock
        self._aside = path / PRIVATE / f"tmp-{name}"

    def lock(self) -> bool:
        self._aside.mkdir(parents=True, exist_ok=True)
        return True

    def is_locked(self) -> bool | None:
        return None

    def create(self, name: str, data: bytes) -> bool:
        is_mine = super().create(name, data)
        if is_mine:
            self._clock.written[name] = self._clock.now
        return is_mine

    def replace(self, name: str, data: bytes) -> None:
        super().replace(name, data)
        self._clock.written[name] = self._clock.now

    def modified(self, name: str) -> float | None:
        return self._clock.written.get(name)
