"""API keys: who may ask for more than the probes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
from typing import NoReturn

from starlette.types import Scope

from embert.server.config import ConfigError, ServeConfig, read_api_keys
from embert.server.http.errors import Unauthorized

__all__ = ["KEYLESS", "Keys"]

log = logging.getLogger(__name__)

_DOCS_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
# --keyless → GET routes that want no key.
KEYLESS = {
    "probes": frozenset({"/health", "/ping", "/livez", "/readyz"}),
    "page": frozenset({"/"}),  # which asks for a key itself
    "metrics": frozenset({"/metrics"}),
    "docs": frozenset({"/docs", "/openapi.json", *(f"/static-offline-docs/{name}" for name in _DOCS_FILES)}),
    "none": frozenset[str](),
}
FOLLOW_INTERVAL_S = 1.0


class Keys:
    """The accepted keys; as digests, so that comparing takes the same time for every key given."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError when --api-key-file cannot be used."""
        self._config = config
        self._open = frozenset[str]().union(*(KEYLESS[group] for group in config.keyless))
        self._seen = self._stamp()
        self._digests = self._read()

    def check(self, scope: Scope) -> None:
        """Raise Unauthorized unless the request carries one of the keys, or none is wanted."""
        if not self._digests or (scope["path"] in self._open and scope["method"] in ("GET", "HEAD")):
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        if scheme.lower() != b"bearer" or not any(matches):
            wrong = "is wrong" if given else "is missing"
            raise Unauthorized(f"the API key {wrong}; send it as `Authorization: Bearer KEY`")

    def refresh(self) -> None:
        """Read --api-key-file again if it has changed. One that cannot be used leaves the keys as they were."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._digests = self._read()
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)  # noqa: TRY400 - the sentence says it all
        else:
            log.info("--api-key-file has changed; keys accepted now: %d", len(self._digests))

    async def follow(self) -> NoReturn:
        """Refresh for ever."""
        while True:
            await asyncio.sleep(FOLLOW_INTERVAL_S)
            self.refresh()

    def _read(self) -> list[bytes]:
        return [_digest(key.encode()) for key in read_api_keys(self._config)]

    def _stamp(self) -> tuple[int, ...] | None:
        """What changes with the file's content; None where there is no file."""
        if self._config.api_key_file is None:
            return None
        try:
            found = os.stat(self._config.api_key_file)  # noqa: PTH116 - every second, on the event loop
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
