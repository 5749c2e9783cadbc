"""Serves HTTP while models are downloaded: that may take minutes, and probes and Prometheus send requests meanwhile.

/livez is 200, /readyz 503 with the downloaded bytes, /metrics has the supervisor's metrics, and all other paths are
503. The server is a thread of the supervisor, on the sockets that the HTTP processes get afterwards. It starts only if
reading the models takes longer than a moment. A connection carries one request.
"""

from __future__ import annotations

import asyncio
import http
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import orjson

from embert.server.config import ServeConfig
from embert.server.http.auth import Keys
from embert.server.http.errors import ErrorFormat, ServerError, Unavailable
from embert.server.http.request_head import scrape_form
from embert.server.http.response import error_body
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.scraping import exposition

log = logging.getLogger(__name__)

PATIENCE_S = 0.3  # local models are read within that
LOG_INTERVAL_S = 10.0
REQUEST_S = 5.0  # limit for a request and its response
MAX_CONNECTIONS = 256
_HEAD_BYTES = 65_536
_PROBES = frozenset({"/livez", "/readyz", "/health", "/ping"})


@dataclass
class Downloads:
    """Progress of each model's download, which download threads write."""

    names: Sequence[str]  # of the models
    _bytes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, name: str, done: int, total: int) -> None:
        """Sets the downloaded bytes of a model, and the known total."""
        self._bytes[name] = done, total

    def __str__(self) -> str:
        parts = [f"{name}, {done / 1e6:.0f} of {total / 1e6:.0f} MB" for name, (done, total) in self._bytes.items()]
        return f"downloading {'; '.join(parts)}" if parts else "reading the models"


@contextmanager
def waiting_server(
    config: ServeConfig,
    context: ssl.SSLContext | None,
    sockets: Sequence[socket.socket],
    metrics_socket: socket.socket | None,
    downloads: Downloads,
    memory: MetricMemory,
) -> Iterator[None]:
    """Serves until the end of the context; the sockets stay open after it. Raises ConfigError for keys."""
    keyless = _PROBES | {"/metrics"} if "metrics" in config.keyless else _PROBES
    server = _WaitingServer(Keys(config, keyless), downloads, memory)
    ended = threading.Event()

    def run() -> None:
        if not ended.wait(PATIENCE_S):
            asyncio.run(server.serve(sockets, context, metrics_socket, ended))

    thread = threading.Thread(target=run, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass
class _WaitingServer:
    keys: Keys
    downloads: Downloads
    memory: MetricMemory
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(
        self,
        sockets: Sequence[socket.socket],
        context: ssl.SSLContext | None,
        metrics_socket: socket.socket | None,
        ended: threading.Event,
    ) -> None:
        """Serves until `ended`. Clients that are not accepted by then stay in the sockets' backlogs."""
        loop = asyncio.get_running_loop()
        listening = [(sock, context, False) for sock in sockets]
        if metrics_socket is not None:
            listening.append((metrics_socket, None, True))
        for sock, tls, only_metrics in listening:
            sock.setblocking(False)
            loop.add_reader(sock, partial(self._accept, sock, tls, only_metrics=only_metrics))
        while not await loop.run_in_executor(None, ended.wait, LOG_INTERVAL_S):
            log.info("%s", self.downloads)
        for sock, *_ in listening:
            loop.remove_reader(sock)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    def _accept(self, sock: socket.socket, context: ssl.SSLContext | None, *, only_metrics: bool) -> None:
        """Accepts a client. It is in `_tasks` from then on, so the end of `serve` waits for its response."""
        try:
            connection, _ = sock.accept()
        except OSError as error:  # the client has left, or too many files are open
            log.debug("no connection accepted: %s", error)
            return
        if len(self._tasks) >= MAX_CONNECTIONS:
            connection.close()
            return
        task = asyncio.create_task(self._handle(connection, context, only_metrics=only_metrics))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, connection: socket.socket, context: ssl.SSLContext | None, *, only_metrics: bool) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        # The client may leave, be too slow, or not speak HTTP.
        disconnects = suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with disconnects, ExitStack() as closing:
            async with asyncio.timeout(REQUEST_S):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
                closing.callback(transport.close)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._respond(head, only_metrics=only_metrics))
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
                while await reader.read(_HEAD_BYTES):  # a body; closing before it is read would reset the connection
                    pass

    def _respond(self, head: bytes, *, only_metrics: bool) -> bytes:
        """Returns the whole response. Raises ValueError for an invalid request head."""
        first, *lines = head.split(b"\r\n")[:-2]
        method, target, _ = first.decode("ascii").split(" ")
        pairs = [line.partition(b":") for line in lines]
        headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
        path = target.partition("?")[0]
        status, body, more = 404, b"only GET /metrics is here\n", [(b"content-type", b"text/plain")]
        if path == "/metrics" or not only_metrics:
            status, body, more = self._route(method, path, headers, only_metrics=only_metrics)
        fields = [*more, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        response = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()
        response += b"".join(b"%b: %b\r\n" % field for field in fields)
        return response + b"\r\n" + (b"" if method == "HEAD" else body)

    def _route(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], *, only_metrics: bool
    ) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
        """Returns status, body and headers. The port that has only metrics needs no key."""
        what, json = str(self.downloads), [(b"content-type", b"application/json")]
        try:
            if not only_metrics:
                self.keys.check({"path": path, "method": method, "headers": headers})
            if method in ("GET", "HEAD"):
                if path == "/livez":
                    return 200, orjson.dumps({"status": "ok", "detail": what}), json
                if path.startswith("/readyz"):
                    models = dict.fromkeys(self.downloads.names, "loading")
                    return 503, orjson.dumps({"status": "loading", "detail": what, "models": models}), json
                if path in _PROBES:
                    return 503, orjson.dumps({"status": what, "last_success_age_s": None}), json
                if path == "/metrics":
                    metrics = exposition(self.memory, scrape_form(headers))
                    return 200, metrics.body, list(metrics.headers)
            raise Unavailable(f"the server is starting ({what})", retry_after_s=2)
        except ServerError as error:
            error_format = ErrorFormat.OPENAI if path.startswith("/v1/") else ErrorFormat.TEI
            retry = [(b"retry-after", b"%d" % error.retry_after_s)] if error.retry_after_s else []
            return error.status, error_body(error, error_format), [*json, *retry]
