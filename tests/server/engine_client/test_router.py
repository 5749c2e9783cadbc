"""The API process's side of the engines; the test holds the engines' ends of the sockets."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import numpy as np
import pytest

from embert.engine import Encoded
from embert.server.engine_client.router import Router
from embert.server.http.errors import InferenceFailed, Unavailable
from embert.server.ipc.control import EngineState
from embert.server.ipc.shared_counters import SharedCounters
from tests.server.engine_client.fake_engine import (
    READY,
    FakeEngine,
    ask,
    models_of,
    one_text,
    router_and_engine,
    three_texts,
)


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
        poison, neighbor, waiting = (ask(router, one_text()) for _ in range(3))
        asked = [await engines[0].request() for _ in range(3)]
        assert [request.isolated for request in asked] == [False] * 3
        counters.set_running(0, 0, [request.id for request in asked[:2]])
        engines[0].close()
        for start, alone in ((1, [True, True, False]), (2, [True, False]), (3, [True, False]), (4, [True, False])):
            router.engine_changed(EngineState(0, "down", "killed"))
            router.engine_changed(engines[start].ready())
            asked = [await engines[start].request() for _ in alone]
            assert [request.isolated for request in asked] == alone
            counters.set_running(0, 0, [asked[0].id] if start == 1 else [])
            engines[start].close()
        with pytest.raises(InferenceFailed, match="lost twice"):
            await asyncio.wait_for(poison, 5)
        router.engine_changed(EngineState(0, "down", "killed"))
        router.engine_changed(engines[5].ready())
        for _ in range(2):
            engines[5].answer((await engines[5].request()).id, 0, [[1.0, 1.0]])
        assert [len((await asyncio.wait_for(each, 5)).vectors) for each in (neighbor, waiting)] == [1, 1]
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


@pytest.mark.parametrize(
    ("last_success", "forward_since", "healthy"),
    [
        (-1.0, 0.0, True),
        (-40.0, 0.0, False),
        (-40.0, -35.0, True),  # a legal forward that takes long
        (-300.0, -299.0, True),
        (-300.0, -20.0, False),  # what runs now follows minutes of forwards that failed
    ],
)
def test_health_during_a_long_forward(tmp_path: Path, last_success: float, forward_since: float, healthy: bool) -> None:
    async def run() -> tuple[bool, float | None]:
        counters = SharedCounters.create(1, 1)
        router = Router(models_of("a"), counters, 0)
        engine = FakeEngine(tmp_path, "engine")
        router.engine_changed(engine.ready())
        now = time.monotonic()
        counters.forward_since[0] = now + forward_since if forward_since else 0.0
        await engine.accept(last_success=now + last_success)
        while not router.connected(0):
            await asyncio.sleep(0.001)
        found = router.health()
        await router.close()
        engine.close()
        return found

    found, age_s = asyncio.run(run())
    assert found == healthy
    assert age_s == pytest.approx(-last_success, abs=2.0)
