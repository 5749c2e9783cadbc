"""A replica of Ray Serve: an actor that starts `embert serve`, forwards requests to it and monitors it.

Batches, limits, errors, headers, and restarts of engines are those of the server, as without Ray.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import IO, Any

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from yarl import URL

from embert.ray.errors import ReplicaError
from embert.ray.gpus import assigned_device
from embert.server.config import ServeConfig, read_api_keys
from embert.server.frontend.routes import error_formats_by_path
from embert.server.http.errors import Unavailable
from embert.server.http.response import error_body

LOG_LINES = 20  # of the server's log, in the error of a start that fails
POLL_S = 0.05  # between two probes of readiness
PROBE_TIMEOUT_S = 10.0
LAST_RESPONSES_S = 0.2  # for the responses of a replica that ends
_ERROR_FORMATS = error_formats_by_path()
# Header fields that belong to one connection. Ray's proxies add the date and the request's id to every response.
_NOT_TO_SERVER = frozenset(
    {b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"te", b"transfer-encoding", b"upgrade"}
)
_NOT_TO_CLIENT = frozenset({b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding", b"x-request-id"})


class Replica:
    """Actor of Ray Serve, with one process tree of a server and one HTTP client."""

    _server: subprocess.Popen[bytes] | None = None
    _ending = False

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Starts the server and waits until it is ready. Raises ReplicaError, with the end of its log, if it ends."""
        began = time.monotonic()
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # max_ongoing_requests is the limit
            timeout=aiohttp.ClientTimeout(),  # the server's own limits end requests
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        keys = read_api_keys(config)
        self._probe = {"authorization": f"Bearer {keys[0].key}"} if keys else {}
        self._log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._url = f"http://127.0.0.1:{await asyncio.to_thread(self._start_server, config)}"
        while not await self._is_ready():
            self._check_running()
            await asyncio.sleep(POLL_S)
        self._ready_at = time.monotonic()
        self._start_s = self._ready_at - began

    async def __call__(self, request: Request) -> Response:
        """Forwards a request. Returns the server's response, or 503 if the connection breaks."""
        scope = request.scope
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in _without(scope["headers"], _NOT_TO_SERVER)
        ]
        body = await request.body() or None
        try:
            async with self._client.request(
                request.method, self._url_of(scope), headers=headers, data=body, allow_redirects=False
            ) as upstream:
                response = Response(await upstream.read(), upstream.status)
                response.raw_headers = _without(upstream.raw_headers, _NOT_TO_CLIENT)
                return response
        except aiohttp.ClientError as error:
            self._end_without_server()
            failure = Unavailable(f"the connection to this replica's server broke: {error}", retry_after_s=1)
            error_format = _ERROR_FORMATS[scope["path"].removeprefix(scope["root_path"])]
            return Response(error_body(failure, error_format), 503, {"retry-after": "1"}, media_type="application/json")

    async def check_health(self) -> None:
        """Ray Serve calls this, and replaces a replica if it raises a few times in a row.

        Raises ReplicaError once the server has ended, or if it is not ready for longer than its start took: until then
        it restarts an engine, which takes less time than a new replica.
        """
        self._check_running()
        now = time.monotonic()
        if await self._is_ready():
            self._ready_at = now
        elif now - self._ready_at > self._start_s:
            raise ReplicaError(f"the server has not been ready for {now - self._ready_at:.0f} s")

    async def __del__(self) -> None:
        """Ray Serve calls this after the last request. Shuts the server down gracefully."""
        await self._client.close()
        if self._server is not None:
            self._server.terminate()
            await asyncio.to_thread(self._server.wait)

    def _url_of(self, scope: Mapping[str, Any]) -> URL:
        """Returns the server's URL for a request, without the application's route prefix."""
        path = scope["raw_path"].decode("latin-1").removeprefix(scope["root_path"]) or "/"
        query = scope["query_string"].decode("latin-1")
        return URL(f"{self._url}{path}{'?' if query else ''}{query}", encoded=True)

    def _start_server(self, config: ServeConfig) -> int:
        """Starts the process, and returns its port. Raises ReplicaError."""
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "embert.ray.server_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # a signal to Ray's worker does not reach the server, which drains first
        )
        stdin, stdout, stderr = self._server.stdin, self._server.stdout, self._server.stderr
        assert stdin is not None  # noqa: S101 - a pipe, and so are the others
        assert stdout is not None  # noqa: S101
        assert stderr is not None  # noqa: S101
        self._relaying = threading.Thread(target=self._relay, args=(stderr,), name="embert-log", daemon=True)
        self._relaying.start()
        config = dataclasses.replace(config, device=assigned_device(config.device))
        stdin.write(msgspec.json.encode(config) + b"\n")
        stdin.flush()
        port = stdout.readline()
        if not port:
            self._server.wait()
            self._check_running()
        return int(port)

    def _end_without_server(self) -> None:
        """Ends this worker if its server has ended, once its pending requests have responses.

        Its responses are fast errors from now on, so Ray would prefer it until the health check fails.
        """
        try:
            self._check_running()
        except ReplicaError as error:
            if not self._ending:
                self._ending = True
                sys.stderr.write(f"{error}\nthis replica ends, too\n")
                asyncio.get_running_loop().call_later(LAST_RESPONSES_S, os._exit, 1)

    def _check_running(self) -> None:
        status = None if self._server is None else self._server.poll()
        if status is not None:
            self._relaying.join(1.0)
            raise ReplicaError("\n".join([f"the server ended with status {status}; its log ended with:", *self._log]))

    async def _is_ready(self) -> bool:
        timeout = aiohttp.ClientTimeout(PROBE_TIMEOUT_S)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._client.get(f"{self._url}/readyz", headers=self._probe, timeout=timeout) as response:
                status: int = response.status
                return status == 200
        return False

    def _relay(self, log: IO[bytes]) -> None:
        """Copies the server's log to this worker's, which Ray collects, and keeps the last lines."""
        for line in log:
            text = line.decode(errors="replace").rstrip()
            self._log.append(text)
            sys.stderr.write(f"{text}\n")


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in names]
