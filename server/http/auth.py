"""Checks API keys, and reads them again when their file changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path
from typing import NoReturn

from starlette.types import Scope

from embert.server.config import ConfigError, ServeConfig, read_api_keys
from embert.server.http.errors import Unauthorized

log = logging.getLogger(__name__)

FOLLOW_INTERVAL_S = 1.0

# A browser cannot send a key with a link.
_FOR_BROWSERS = (
    ". In a browser, open the page at / and type the key there: its button API lists the routes. A server with "
    "`--keyless docs` shows /docs without a key"
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
