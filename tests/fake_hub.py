"""A Hugging Face hub on this machine: the few answers that downloading a snapshot asks for.

with FakeHub() as hub:
    hub.commit("org/name", {"config.json": b"{}"})
    ... hub.endpoint, hub.requests
"""

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any

_SMALL = 1024


class FakeHub:
    """Serves repositories from memory, as long as it is entered.

    Attributes:
        endpoint: Its address.
        requests: The paths that were asked for.
        headers: What came with the last request.
        wrong: Names of files whose bytes are changed on their way.
        status: Of every answer, where that is not 200.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.wrong: set[str] = set()
        self.status: int | None = None
        self._commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self._branches: dict[tuple[str, str], str] = {}
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeHub":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def commit(self, repository: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Makes a commit of these files and puts a branch there; returns its hash."""
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        commit = hashlib.sha1(content).hexdigest()
        self._commits[repository, commit] = dict(files)
        self._branches[repository, branch] = commit
        return commit

    def served(self, kind: str) -> list[str]:
        """The files of a kind of request: "resolve" for contents."""
        found = (re.fullmatch(rf".*/{kind}/[^/]+/(.+)", path) for path in self.requests)
        return [match[1] for match in found if match]

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        self.headers = dict(request.headers)
        if self.status is not None:
            self._send(request, self.status, b"{}", {})
            return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        if match:
            repository, kind, revision = match.groups()
            self._list(request, repository, kind, revision)
            return
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match:
            self._content(request, *match.groups())
            return
        self._send(request, 404, b"", {})

    def _find(self, repository: str, revision: str) -> str | None:
        revision = urllib.parse.unquote(revision)
        commit = self._branches.get((repository, revision), revision)
        return commit if (repository, commit) in self._commits else None

    def _list(self, request: Any, repository: str, kind: str, revision: str) -> None:  # noqa: ANN401
        commit = self._find(repository, revision)
        if commit is None:
            is_known = any(name == repository for name, _ in self._commits)
            code = "RevisionNotFound" if is_known else "RepoNotFound"
            self._send(request, 404, b"{}", {"X-Error-Code": code})
            return
        files = self._commits[repository, commit]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            answer: object = {"id": repository, "sha": commit, "siblings": siblings}
        else:
            answer = [_entry(name, data) for name, data in files.items()]
        self._send(request, 200, json.dumps(answer).encode(), {})

    def _content(self, request: Any, repository: str, revision: str, name: str) -> None:  # noqa: ANN401
        commit = self._find(repository, revision)
        data = self._commits.get((repository, commit or ""), {}).get(name)
        if data is None:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": str(commit), "ETag": f'"{_etag(data)}"'}
        if len(data) > _SMALL:
            headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(data))}
        if name in self.wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._send(request, 200, data, headers)

    def _send(
        self,
        request: Any,  # noqa: ANN401
        status: int,
        content: bytes,
        headers: Mapping[str, str],
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": name,
        "size": len(data),
        "oid": _git_digest(data),
    }
    if len(data) > _SMALL:
        entry["lfs"] = {"oid": _etag(data), "size": len(data), "pointerSize": 100}
    return entry


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if len(data) > _SMALL else _git_digest(data)


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
