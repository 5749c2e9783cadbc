"""Clients that send requests without pause, or wait for one response, while a test changes the server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np

from tests.server.live import Live, Samples, until
from tests.server.stand_in import SLEEP, expected

GOOD = [101, 7592, 102]
PATIENCE_S = 120.0  # no client may wait longer than this, whatever happens


@dataclass
class Crowd:
    """Clients that request known vectors without pause, and the outcomes."""

    server: Live
    clients: int = 6
    responses: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Crowd:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S + 10)
        assert not self._thread.is_alive(), "a client hangs"
        assert self.slowest_s < PATIENCE_S
        assert self.wrong == 0

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=PATIENCE_S) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(self.clients)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            sequences = [[101, 1000 + number, 2000 + turn % 500 + text, 102] for text in range(1 + number % 4)]
            began = time.perf_counter()
            try:
                response = await http.post("/embed", json={"inputs": sequences})
            except httpx.TransportError as error:
                self.responses[type(error).__name__] += 1
                await asyncio.sleep(0.05)
                continue
            finally:
                self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
            self.responses[str(response.status_code)] += 1
            if response.status_code == 200:
                wanted = np.stack([expected(ids) for ids in sequences])
                self.wrong += not np.allclose(np.array(response.json()), wanted, atol=1e-5)
            else:
                assert response.headers["retry-after"]
                await asyncio.sleep(0.05)

    def wait_for(self, more: int, kind: str = "200") -> None:
        """Wait until `more` responses of a kind have arrived."""
        before = self.responses[kind]
        until(lambda: self.responses[kind] >= before + more, what=f"{more} more responses {kind}")


def published(server: Live) -> Samples:
    """Metrics with the batches of all responses so far, and of one more text: an engine writes them later."""
    asked, before = time.time(), server.metrics()["embert_batch_texts_sum"]
    until(lambda: server.post("/embed", {"inputs": [[101, 7592, 102]]}).status_code == 200, what="a response")

    def newest() -> Samples | None:
        metrics = server.metrics()
        is_newest = metrics["embert_engine_last_success_timestamp_seconds"] >= asked
        return metrics if is_newest and metrics["embert_batch_texts_sum"] > before else None

    metrics = until(newest, what="the metrics of the engine")
    assert metrics is not None
    return metrics


def use_both_engines(server: Live) -> None:
    """Wait until each of two engines has run a batch: an HTTP process may not have reached both before."""

    def batches() -> list[float]:
        metrics = server.metrics()
        return [metrics.get(f'embert_batches_total{{engine="{index}"}}') for index in range(2)]

    def both_ran() -> bool:
        list(pool.map(lambda _: server.post("/embed", {"inputs": [[101, SLEEP + 1, 102]]}), range(2)))
        return all(now > then for now, then in zip(batches(), before, strict=True))

    before = batches()
    with ThreadPoolExecutor(2) as pool:
        until(both_ran, what="work of both engines")


def post(server: Live, ids: list[list[int]], into: list[httpx.Response]) -> threading.Thread:
    """Send a request from a separate thread. The server may end without a response."""

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            into.append(server.post("/embed", {"inputs": ids}))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def right(server: Live, ids: list[int] = GOOD, path: str = "/embed") -> bool:
    """True if a request gets the right vector."""
    response = server.post(path, {"inputs": [ids]})
    return response.status_code == 200 and bool(np.allclose(response.json(), [expected(ids)], atol=1e-5))
