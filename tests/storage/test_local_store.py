import errno
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from failing_disk import FailingDisk, NumberedDisk
from open_folders import reachable
from store_suite import RacingStoreSuite, StoreSuite, store

from jaxpaged.errors import ConfigError, OutputConflictError, StorageError
from jaxpaged.storage.disk import Disk
from jaxpaged.storage.local_store import LocalStore
from jaxpaged.storage.store import Store

__all__ = ["store"]

Do = Callable[[Store], object]

HOLD = (
    "import pathlib, sys\n"
    "from jaxpaged.storage.local_store import LocalStore\n"
    "store = LocalStore(pathlib.Path(sys.argv[1]), private='_jaxpaged')\n"
    "print(store.lock(), flush=True)\n"
    "sys.stdin.read()\n"
)


class LinklessDisk(Disk):
    """Of a file system without hard links."""

    def link(self, path: pathlib.Path, target: pathlib.Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target))


class WriterApart(LocalStore):
    """Of a writer that shares nothing with others, so that only the names themselves exclude."""

    def scratch(self, name: str) -> pathlib.Path:
        return super().scratch(f"{id(self)}-{name}")


class TestLocalStore(RacingStoreSuite):
    @pytest.fixture
    def connect(self, out):
        return lambda: WriterApart(out, private="_jaxpaged")


class TestWithoutLinks(StoreSuite):
    @pytest.fixture
    def connect(self, out):
        return lambda: LocalStore(out, private="_jaxpaged", disk=LinklessDisk())


@pytest.fixture
def out(tmp_path) -> pathlib.Path:
    return tmp_path / "out"


@contextmanager
def locked(out: pathlib.Path, disk: Disk | None = None, **options) -> Iterator[LocalStore]:
    """A store while it is locked."""
    made = LocalStore(out, private="_jaxpaged", disk=disk, **options)
    assert made.lock()
    try:
        yield made
    finally:
        made.unlock()


def prepare(out: pathlib.Path) -> None:
    """Makes a folder with a file and a log."""
    with locked(out) as made:
        made.replace("file", b"old")
        made.append("log", b"1234")


def publish(store: Store) -> None:
    scratch = store.scratch("part")
    scratch.write_bytes(b"new")
    store.publish(scratch, "sub/name", is_new=False)


def append(store: Store) -> None:
    # As every writer of a log, it first cuts what an earlier try may have left.
    if store.read_log("log") != b"1234":
        store.truncate("log", 4)
    store.append("log", b"5678")


# Of each write: how it is made, its name, and the bytes of the name before and after.
WRITES: dict[str, tuple[Do, str, bytes | None, bytes | None]] = {
    "create": (lambda store: store.create("sub/name", b"new"), "sub/name", None, b"new"),
    "replace": (lambda store: store.replace("file", b"new"), "file", b"old", b"new"),
    "publish": (publish, "sub/name", None, b"new"),
    "copy": (lambda store: store.copy("file", "sub/name"), "sub/name", None, b"old"),
    "copy over": (lambda store: store.copy("file", "log"), "log", b"1234", b"old"),
    "delete": (lambda store: store.delete("file"), "file", b"old", None),
    "append": (append, "log", b"1234", b"12345678"),
    "truncate": (lambda store: store.truncate("log", 2), "log", b"1234", b"12"),
}


def steps_of(do: Do, out: pathlib.Path, **options) -> list[str]:
    """What a write does to the disk, but for the removal of what lies aside."""
    disk = NumberedDisk()
    with locked(out, disk, **options) as store:
        disk.steps.clear()
        do(store)
    steps = []
    for step in disk.steps:
        operation, folder, name = re.split("[ /]", step)
        steps.append(f"{operation} {'aside' if folder == 'tmp' else name}")
    return [step for step in steps if step != "unlink aside"]


def said_by_nobody(out: pathlib.Path, *calls: str) -> list[str]:
    """What calls of a store say without the rights of root, who may do anything."""
    script = (
        "import os, pathlib, sys\n"
        "from jaxpaged.storage.local_store import LocalStore\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "store = LocalStore(pathlib.Path(sys.argv[1]), private='_jaxpaged')\n"
        "for call in sys.argv[2:]:\n"
        "    try: print(eval(call))\n"
        "    except Exception as error: print(f'{type(error).__name__}: {error}')\n"
    )
    reachable(out)
    command = [sys.executable, "-c", script, str(out), *calls]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("write", "steps"),
    [
        ("create", ["write aside", "sync aside", "link name", "sync sub"]),
        ("replace", ["write aside", "sync aside", "rename file", "sync out"]),
        ("publish", ["sync aside", "rename name", "sync sub"]),
        ("copy", ["link aside", "sync aside", "rename name", "sync sub"]),
        ("copy over", ["link aside", "sync aside", "rename log", "sync out"]),
        ("delete", ["unlink file", "sync out"]),
        ("append", ["append log", "sync log"]),
        ("truncate", ["truncate log", "sync log"]),
    ],
)
def test_bytes_are_on_the_disk_before_their_name_and_that_before_it_returns(out, write, steps):
    prepare(out)
    folder = ["make_folder sub", "sync out"] if steps[-1] == "sync sub" else []

    assert steps_of(WRITES[write][0], out) == folder + steps


@pytest.mark.parametrize("write", WRITES)
def test_what_need_only_survive_the_process_is_not_flushed(out, write):
    prepare(out)

    steps = steps_of(WRITES[write][0], out, durability="process")

    assert steps
    assert not any(step.startswith("sync") for step in steps)


def test_a_new_log_is_on_the_disk_with_its_name(out):
    steps = steps_of(lambda store: store.append("journal/0", b"1"), out)

    assert steps == ["make_folder journal", "sync out", "append 0", "sync 0", "sync journal"]


def test_a_new_folder_is_on_the_disk_with_all_the_names_above_it(tmp_path):
    disk = NumberedDisk()
    with locked(tmp_path / "new" / "out", disk) as store:
        store.create("a/b/name", b"")

    synced = {step.rpartition("/")[2] for step in disk.steps if step.startswith("sync")}
    assert {tmp_path.name, "new", "out", "a", "b"} <= synced


def test_a_name_that_is_there_already_is_on_the_disk_too(out):
    # The process that made it may have ended before it flushed the folder.
    prepare(out)
    (out / "name").write_bytes(b"new")

    steps = steps_of(lambda store: store.create("name", b"new"), out)

    assert steps[-1] == "sync out"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_fails_at_any_step_shows_nothing_half_done(tmp_path, write, code):
    do, name, old, new = WRITES[write]
    prepare(tmp_path / "0")
    disk = NumberedDisk()
    with locked(tmp_path / "0", disk) as store:
        first = len(disk.steps) + 1
        do(store)
    last = len(disk.steps)
    assert last > first

    for step in range(first, last + 1):
        out = tmp_path / str(step)
        prepare(out)
        with locked(out, FailingDisk(step, code, lasts=False)) as store:
            message = rf"^cannot write to {out}.*: {os.strerror(code)}; finished parts are kept, .*"
            with pytest.raises(StorageError, match=message):
                do(store)
            seen = store.read(name)
            assert seen in (old, new) or (write == "append" and seen == b"123456")

            assert do(store) is not False
            assert store.read(name) == new
            for other, data in (("file", b"old"), ("log", b"1234")):
                assert other == name or store.read(other) == data


@pytest.mark.parametrize("step", range(1, 6))
def test_after_a_failed_create_other_bytes_are_still_refused(out, step):
    prepare(out)
    disk = NumberedDisk()
    with locked(out, disk):
        first = len(disk.steps)
    with locked(out, FailingDisk(first + step, errno.EIO, lasts=False)) as store:
        with pytest.raises(StorageError, match="Input/output error"):
            store.create("name", b"first")
        is_there = store.read("name") is not None

        assert store.create("name", b"other") is not is_there

        assert store.read("name") == (b"first" if is_there else b"other")


def test_sweeping_takes_a_second_link_and_not_the_file(out):
    with locked(out) as store:
        store.create("name", b"bytes")
        (out / "_jaxpaged" / "tmp" / "left").hardlink_to(out / "name")
        store.scratch("part").write_bytes(b"half")

        store.sweep()

        assert list((out / "_jaxpaged" / "tmp").iterdir()) == []
        assert store.read("name") == b"bytes"


def test_a_folder_that_vanished_is_a_message(out):
    with locked(out) as store:
        (out / "_jaxpaged" / "tmp").rmdir()

        store.sweep()
        with pytest.raises(StorageError, match=r"cannot write to .*: No such file or directory;"):
            store.replace("name", b"new")


def test_one_process_at_a_time_is_the_writer(out):
    store = LocalStore(out, private="_jaxpaged")
    assert store.is_locked() is False
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert store.is_locked() is True
        assert not store.lock()
        other.kill()

    assert store.is_locked() is False
    assert store.lock()
    assert not LocalStore(out, private="_jaxpaged").lock()
    store.unlock()
    assert store.is_locked() is False


def test_links_are_entries_wherever_they_lead(out):
    with locked(out) as store:
        store.replace("folder/file", b"12345")
        (out / "to-file").symlink_to("folder/file")
        (out / "to-folder").symlink_to("folder")
        (out / "to-nothing").symlink_to("gone")

        found = store.entries()

    assert found["to-file"] == 5
    assert found["to-folder"] is None
    assert found["to-nothing"] == len("gone")


def test_a_read_only_folder_is_one_message(out):
    prepare(out)
    folders = [out / "_jaxpaged" / "tmp", out / "_jaxpaged", out]
    for folder in folders:
        folder.chmod(0o555)

    names, file, is_locked, lock, replace = said_by_nobody(
        out,
        "sorted(store.entries())",
        "store.read('file')",
        "store.is_locked()",
        "store.lock()",
        "store.replace('file', b'new')",
    )

    assert (names, file, is_locked) == ("['_jaxpaged', 'file', 'log']", "b'old'", "False")
    assert lock == f"ConfigError: output.path: cannot write to {out}: Permission denied"
    assert replace.startswith(f"StorageError: cannot write to {out}/")
    assert ": Permission denied; finished parts are kept, " in replace
    for folder in folders:
        folder.chmod(0o755)


def test_what_cannot_be_read_is_one_message(out):
    prepare(out)
    (out / "file").chmod(0)

    said = said_by_nobody(out, "store.read('file')", "store.open('file')")

    assert said == 2 * [
        f"StorageError: cannot read {out}/file: Permission denied; make it readable and run the "
        "command again"
    ]


def test_a_place_that_can_be_no_folder_is_a_config_error(out):
    out.write_bytes(b"a file")

    with pytest.raises(ConfigError, match=r"output.path: cannot write to .*: (Not a|File exists)"):
        LocalStore(out, private="_jaxpaged").lock()
    with pytest.raises(OutputConflictError, match=r"output.path: .* is a file; choose a folder"):
        LocalStore(out, private="_jaxpaged").entries()
    with pytest.raises(ConfigError, match=r"output.path: .* lies below a file"):
        LocalStore(out / "below", private="_jaxpaged").entries()
