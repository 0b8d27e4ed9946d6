"""Stands between a job and an S3 server, and does to a request what a test tells it.

What reaches the job is what a network and a server can do to it: its own code, the libraries it
uses and their own retries all run as they are.
"""

import contextlib
import dataclasses
import email.utils
import http.client
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

_FOR_ONE_HOP = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})
_CHANGES = frozenset({"PUT", "POST", "DELETE"})
_PATIENCE = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class S3Request:
    """What was asked of the server.

    Attributes:
        method: As in PUT.
        target: Path and query.
        headers: By name in lower case.
        body: All of it.
    """

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        """The object's key, or what the keys begin with that are listed."""
        path, _, query = self.target.partition("?")
        key = urllib.parse.unquote(path).strip("/").partition("/")[2]
        prefix = urllib.parse.parse_qs(query).get("prefix", [""])[0]
        return key or prefix.rstrip("/")

    def __str__(self) -> str:
        return f"{self.method} {self.key}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class S3Answer:
    """What the server said."""

    status: int
    headers: dict[str, str]
    body: bytes


Server = Callable[[S3Request], S3Answer]
Trick = Callable[[S3Request, Server], S3Answer | None]
"""Answers in the server's place; None cuts the connection without an answer."""


def refused(status: int, code: str, message: str = "the server said so") -> Trick:
    """The server refuses, and nothing happens."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    kind = {"content-type": "application/xml"}
    return lambda request, server: S3Answer(status=status, headers=kind, body=body.encode())


def lost_request(request: S3Request, server: Server) -> None:
    """The connection breaks before the server hears anything."""


def lost_answer(request: S3Request, server: Server) -> None:
    """The connection breaks after the server did what was asked."""
    server(request)


def unconditional(request: S3Request, server: Server) -> S3Answer:
    """The server does not know conditions."""
    headers = {name: value for name, value in request.headers.items() if name != "if-none-match"}
    return server(dataclasses.replace(request, headers=headers))


def aged(seconds: float) -> Trick:
    """The object was written so much earlier."""

    def trick(request: S3Request, server: Server) -> S3Answer:
        answer = server(request)
        if written := answer.headers.get("last-modified"):
            moment = email.utils.parsedate_to_datetime(written).timestamp() - seconds
            answer.headers["last-modified"] = email.utils.formatdate(moment, usegmt=True)
        return answer

    return trick


class Held:
    """Keeps a request back until the test lets it go.

    Args:
        after: Whether it has its effect before that.
    """

    def __init__(self, *, after: Literal["no effect", "effect"]) -> None:
        self._is_done_first = after == "effect"
        self._has_come, self._may_go = threading.Event(), threading.Event()

    def __call__(self, request: S3Request, server: Server) -> S3Answer:
        early = server(request) if self._is_done_first else None
        self._has_come.set()
        assert self._may_go.wait(_PATIENCE), f"{request} was never let go"
        return early or server(request)

    def wait(self) -> None:
        """Waits until the request is there."""
        assert self._has_come.wait(_PATIENCE), "the request did not come"

    def let_go(self) -> None:
        """Lets the request have its way."""
        self._may_go.set()


class S3Proxy:
    """A server on the loopback interface.

    Args:
        target: The S3 server's endpoint.

    Attributes:
        target: The same.
        requests: All there were, in the order they came.
        on_change: Called with each request that changed something, before it is answered.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.requests: list[S3Request] = []
        self.on_change: Callable[[S3Request], object] = lambda request: None
        self._address = urllib.parse.urlsplit(target).netloc
        self._tricks: list[tuple[str, re.Pattern[str], list[Trick]]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02])
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def play(self, method: str, name: str, trick: Trick, *, times: int = 1_000_000) -> None:
        """Has requests go otherwise.

        Args:
            method: Of the requests.
            name: A regular expression for the end of their keys, from a "/" on.
            trick: What happens to them.
            times: So many requests; after that the next trick counts.
        """
        self._tricks.append((method, re.compile(rf"(.*/)?({name})"), [trick] * times))

    def mend(self) -> None:
        """Has every request go its way."""
        self._tricks.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: S3Request) -> S3Answer | None:
        with self._lock:
            self.requests.append(request)
            fitting = (
                tricks
                for method, name, tricks in self._tricks
                if tricks and method == request.method and name.fullmatch(request.key)
            )
            tricks = next(fitting, None)
            trick = tricks.pop() if tricks else None
        answer = trick(request, self._forward) if trick else self._forward(request)
        if request.method in _CHANGES:
            self.on_change(request)
        return answer

    def _forward(self, request: S3Request) -> S3Answer:
        connection = http.client.HTTPConnection(self._address)
        try:
            connection.request(request.method, request.target, request.body, request.headers)
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            # A HEAD tells the length of what it does not send.
            kept = _FOR_ONE_HOP - ({"content-length"} if request.method == "HEAD" else set())
            headers = {name: value for name, value in headers.items() if name not in kept}
            return S3Answer(status=answer.status, headers=headers, body=answer.read())
        finally:
            connection.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                # It is met already, or the body would not come.
                headers.pop("expect", None)
                assert "transfer-encoding" not in headers, "its length is not known"
                body = self.rfile.read(int(headers.get("content-length", "0")))
                request = S3Request(
                    method=self.command, target=self.path, headers=headers, body=body
                )
                answer = proxy.answer(request)
                if answer is None:
                    self.close_connection = True
                    return
                # Whoever asked may have been killed meanwhile.
                with contextlib.suppress(ConnectionError):
                    self._reply(answer)

            def _reply(self, answer: S3Answer) -> None:
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if self.command == "HEAD":
                    self.end_headers()
                    return
                self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

        return Handler
