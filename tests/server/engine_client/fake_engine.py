"""An engine whose ends of the sockets a test holds, and routers that know of it."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from embert.engine import Encoded
from embert.server.config import ModelConfig
from embert.server.engine_client.router import Answer, Router
from embert.server.http.request_head import RequestOptions
from embert.server.ipc.channel import (
    Channel,
    EncodeRequest,
    EngineStatus,
    PartialResult,
    Results,
    TaskRows,
    address,
    decode_submit,
    encode,
)
from embert.server.ipc.control import EngineState, ModelInfo, ModelState, StartModel
from embert.server.ipc.shared_counters import SharedCounters

INFO = ModelInfo("test", "cpu", "a test", "float32", "", 1024, 2, 2, 0.0, 0.1, 0.3)
READY = ModelState("ready", "", INFO)
LOADING, FAILED = ModelState("loading", "weights"), ModelState("failed", "no room")


class FakeEngine:
    """One start of an engine: takes requests, and answers what it is told to."""

    def __init__(self, folder: Path, name: str, index: int = 0) -> None:
        self.index = index
        self.endpoint = f"{folder}/{name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address(self.endpoint))
        self._listener.listen()
        self._listener.setblocking(False)
        self.channel: Channel | None = None
        self._requests: list[EncodeRequest] = []

    def ready(self, **models: ModelState) -> EngineState:
        """What the supervisor says of it; `models` by name."""
        states = {"ab".index(name): state for name, state in models.items()} or {0: READY}
        return EngineState(self.index, "ready", "", self.endpoint, states)

    async def accept(self, *, greets: bool = True, last_success: float = 0.0) -> None:
        sock, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(self._listener), 5)
        self.disconnect()
        self.channel = Channel(sock)
        if greets:
            self.channel.send(encode(Results(EngineStatus(self.index, last_success, 0, [0.0, 0.0]), [])))

    def disconnect(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    async def request(self) -> EncodeRequest:
        if self.channel is None:
            await self.accept()
        assert self.channel is not None
        deadline = time.monotonic() + 5
        while not self._requests:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)
            self._requests += [each for message in self.channel.receive() for each in decode_submit(message).requests]
        return self._requests.pop(0)

    def answer(self, request: int, first: int, rows: list[list[float]]) -> None:
        vectors = np.array(rows, np.float32).tobytes()
        part = PartialResult(request, first, len(rows), [TaskRows(1, vectors)], 0.0, 0.0)
        assert self.channel is not None
        self.channel.send(encode(Results(EngineStatus(self.index, 0.0, 0, [0.0, 0.0]), [part])))

    def close(self) -> None:
        self._listener.close()
        self.disconnect()


async def never_leaves() -> None:
    await asyncio.sleep(3600)


def in_a_minute() -> RequestOptions:
    return RequestOptions(60.0, "--request-timeout", time.monotonic() + 60.0)


def one_text() -> Encoded:
    return Encoded(np.array([1], np.int32), np.array([1], np.int32), 0)


def three_texts() -> Encoded:
    return Encoded(np.array([1, 2, 3], np.int32), np.array([1, 1, 1], np.int32), 0)


def models_of(*names: str, **options: Any) -> list[StartModel]:
    return [StartModel(number, ModelConfig(**options), "", name) for number, name in enumerate(names)]


def ask(router: Router, texts: Encoded, model: int = 0) -> asyncio.Future[Answer]:
    return asyncio.ensure_future(router.encode(texts, never_leaves, in_a_minute(), model=model))


def router_and_engine(folder: Path, **options: Any) -> tuple[Router, FakeEngine]:
    """A router, and the engine of which it knows that it is ready."""
    router, engine = Router(models_of("a", **options), SharedCounters.create(1, 1), 0), FakeEngine(folder, "engine")
    router.engine_changed(engine.ready())
    return router, engine


async def connected(router: Router, *models: int) -> None:
    """Once these models would get requests."""
    deadline = time.monotonic() + 5
    while not all(map(router.connected, models)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
