"""Answers to Prometheus scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.scraping.exposition import Exposition, Form, exposition

__all__ = ["Scrapes"]


class Scrapes:
    """Answers the scrapes of one API process without blocking its event loop.

    Reading every process's file takes tens of milliseconds. One thread does it, once for all scrapes that wait for the
    same form.
    """

    def __init__(self, memory: MetricMemory, write: Callable[[], None]) -> None:
        """`write` publishes the metrics of this process; it runs on the event loop."""
        self._memory, self._write = memory, write
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._lock = asyncio.Lock()
        self._next: dict[Form, asyncio.Task[Exposition]] = {}

    async def answer(self, form: Form) -> Exposition:
        """The metrics of all processes as of now."""
        waiting = self._next.get(form)
        if waiting is None:
            waiting = self._next[form] = asyncio.create_task(self._collect(form))
        return await asyncio.shield(waiting)  # others may wait for it after this client has disconnected

    async def _collect(self, form: Form) -> Exposition:
        async with self._lock:
            del self._next[form]  # a later scrape must see what happens from now on
            self._write()
            return await asyncio.get_running_loop().run_in_executor(self._thread, exposition, self._memory, form)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
