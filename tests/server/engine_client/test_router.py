"""The HTTP process's side of the engines; the test holds the engines' ends of the sockets."""

from __future__ import annotations

import asyncio
import gc
import time

import msgspec
import numpy as np
import pytest

from embert.engine import Encoded, Task
from embert.engine.tasks import Sharing
from embert.server.engine_client.router import EncodeResult
from embert.server.http.errors import InferenceFailed, Unavailable
from embert.server.ipc.control import EngineState, ModelState
from embert.server.ipc.shared_counters import SharedCounters
from tests.server.engine_client.fake_engine import (
    FAILED,
    INFO,
    LOADING,
    READY,
    Scene,
    ask,
    connected,
    in_a_minute,
    one_text,
    scene,
    three_texts,
    until,
)

DOWN = EngineState(0, "down", "killed")


async def vectors_of(result: asyncio.Future[EncodeResult]) -> list[list[float]]:
    vectors: list[list[float]] = (await asyncio.wait_for(result, 120)).vectors.tolist()
    return vectors


@scene
async def test_parts_of_a_lost_engine_are_not_taken_for_its_successors(stage: Scene) -> None:
    """They may arrive after the request was sent again. Counted twice, they would complete it with unwritten rows."""
    router = stage.router("a")
    old, new = stage.engine(), stage.engine()
    router.engine_changed(old.ready())
    result = ask(router, three_texts())
    first = await old.request()
    router.engine_changed(DOWN)
    router.engine_changed(new.ready())
    again = await new.request()
    old.send_rows(first.id, 0, [[9.0, 9.0], [9.0, 9.0]])
    await asyncio.sleep(0.1)  # it has arrived
    new.send_rows(again.id, 0, [[1.0, 1.0]])
    await asyncio.sleep(0.1)
    assert not result.done()
    new.send_rows(again.id, 1, [[2.0, 2.0], [3.0, 3.0]])
    assert await vectors_of(result) == [[1, 1], [2, 2], [3, 3]]
    assert router.pending == 0


@scene
async def test_prefix_of_a_request_counts_once(stage: Scene) -> None:
    texts = Encoded(np.array([*range(40), 1, *range(40), 2], np.int32), np.array([41, 41], np.int32), 0)
    for tasks, prefix in ((Task.EMBED, 40), (Task.DECIDE | Task.LABEL_MASS, 0)):
        router, engine = stage.router("a"), stage.engine()
        info = msgspec.structs.replace(INFO, sharing=Sharing(tasks))
        state = engine.ready(a=ModelState("ready", "", info))
        router.engine_changed(msgspec.json.decode(msgspec.json.encode(state), type=EngineState))
        ask(router, texts)
        assert (await engine.request()).prefix == prefix
        assert router.admissions[0].admitted_tokens == 82 - prefix


@scene
async def test_a_request_that_took_its_time_leaves_nothing_behind(stage: Scene) -> None:
    """Garbage collections are rare here: a cycle would hold memory for minutes."""
    router, engine = stage.ready()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            result = ask(router, three_texts())
            request = await engine.request()
            await asyncio.sleep(0.2)  # long enough for the sweep to watch its client
            engine.send_rows(request.id, 0, [[1.0, 1.0]] * 3)
            await vectors_of(result)
            del result, request
        await asyncio.sleep(0.1)
        gc.collect()
        assert {"EncodeResult", "PendingRequest", "ndarray"}.isdisjoint(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@scene
async def test_a_client_that_leaves_cancels_its_request(stage: Scene) -> None:
    router, engine = stage.ready()
    left = asyncio.Event()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    result = asyncio.ensure_future(router.encode(three_texts(), receive, in_a_minute()))
    request = await engine.request()
    left.set()
    assert await engine.cancelled() == request.id
    await until(result.cancelled)
    assert router.pending == 0


@scene
async def test_a_connection_that_breaks_is_made_again(stage: Scene) -> None:
    """Before the supervisor has said anything. What the engine owed is sent again, but not for ever."""
    router, engine = stage.ready()
    result = ask(router, three_texts())
    first = await engine.request()
    engine.send_rows(first.id, 0, [[9.0, 9.0]])
    assert engine.channel is not None
    engine.channel.send(b"no message")
    await engine.accept()
    again = await engine.request()
    engine.send_rows(again.id, 0, [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    assert await vectors_of(result) == [[1, 1], [2, 2], [3, 3]]
    lost = ask(router, three_texts())
    for _ in range(8):
        await engine.request()
        engine.disconnect()
        # An engine that takes connections and does not greet, as a dying one does, gets no requests.
        await engine.accept(greets=False)
        engine.disconnect()
        await engine.accept()
    with pytest.raises(Unavailable, match="lost 8 times"):
        await asyncio.wait_for(lost, 120)
    assert router.pending == 0


@scene
async def test_requests_wait_while_an_engine_that_is_ready_cannot_be_reached(stage: Scene) -> None:
    router = stage.router("a")
    engine = stage.engine()
    ready = engine.ready()
    engine.close()
    router.engine_changed(ready)
    result = ask(router, three_texts())
    await asyncio.sleep(0.1)
    assert not result.done()
    engine.listen()
    request = await engine.request()
    engine.send_rows(request.id, 0, [[1.0, 1.0]] * 3)
    assert await vectors_of(result) == [[1, 1]] * 3


@scene
async def test_what_a_lost_engine_ran_is_isolated_and_then_failed(stage: Scene) -> None:
    """The shared counters say what ran. What waited is sent again as it was, as often as it takes."""
    counters = SharedCounters.create(1, 1)
    router = stage.router("a", counters=counters)
    engines = [stage.engine() for _ in range(6)]
    router.engine_changed(engines[0].ready())
    poison, neighbor, waiting = (ask(router, one_text()) for _ in range(3))
    asked = [await engines[0].request() for _ in range(3)]
    assert [request.isolated for request in asked] == [False] * 3
    counters.set_running(0, 0, [request.id for request in asked[:2]])
    engines[0].close()
    for start, isolated in ((1, [True, True, False]), (2, [True, False]), (3, [True, False]), (4, [True, False])):
        router.engine_changed(DOWN)
        router.engine_changed(engines[start].ready())
        asked = [await engines[start].request() for _ in isolated]
        assert [request.isolated for request in asked] == isolated
        counters.set_running(0, 0, [asked[0].id] if start == 1 else [])
        engines[start].close()
    with pytest.raises(InferenceFailed, match="lost twice"):
        await asyncio.wait_for(poison, 120)
    router.engine_changed(DOWN)
    router.engine_changed(engines[5].ready())
    for _ in range(2):
        engines[5].send_rows((await engines[5].request()).id, 0, [[1.0, 1.0]])
    assert [await vectors_of(each) for each in (neighbor, waiting)] == [[[1, 1]]] * 2
    assert router.pending == router.admissions[0].admitted_tokens == 0


@scene
async def test_what_was_never_sent_was_not_lost(stage: Scene) -> None:
    """A request that waits for an engine, or for the next tick of the loop, when an engine is lost."""
    router = stage.router("a")
    result = None
    for _ in range(10):
        engine = stage.engine()
        router.engine_changed(engine.ready())
        await engine.accept()
        while not router._engines[0].status:
            await asyncio.sleep(0)
        if result is None:
            result = ask(router, one_text())
            await asyncio.sleep(0)
        # It is with this engine, but the tick that sends it has not come.
        (pending,) = router._pending.values()
        assert pending.engine == 0
        assert router._engines[0].unsent == [pending.message]
        engine.close()
        router.engine_changed(DOWN)
    engine = stage.engine()
    router.engine_changed(engine.ready())
    engine.send_rows((await engine.request()).id, 0, [[1.0, 1.0]])
    assert result is not None
    assert await vectors_of(result) == [[1, 1]]


@scene
async def test_what_an_engine_sent_before_it_was_lost_is_taken(stage: Scene) -> None:
    """Also where the supervisor reports the loss before the socket shows it."""
    router, engine = stage.ready()
    result = ask(router, one_text())
    request = await engine.request()
    engine.send_rows(request.id, 0, [[1.0, 1.0]])
    engine.close()
    router.engine_changed(DOWN)
    assert await vectors_of(result) == [[1, 1]]


def test_the_shared_counters_say_what_runs() -> None:
    counters = SharedCounters.create(2, 2)
    counters.admitted_tokens[0][1] = 5.0
    counters.set_running(0, 0, [1, 2**62])
    counters.set_running(0, 1, range(100_000))  # more than fit
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
@scene
async def test_health_during_a_long_forward(
    stage: Scene, last_success: float, forward_since: float, healthy: bool
) -> None:
    counters = SharedCounters.create(1, 1)
    router, engine = stage.router("a", counters=counters), stage.engine()
    router.engine_changed(engine.ready())
    now = time.monotonic()
    counters.forward_since[0] = now + forward_since if forward_since else 0.0
    await engine.accept(last_success=now + last_success)
    await connected(router, 0)
    is_healthy, age_s = router.health()
    assert is_healthy == healthy
    assert age_s is not None
    assert age_s >= -last_success


# --- several models ---


@scene
async def test_a_request_goes_to_an_engine_that_has_its_model(stage: Scene) -> None:
    """However much more that engine has to do."""
    router = stage.router("a", "b", engines=2)
    both, one = stage.engine(), stage.engine(1)
    router.engine_changed(both.ready(a=READY, b=READY))
    router.engine_changed(one.ready(a=READY))
    for engine in (both, one):
        await engine.accept()
    await connected(router, 0, 1)
    await until(lambda: router._engines[1].status)
    of_b = [ask(router, three_texts(), 1) for _ in range(3)]
    asked = [await both.request() for _ in range(3)]
    assert [request.model for request in asked] == [1, 1, 1]
    of_a = ask(router, one_text())
    request = await one.request()
    assert request.model == 0
    assert [admission.admitted_tokens for admission in router.admissions] == [1, 9]
    one.send_rows(request.id, 0, [[1.0, 1.0]])
    for each in asked:
        both.send_rows(each.id, 0, [[1.0, 1.0]] * 3)
    await asyncio.wait_for(asyncio.gather(of_a, *of_b), 120)
    assert [admission.admitted_tokens for admission in router.admissions] == [0, 0]


@scene
async def test_what_waits_for_a_model_is_sent_once_it_is_loaded_again(stage: Scene) -> None:
    """An engine that was lost is ready with one model first; the other model's requests wait for that."""
    router = stage.router("a", "b")
    old, new = stage.engine(), stage.engine()
    router.engine_changed(old.ready(a=READY, b=READY))
    of_a, of_b = ask(router, one_text(), 0), ask(router, one_text(), 1)
    assert [(await old.request()).model for _ in range(2)] == [0, 1]
    old.close()
    router.engine_changed(EngineState(0, "down", "killed", "", {0: LOADING, 1: LOADING}))
    router.engine_changed(new.ready(a=READY, b=LOADING))
    request = await new.request()
    assert request.model == 0
    new.send_rows(request.id, 0, [[1.0, 1.0]])
    await asyncio.wait_for(of_a, 120)
    assert not of_b.done()
    with pytest.raises(Unavailable, match="b is not ready"):  # as at any time while it loads
        await ask(router, one_text(), 1)
    router.engine_changed(new.ready(a=READY, b=READY))
    request = await new.request()
    assert request.model == 1
    new.send_rows(request.id, 0, [[1.0, 1.0]])
    await asyncio.wait_for(of_b, 120)


@scene
async def test_a_model_that_has_failed_everywhere_fails_what_waits_for_it(stage: Scene) -> None:
    """The first engine's requests go to the second."""
    router = stage.router("a", "b", engines=2)
    engines = [stage.engine(index) for index in range(2)]
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
    with pytest.raises(Unavailable, match=r"b has failed .*out of memory") as failed:
        await asyncio.wait_for(of_b, 120)
    assert failed.value.retry_after_s is None
    with pytest.raises(Unavailable, match="b has failed"):
        await ask(router, one_text(), 1)
    request = await engines[0].request()
    assert request.model == 0
    engines[0].send_rows(request.id, 0, [[1.0, 1.0]])
    await asyncio.wait_for(of_a, 120)
    assert router.pending == 0


@scene
async def test_draining_gives_up_what_no_engine_will_do(stage: Scene) -> None:
    router = stage.router("a", "b", engines=2)
    engines = [stage.engine(index) for index in range(2)]
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
    with pytest.raises(Unavailable, match="shutting down"):
        await asyncio.wait_for(of_b, 120)
    engines[0].send_rows(request.id, 0, [[1.0, 1.0]])
    await asyncio.wait_for(of_a, 120)
