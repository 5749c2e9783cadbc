"""An engine whose ends of the sockets a test holds, and routers that know of it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from embert.engine import Encoded
from embert.server.config import ModelConfig
from embert.server.engine_client.router import EncodeResult, Router
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

FoundT = TypeVar("FoundT")

INFO = ModelInfo("test", "cpu", "a test", "float32", "", 1024, 2, 2, 0.0, 0.1, 0.3)
READY = ModelState("ready", "", INFO)
LOADING, FAILED = ModelState("loading", "weights"), ModelState("failed", "out of memory")


class FakeEngine:
    """One start of an engine: takes requests, and sends the results that the test sets."""

    def __init__(self, folder: Path, name: str, index: int = 0) -> None:
        self.index = index
        self.endpoint = f"{folder}/{name}"
        self.channel: Channel | None = None
        self._requests: list[EncodeRequest] = []
        self._cancelled: list[int] = []
        self.listen()

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address(self.endpoint))
        self._listener.listen()
        self._listener.setblocking(False)

    def ready(self, **models: ModelState) -> EngineState:
        """State as the supervisor reports it; `models` by name."""
        states = {"ab".index(name): state for name, state in models.items()} or {0: READY}
        return EngineState(self.index, "ready", "", self.endpoint, states)

    async def accept(self, *, greets: bool = True, last_success: float = 0.0) -> None:
        sock, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(self._listener), 120)
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
        return await self._next(self._requests)

    async def cancelled(self) -> int:
        """Id of the next request that is cancelled."""
        return await self._next(self._cancelled)

    async def _next(self, found: list[FoundT]) -> FoundT:
        def received() -> bool:
            assert self.channel is not None
            for submit in map(decode_submit, self.channel.receive()):
                self._requests += submit.requests
                self._cancelled += submit.cancelled
            return bool(found)

        await until(received)
        return found.pop(0)

    def send_rows(self, request: int, first: int, rows: list[list[float]]) -> None:
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


def ask(router: Router, texts: Encoded, model: int = 0) -> asyncio.Future[EncodeResult]:
    return asyncio.ensure_future(router.encode(texts, never_leaves, in_a_minute(), model=model))


class Scene:
    """Routers and engines of one test, which are closed after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._routers: list[Router] = []
        self._engines: list[FakeEngine] = []

    def router(self, *models: str, engines: int = 1, counters: SharedCounters | None = None, **options: Any) -> Router:
        """A router of these models, which knows of no engine yet."""
        counters = counters or SharedCounters.create(1, engines, len(models))
        self._routers.append(Router(models_of(*models, **options), counters, 0))
        return self._routers[-1]

    def engine(self, index: int = 0) -> FakeEngine:
        """Another start of the engine with this index."""
        self._engines.append(FakeEngine(self._folder, f"engine.{len(self._engines)}", index))
        return self._engines[-1]

    def ready(self, **options: Any) -> tuple[Router, FakeEngine]:
        """A router, and the engine of which it knows that it is ready."""
        router, engine = self.router("a", **options), self.engine()
        router.engine_changed(engine.ready())
        return router, engine

    async def close(self) -> None:
        for router in self._routers:
            await router.close()
        for engine in self._engines:
            engine.close()


P = ParamSpec("P")


def scene(test: Callable[Concatenate[Scene, P], Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test in an event loop, with a Scene."""

    @functools.wraps(test)
    def run(tmp_path: Path, *args: P.args, **kwargs: P.kwargs) -> None:
        async def play() -> None:
            stage = Scene(tmp_path)
            try:
                await test(stage, *args, **kwargs)
            finally:
                await stage.close()

        asyncio.run(play())

    signature = inspect.signature(test)
    first, *others = signature.parameters.values()
    run.__signature__ = signature.replace(parameters=[first.replace(name="tmp_path"), *others])  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], object]) -> None:
    """Until it is true. AssertionError after 30 s of pauses."""
    for _ in range(15_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{condition} did not come true")


async def connected(router: Router, *models: int) -> None:
    """Once these models would get requests."""
    await until(lambda: all(map(router.connected, models)))
