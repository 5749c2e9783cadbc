"""API keys, and the middleware that asks for them."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from starlette.types import ASGIApp, Receive, Scope, Send

from embert.server.config import ConfigError, ServeConfig, read_api_keys
from embert.server.http.errors import ErrorFormats, ServerError, Unauthorized, Unavailable, send_error
from embert.server.http.held_bytes import HeldBytes
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.request_record import SCOPE_KEY

__all__ = ["AuthMiddleware", "Keys"]

log = logging.getLogger(__name__)

FOLLOW_INTERVAL_S = 1.0

# A browser cannot send a key with a link.
_FOR_BROWSERS = (
    ". In a browser, open the page at / and type the key there: its button API lists the routes. A server with "
    "`--keyless docs` shows /docs without a key"
)


class AuthMiddleware:
    """Checks the key, and hands the request to its route: one layer for both, as each costs every request."""

    def __init__(
        self,
        app: ASGIApp,
        hot: Mapping[str, ASGIApp],
        keys: Keys,
        probes: frozenset[str],
        error_formats: ErrorFormats,
        metrics: ApiMetrics,
        held: HeldBytes,
    ) -> None:
        """`hot` are the apps of POST routes that bypass FastAPI's own layers, `probes` the paths that always answer."""
        self._app, self._hot, self._keys, self._probes = app, hot, keys, probes
        self._error_formats, self._metrics, self._held = error_formats, metrics, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path: str = scope["path"]
        try:
            if self._keys.digests and (name := self._keys.check(scope)):
                scope[SCOPE_KEY].key = name
            if scope.get("state"):  # set by the protocol for this connection
                self._refuse_surplus(scope)
            app = self._hot.get(path) if scope["method"] == "POST" else None
            if app is None:  # whose answers are not counted before they are written
                app = self._app
                if self._held.is_full and path not in self._probes:
                    raise self._held.refusal("the answer", 0)
            await app(scope, receive, send)
        except ServerError as error:
            if isinstance(error, Unauthorized):
                self._metrics.rejected["unauthorized"].inc()
            await send_error(send, error, self._error_formats[path])

    def _refuse_surplus(self, scope: Scope) -> None:
        """Raise Unavailable for a request over a connection above the limit, unless it is a probe."""
        limit = scope["state"].get("too_many_connections")
        if limit is None or scope["path"] in self._probes:
            return
        self._metrics.rejected["connections"].inc()
        raise Unavailable(
            f"this server has more than {limit} connections, the limit (--max-connections)",
            retry_after_s=1,
            reason="connections",
        )


class Keys:
    """The accepted keys, kept as digests: comparing takes the same time for every key given."""

    def __init__(self, config: ServeConfig, open_paths: frozenset[str] = frozenset()) -> None:
        """`open_paths` need no key for GET. Raises ConfigError when --api-key-file cannot be used."""
        self._config = config
        self._open = open_paths
        self._seen = self._stamp()
        self.digests = self._read()  # of the keys, with their names; empty: no request needs one

    def check(self, scope: Scope) -> str:
        """The name of the key that the request carries; empty where it needs none. Raises Unauthorized otherwise."""
        if not self.digests or (scope["path"] in self._open and scope["method"] in ("GET", "HEAD")):
            return ""
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of two alike, the first counts
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if not scheme and (azures := headers.get(b"api-key")):
            scheme, key = b"bearer", azures
        digest = _digest(key.strip(b" \t"))
        # Compare with all keys: an early exit would leak timing.
        matches = [name for known, name in self.digests if hmac.compare_digest(digest, known)]
        if scheme.lower() != b"bearer" or not matches:
            wrong = "is wrong" if scheme or key else "is missing"
            hint = _FOR_BROWSERS if scope["path"] == "/docs" else ""
            raise Unauthorized(f"the API key {wrong}; send it as `Authorization: Bearer KEY`{hint}")
        return matches[0]

    def refresh(self, *, forced: bool = False) -> None:
        """Read --api-key-file again if it has changed. A file that cannot be used leaves the keys as they were."""
        stamp = self._stamp()
        if stamp is None or (stamp == self._seen and not forced):
            return
        self._seen = stamp
        try:
            self.digests = self._read()
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)  # noqa: TRY400 - the message is complete
        else:
            log.info("--api-key-file has been read again; keys accepted now: %d", len(self.digests))

    def follow(self) -> NoReturn:
        """Refresh periodically, for ever. For a thread: a file system that hangs would hold up the event loop."""
        while True:
            time.sleep(FOLLOW_INTERVAL_S)
            self.refresh()

    def _read(self) -> list[tuple[bytes, str]]:
        return [(_digest(api_key.key.encode()), api_key.name) for api_key in read_api_keys(self._config)]

    def _stamp(self) -> tuple[int, ...] | None:
        """A value that changes with the file; None where no file is configured."""
        if self._config.api_key_file is None:
            return None
        try:
            status = Path(self._config.api_key_file).stat()
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
