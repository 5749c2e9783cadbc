"""Answers to Prometheus scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from embert.server.observability.metrics import exposition

__all__ = ["Scrapes"]


class Scrapes:
    """Answers the scrapes of one API process without blocking its event loop.

    Reading every process's file takes tens of milliseconds. One thread does it, once for all scrapes that wait.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        """`write` publishes the metrics of this process; it runs on the event loop."""
        self._write = write
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[tuple[bytes, str]] | None = None

    async def answer(self) -> tuple[bytes, str]:
        """The metrics of all processes as of now: (text, content type)."""
        if self._next is None:
            self._next = asyncio.create_task(self._collect())
        return await asyncio.shield(self._next)  # others may wait for it after this client has disconnected

    async def _collect(self) -> tuple[bytes, str]:
        async with self._lock:
            self._next = None  # a later scrape must see what happens from now on
            self._write()
            return await asyncio.get_running_loop().run_in_executor(self._thread, exposition)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
