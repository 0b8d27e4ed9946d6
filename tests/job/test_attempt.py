import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from lockless_store import LocklessStore, StoreClock

from jaxpaged.errors import ConfigError, OutputConflictError, StorageError
from jaxpaged.job.output import attempt as attempts
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.local_store import LocalStore


def local(path: pathlib.Path, disk: Disk | None = None) -> LocalStore:
    return LocalStore(path, private=PRIVATE, durability="process", disk=disk)


def content(path: pathlib.Path, name: str) -> dict:
    return json.loads((path / attempts.FOLDER / name).read_text())


def test_attempts_are_numbered_and_say_who_began_and_how_it_ended(tmp_path):
    store = local(tmp_path / "out")
    assert attempts.last_attempt(store) is None

    with Attempt(store, lambda: {"rows": 5}) as first:
        assert attempts.all_attempts(store)[0].end is None
        assert store.is_locked()
        first.ends("stopped", "why")
    with Attempt(store) as second:
        pass

    assert (first.number, second.number) == (1, 2)
    begin = content(store.path, "000001.json")
    assert (begin["host"], begin["pid"]) == (socket.gethostname(), os.getpid())
    assert content(store.path, "000001.beat")["rows"] == 5
    one, two = attempts.all_attempts(store)
    assert (one.number, one.begin, one.beat["rows"]) == (1, begin, 5)
    assert one.end is not None
    assert (one.end["state"], one.end["message"]) == ("stopped", "why")
    assert two.end is not None
    assert two.end["state"] == "ended"
    assert attempts.last_attempt(store) == two
    assert str(one) == (
        f"attempt 1 on host {begin['host']}, process {begin['pid']}, since {begin['began']}"
    )
    assert store.is_locked() is False


def test_files_that_are_no_attempts_are_passed_over(tmp_path):
    store = local(tmp_path)
    folder = tmp_path / attempts.FOLDER
    folder.mkdir(parents=True)
    for name in ("x.json", "000009.beat", "clock", "000004.json"):
        (folder / name).write_text("{")

    with Attempt(store) as mine:
        assert mine.number == 5
    assert [one.number for one in attempts.all_attempts(store)] == [4, 5]
    assert "attempt 4 on host ?, process ?" in str(attempts.all_attempts(store)[0])


HOLDER = """
import pathlib, sys, time
from jaxpaged.job.output.attempt import Attempt
from jaxpaged.storage.local_store import LocalStore

with Attempt(LocalStore(pathlib.Path(sys.argv[1]), private="_jaxpaged"), lambda: {"rows": 3}):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_second_writer_is_told_of_the_first_until_that_is_gone(tmp_path):
    store = local(tmp_path / "out")
    command = [sys.executable, "-c", HOLDER, str(store.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"

        with pytest.raises(OutputConflictError) as caught:
            Attempt(store)
        assert store.is_locked()
        deadline = time.monotonic() + 30
        while not (beats := attempts.all_attempts(store)[0].beat) and time.monotonic() < deadline:
            time.sleep(0.05)
        holder.send_signal(signal.SIGKILL)
        holder.wait()

    assert caught.value.exit_code == 6
    assert f"another process is writing to {store.path}" in str(caught.value)
    assert f"(attempt 1 on host {socket.gethostname()}, process {holder.pid}, since 20" in str(
        caught.value
    )
    assert "wait until it has ended, or choose another folder" in str(caught.value)
    assert beats["rows"] == 3
    with Attempt(store) as next_one:
        assert next_one.number == 2
    assert attempts.all_attempts(store)[0].end is None


def test_a_place_that_cannot_be_written_to_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"output.path: cannot write to .*Not a directory"):
        Attempt(local(tmp_path / "file" / "out"))
    with pytest.raises(ConfigError, match=r"output.path: cannot write to /proc/none/out"):
        Attempt(local(pathlib.Path("/proc/none/out")))


class FullDisk(Disk):
    """Takes nothing once it is full."""

    is_full = False

    def write(self, path: pathlib.Path, data: bytes) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().write(path, data)


def test_a_full_disk_lets_the_next_writer_in(tmp_path):
    disk = FullDisk()
    store = local(tmp_path, disk)

    with Attempt(store):
        disk.is_full = True

    assert attempts.all_attempts(store)[0].end is None
    with pytest.raises(StorageError, match="No space left"), Attempt(store):
        pass
    disk.is_full = False
    with Attempt(store) as later:
        assert later.number == 2


class RacedStore(LocalStore):
    """Somebody else creates every name just before."""

    def create(self, name: str, data: bytes) -> bool:
        assert super().create(name, b'{"host": "elsewhere"}')
        return super().create(name, data)


def test_a_number_that_another_one_took_at_the_same_time_is_a_conflict(tmp_path):
    raced = RacedStore(tmp_path, private=PRIVATE, durability="process")

    with pytest.raises(OutputConflictError, match=r"attempt 1 on host elsewhere, process \?"):
        Attempt(raced)

    with Attempt(local(tmp_path)) as later:
        assert later.number == 2


@pytest.fixture
def clock() -> StoreClock:
    return StoreClock()


def test_without_locks_a_fresh_writer_keeps_others_out(tmp_path, clock):
    first, second = (LocklessStore(tmp_path, clock, name) for name in ("a", "b"))

    with Attempt(first):
        clock.now += attempts.LEASE_SECONDS - 1
        with pytest.raises(OutputConflictError) as caught:
            Attempt(second)
    assert "another process is writing" in str(caught.value)
    assert "or, if it was killed, for 60 s after its last sign of life" in str(caught.value)
    # Its end counts at once.
    with Attempt(second) as later:
        assert later.number == 2


def test_without_locks_a_beat_is_a_sign_of_life(tmp_path, clock):
    store = LocklessStore(tmp_path, clock, "a")
    with Attempt(store):
        known = attempts.last_attempt(store)
        assert known is not None

        clock.now += attempts.LEASE_SECONDS
        assert not attempts.is_alive(store, known)
        store.replace(f"{attempts.FOLDER}/000001.beat", b"{}")
        clock.now += attempts.LEASE_SECONDS - 1
        assert attempts.is_alive(store, known)
        clock.now += 1
        assert not attempts.is_alive(store, known)


def test_without_locks_a_silent_writer_is_replaced_and_sees_it(tmp_path, clock):
    first, second = (LocklessStore(tmp_path, clock, name) for name in ("a", "b"))
    with Attempt(first) as silent:
        silent.check()
        clock.now += attempts.LEASE_SECONDS

        with Attempt(second) as later:
            later.check()
            with pytest.raises(OutputConflictError) as caught:
                silent.check()
        # For ever, not only as long as the other one runs.
        with pytest.raises(OutputConflictError):
            silent.check()

    assert later.number == 2
    assert caught.value.exit_code == 6
    assert "this process was silent for more than 60 s and attempt 2 on host" in str(caught.value)


def test_where_there_are_locks_nobody_is_replaced(tmp_path):
    store = local(tmp_path)
    with Attempt(store) as mine:
        (tmp_path / attempts.FOLDER / "000099.json").write_text("{}")
        mine.check()
        assert mine.number == 1
