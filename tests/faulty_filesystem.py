"""An object store in memory that fails when and as it is told to."""

import contextlib
import datetime
import io
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from botocore.exceptions import ClientError
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from s3fs.errors import translate_boto_error

_Result = TypeVar("_Result")


def answer(status: int, code: str, message: str = "the server said so") -> Exception:
    """The error that s3fs makes of a server's answer."""
    return translate_boto_error(
        ClientError(
            {
                "Error": {"Code": code, "Message": message},
                "ResponseMetadata": {"HTTPStatusCode": status},
            },
            "Operation",
        )
    )


class FaultyFilesystem(MemoryFileSystem):
    """Whole objects, each call one step, and its own memory.

    Args:
        conditions: What it does with a conditional write.

    Attributes:
        calls: The names of the calls so far, those that failed among them.
    """

    cachable = False

    def __init__(self, conditions: Literal["obeyed", "ignored", "unsupported"] = "obeyed") -> None:
        super().__init__()
        self.store: dict[str, MemoryFile] = {}
        self.pseudo_dirs = [""]
        self.calls: list[str] = []
        self._conditions = conditions
        self._faults: dict[str, list[tuple[Exception, bool]]] = {}
        self._always: dict[str, Exception] = {}
        self._lock = threading.RLock()

    def fail(
        self, call: str, error: Exception, times: int = 1, *, after: Literal["no effect", "effect"]
    ) -> None:
        """Has the next calls fail, before or after they had their effect."""
        self._faults.setdefault(call, []).extend([(error, after == "effect")] * times)

    def fail_always(self, call: str, error: Exception) -> None:
        """Has every call fail, without effect."""
        self._always[call] = error

    def mend(self) -> None:
        """Has no call fail any more."""
        self._faults.clear()
        self._always.clear()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        def put() -> None:
            if mode == "create" and self._conditions == "unsupported":
                raise answer(501, "NotImplemented")
            key = self._strip_protocol(path)
            if mode == "create" and self._conditions == "obeyed" and key in self.store:
                raise FileExistsError(path)
            self.store[key] = MemoryFile(self, key, bytes(value))

        self._do("pipe_file", put)

    def put_file(
        self, lpath: str, rpath: str, callback: object = None, mode: str = "", **_: object
    ) -> None:
        with open(lpath, "rb") as file:  # noqa: PTH123  (fsspec passes text)
            data = file.read()
        key = self._strip_protocol(rpath)
        self._do("put_file", lambda: self.store.update({key: MemoryFile(self, key, data)}))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        cat = super().cat_file
        return self._do("cat_file", lambda: cat(path, start, end))

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        ls = super().ls
        return self._do("ls", lambda: ls(path, detail=detail))

    def rm_file(self, path: str) -> None:
        remove = super().rm_file
        return self._do("rm_file", lambda: remove(path))

    def cp_file(self, path1: str, path2: str, **_: object) -> None:
        copy = super().cp_file
        return self._do("cp_file", lambda: copy(path1, path2))

    def modified(self, path: str) -> datetime.datetime:
        modified = super().modified
        return self._do("modified", lambda: modified(path))

    def _open(self, path: str, *_: object, **__: object) -> "_OpenObject":
        return _OpenObject(self.cat_file(path), self)

    def _do(self, call: str, effect: Callable[[], _Result]) -> _Result:
        with self._lock:
            self.calls.append(call)
            if call in self._always:
                raise self._always[call]
            if not self._faults.get(call):
                return effect()
            error, has_effect = self._faults[call].pop(0)
            if has_effect:
                # Whatever the answer was, it is lost.
                with contextlib.suppress(OSError):
                    effect()
            raise error


class _OpenObject(io.BytesIO):
    """What was there when it was opened; each read may fail."""

    def __init__(self, data: bytes, filesystem: FaultyFilesystem) -> None:
        super().__init__(data)
        self.size = len(data)
        self._filesystem = filesystem

    def read(self, size: int | None = -1) -> bytes:
        read = super().read
        return self._filesystem._do("read", lambda: read(size))
