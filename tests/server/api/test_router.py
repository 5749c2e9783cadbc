"""The API process's side of the engines; the test holds the engines' ends of the sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embert.engine import Encoded
from embert.server.api.engines.pending import Answer
from embert.server.api.engines.router import Router
from embert.server.api.input.request_options import RequestOptions
from embert.server.config import ModelConfig
from embert.server.http.errors import InferenceFailed, Unavailable
from embert.server.ipc.control import EngineState, ModelInfo, ModelState, StartModel
from embert.server.ipc.framing import Channel
from embert.server.ipc.messages import EncodeRequest, EngineStatus, Part, Results, TaskRows, decode_submit, encode
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
        self._listener.bind(self.endpoint)
        self._listener.listen()
        self._listener.setblocking(False)
        self.channel: Channel | None = None
        self._requests: list[EncodeRequest] = []

    def ready(self, **models: ModelState) -> EngineState:
        """What the supervisor says of it; `models` by name."""
        states = {"ab".index(name): state for name, state in models.items()} or {0: READY}
        return EngineState(self.index, "ready", "", self.endpoint, states)

    async def accept(self, *, greets: bool = True) -> None:
        sock, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(self._listener), 5)
        self.disconnect()
        self.channel = Channel(sock)
        if greets:
            self.channel.send(encode(Results(EngineStatus(self.index, 0.0, 0, [0.0, 0.0]), [])))

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
        part = Part(request, first, len(rows), [TaskRows(1, vectors)], 0.0, 0.0)
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


def test_parts_of_a_lost_engine_are_not_taken_for_its_successors(tmp_path: Path) -> None:
    """They may arrive after the request was sent again. Counted twice, they would complete it with unwritten rows."""

    async def run() -> None:
        router = Router(models_of("a"), SharedCounters.create(1, 1), 0)
        old, new = (FakeEngine(tmp_path, f"engine.{start}") for start in (1, 2))
        router.engine_changed(old.ready())
        answer = ask(router, three_texts())
        first = await old.request()
        router.engine_changed(EngineState(0, "down", "killed"))
        router.engine_changed(new.ready())
        again = await new.request()
        old.answer(first.id, 0, [[9.0, 9.0], [9.0, 9.0]])
        await asyncio.sleep(0.1)  # it has arrived
        new.answer(again.id, 0, [[1.0, 1.0]])
        await asyncio.sleep(0.1)
        complete = answer.done()
        new.answer(again.id, 1, [[2.0, 2.0], [3.0, 3.0]])
        vectors = (await asyncio.wait_for(answer, 5)).vectors.tolist()
        pending = router.pending
        await router.close()
        old.close()
        new.close()
        assert not complete
        assert vectors == [[1, 1], [2, 2], [3, 3]]
        assert pending == 0

    asyncio.run(run())


def test_a_request_that_took_its_time_leaves_nothing_behind(tmp_path: Path) -> None:
    """Garbage collections are rare here: a cycle would hold memory for minutes."""

    async def run() -> list[str]:
        router, engine = router_and_engine(tmp_path)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                answer = ask(router, three_texts())
                request = await engine.request()
                await asyncio.sleep(0.2)  # long enough for the sweep to watch its client
                engine.answer(request.id, 0, [[1.0, 1.0]] * 3)
                await asyncio.wait_for(answer, 5)
                del answer, request
            await asyncio.sleep(0.1)
            gc.collect()
            found = [type(each).__name__ for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        await router.close()
        engine.close()
        return found

    assert {"Answer", "PendingRequest", "ndarray"}.isdisjoint(asyncio.run(run()))


def test_a_connection_that_breaks_is_made_anew(tmp_path: Path) -> None:
    """Before the supervisor has said anything. What the engine owed is sent again, but not for ever."""

    async def run() -> None:
        router, engine = router_and_engine(tmp_path)
        answer = ask(router, three_texts())
        first = await engine.request()
        engine.answer(first.id, 0, [[9.0, 9.0]])
        assert engine.channel is not None
        engine.channel.send(b"no message")
        await engine.accept()
        again = await engine.request()
        engine.answer(again.id, 0, [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
        vectors = (await asyncio.wait_for(answer, 5)).vectors.tolist()
        assert vectors == [[1, 1], [2, 2], [3, 3]]
        lost = ask(router, three_texts())
        for _ in range(8):
            await engine.request()
            engine.disconnect()
            # An engine that takes connections and does not greet, as a dying one does, gets no requests.
            await engine.accept(greets=False)
            engine.disconnect()
            await engine.accept()
        with pytest.raises(Unavailable, match="lost 8 times"):
            await asyncio.wait_for(lost, 5)
        assert router.pending == 0
        await router.close()
        engine.close()

    asyncio.run(run())


def test_requests_wait_while_an_engine_that_is_ready_cannot_be_reached(tmp_path: Path) -> None:
    async def run() -> None:
        router = Router(models_of("a"), SharedCounters.create(1, 1), 0)
        router.engine_changed(EngineState(0, "ready", "", f"{tmp_path}/engine", {0: READY}))
        answer = ask(router, three_texts())
        await asyncio.sleep(0.1)
        assert not answer.done()
        engine = FakeEngine(tmp_path, "engine")
        request = await engine.request()
        engine.answer(request.id, 0, [[1.0, 1.0]] * 3)
        assert (await asyncio.wait_for(answer, 5)).vectors.shape == (3, 2)
        await router.close()
        engine.close()

    asyncio.run(run())


def test_a_message_larger_than_the_socket_arrives(tmp_path: Path) -> None:
    async def run() -> None:
        router, engine = router_and_engine(tmp_path, max_queue_tokens=10_000_000)
        many = Encoded(np.arange(1_000_000, dtype=np.int32), np.full(1000, 1000, np.int32), 0)
        answer = ask(router, many)
        request = await engine.request()
        assert np.array_equal(np.frombuffer(request.ids, np.int32), many.ids)
        engine.answer(request.id, 0, [[1.0, 1.0]] * 1000)
        assert (await asyncio.wait_for(answer, 5)).vectors.shape == (1000, 2)
        await router.close()
        engine.close()

    asyncio.run(run())


def test_what_an_engine_ran_when_it_was_lost_is_run_alone_and_then_failed(tmp_path: Path) -> None:
    """The shared counters say what ran. What waited is sent again as it was, as often as it takes."""

    async def run() -> None:
        counters = SharedCounters.create(1, 1)
        router = Router(models_of("a"), counters, 0)
        engines = [FakeEngine(tmp_path, f"engine.{start}") for start in range(6)]
        router.engine_changed(engines[0].ready())
        poison, neighbour, waiting = (ask(router, one_text()) for _ in range(3))
        asked = [await engines[0].request() for _ in range(3)]
        assert [request.alone for request in asked] == [False] * 3
        counters.set_running(0, 0, [request.id for request in asked[:2]])
        engines[0].close()
        for start, alone in ((1, [True, True, False]), (2, [True, False]), (3, [True, False]), (4, [True, False])):
            router.engine_changed(EngineState(0, "down", "killed"))
            router.engine_changed(engines[start].ready())
            asked = [await engines[start].request() for _ in alone]
            assert [request.alone for request in asked] == alone
            counters.set_running(0, 0, [asked[0].id] if start == 1 else [])
            engines[start].close()
        with pytest.raises(InferenceFailed, match="lost twice"):
            await asyncio.wait_for(poison, 5)
        router.engine_changed(EngineState(0, "down", "killed"))
        router.engine_changed(engines[5].ready())
        for _ in range(2):
            engines[5].answer((await engines[5].request()).id, 0, [[1.0, 1.0]])
        assert [len((await asyncio.wait_for(each, 5)).vectors) for each in (neighbour, waiting)] == [1, 1]
        assert router.pending == router.admissions[0].admitted_tokens == 0
        await router.close()
        engines[5].close()

    asyncio.run(run())


def test_what_was_never_sent_was_not_lost(tmp_path: Path) -> None:
    """Whether it waits for an engine, or for the next tick of the loop, when an engine is lost."""

    async def run() -> None:
        router = Router(models_of("a"), SharedCounters.create(1, 1), 0)
        answer = None
        for start in range(10):
            engine = FakeEngine(tmp_path, f"engine.{start}")
            router.engine_changed(engine.ready())
            await engine.accept()
            while not router._engines[0].status:
                await asyncio.sleep(0)
            if answer is None:
                answer = ask(router, one_text())
                await asyncio.sleep(0)
            # It is with this engine, but the tick that sends it has not come.
            (pending,) = router._pending.values()
            assert pending.engine == 0
            assert router._engines[0].unsent == [pending.message]
            engine.close()
            router.engine_changed(EngineState(0, "down", "killed"))
        engine = FakeEngine(tmp_path, "engine")
        router.engine_changed(engine.ready())
        engine.answer((await engine.request()).id, 0, [[1.0, 1.0]])
        assert answer is not None
        assert len((await asyncio.wait_for(answer, 5)).vectors) == 1
        await router.close()
        engine.close()

    asyncio.run(run())


def test_what_an_engine_sent_before_it_was_lost_is_taken(tmp_path: Path) -> None:
    """Also where the supervisor reports the loss before the socket shows it."""

    async def run() -> None:
        router, engine = router_and_engine(tmp_path)
        answer = ask(router, one_text())
        request = await engine.request()
        engine.answer(request.id, 0, [[1.0, 1.0]])
        engine.close()
        router.engine_changed(EngineState(0, "down", "killed"))
        assert len((await asyncio.wait_for(answer, 5)).vectors) == 1
        await router.close()

    asyncio.run(run())


# --- several models ---


async def connected(router: Router, *models: int) -> None:
    """Once these models would get requests."""
    deadline = time.monotonic() + 5
    while not all(map(router.connected, models)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_a_request_goes_to_an_engine_that_has_its_model(tmp_path: Path) -> None:
    """However much more that engine has to do."""

    async def run() -> None:
        router = Router(models_of("a", "b"), SharedCounters.create(1, 2, 2), 0)
        both, one = FakeEngine(tmp_path, "both"), FakeEngine(tmp_path, "one", 1)
        router.engine_changed(both.ready(a=READY, b=READY))
        router.engine_changed(one.ready(a=READY))
        for engine in (both, one):
            await engine.accept()
        await connected(router, 0, 1)
        while router._engines[1].status is None:
            await asyncio.sleep(0.002)
        of_b = [ask(router, three_texts(), 1) for _ in range(3)]
        asked = [await both.request() for _ in range(3)]
        assert [request.model for request in asked] == [1, 1, 1]
        of_a = ask(router, one_text())
        request = await one.request()
        assert request.model == 0
        assert [admission.admitted_tokens for admission in router.admissions] == [1, 9]
        one.answer(request.id, 0, [[1.0, 1.0]])
        for each in asked:
            both.answer(each.id, 0, [[1.0, 1.0]] * 3)
        await asyncio.wait_for(asyncio.gather(of_a, *of_b), 5)
        assert [admission.admitted_tokens for admission in router.admissions] == [0, 0]
        await router.close()
        both.close()
        one.close()

    asyncio.run(run())


def test_what_waits_for_a_model_is_sent_once_it_is_loaded_again(tmp_path: Path) -> None:
    """An engine that was lost is ready with one model first; the other model's requests wait for that."""

    async def run() -> None:
        router = Router(models_of("a", "b"), SharedCounters.create(1, 1, 2), 0)
        old, new = (FakeEngine(tmp_path, f"engine.{start}") for start in (1, 2))
        router.engine_changed(old.ready(a=READY, b=READY))
        of_a, of_b = ask(router, one_text(), 0), ask(router, one_text(), 1)
        assert [(await old.request()).model for _ in range(2)] == [0, 1]
        old.close()
        router.engine_changed(EngineState(0, "down", "killed", "", {0: LOADING, 1: LOADING}))
        router.engine_changed(new.ready(a=READY, b=LOADING))
        request = await new.request()
        assert request.model == 0
        new.answer(request.id, 0, [[1.0, 1.0]])
        await asyncio.wait_for(of_a, 5)
        assert not of_b.done()
        with pytest.raises(Unavailable, match=r"b is not ready \(loading: weights\)"):  # as at any time while it loads
            await ask(router, one_text(), 1)
        router.engine_changed(new.ready(a=READY, b=READY))
        request = await new.request()
        assert request.model == 1
        new.answer(request.id, 0, [[1.0, 1.0]])
        await asyncio.wait_for(of_b, 5)
        await router.close()
        new.close()

    asyncio.run(run())


def test_a_model_that_has_failed_everywhere_fails_what_waits_for_it(tmp_path: Path) -> None:
    """Of two engines the first one's requests go to the second."""

    async def run() -> None:
        router = Router(models_of("a", "b"), SharedCounters.create(1, 2, 2), 0)
        engines = [FakeEngine(tmp_path, f"engine.{index}", index) for index in range(2)]
        router.engine_changed(engines[0].ready(a=READY, b=READY))
        router.engine_changed(engines[1].ready(a=READY, b=LOADING))
        for engine in engines:
            await engine.accept()
        await connected(router, 0, 1)
        of_b = ask(router, one_text(), 1)
        first = await engines[0].request()
        router.engine_changed(engines[0].ready(a=READY, b=FAILED))
        await asyncio.sleep(0)
        assert not of_b.done()
        router.engine_changed(engines[1].ready(a=READY, b=READY))
        again = await engines[1].request()
        assert again.id != first.id
        assert router._engines[0].tokens == 0
        of_a = ask(router, one_text(), 0)
        router.engine_changed(engines[1].ready(a=READY, b=FAILED))
        with pytest.raises(Unavailable, match=r"b has failed \(failed: no room; failed: no room\)") as failed:
            await asyncio.wait_for(of_b, 5)
        assert failed.value.retry_after_s is None
        with pytest.raises(Unavailable, match="b has failed"):
            await ask(router, one_text(), 1)
        request = await engines[0].request()
        assert request.model == 0
        engines[0].answer(request.id, 0, [[1.0, 1.0]])
        await asyncio.wait_for(of_a, 5)
        assert router.pending == 0
        await router.close()
        for engine in engines:
            engine.close()

    asyncio.run(run())


def test_draining_gives_up_what_no_engine_will_do(tmp_path: Path) -> None:
    async def run() -> None:
        router = Router(models_of("a", "b"), SharedCounters.create(1, 2, 2), 0)
        engines = [FakeEngine(tmp_path, f"engine.{index}", index) for index in range(2)]
        router.engine_changed(engines[0].ready(a=READY))
        router.engine_changed(engines[1].ready(b=READY))
        of_a, of_b = ask(router, one_text(), 0), ask(router, one_text(), 1)
        request = await engines[0].request()
        assert (await engines[1].request()).model == 1
        assert not router.draining
        router.drain()
        assert router.draining
        engines[1].close()
        router.engine_changed(EngineState(1, "down", "killed"))
        router.give_up(unready=True)
        with pytest.raises(Unavailable, match="the server is shutting down"):
            await asyncio.wait_for(of_b, 5)
        engines[0].answer(request.id, 0, [[1.0, 1.0]])
        await asyncio.wait_for(of_a, 5)
        await router.close()
        engines[0].close()

    asyncio.run(run())


def test_the_board_says_what_runs() -> None:
    counters = SharedCounters.create(2, 2)
    counters.admitted_tokens[0][1] = 5.0
    counters.set_running(0, 0, [1, 2**62])
    counters.set_running(0, 1, range(100_000))  # more than there is room for
    counters.set_running(1, 1, [7])
    assert len(counters.running(0)) == 1 + (1 << 16)
    assert 2**62 in counters.running(0)
    assert counters.running(1) == {7}
    counters.set_running(0, 1, ())
    assert counters.running(0) == {1, 2**62}
    assert counters.admitted() == 5
    assert counters.forward_since.tolist() == [0.0, 0.0]
