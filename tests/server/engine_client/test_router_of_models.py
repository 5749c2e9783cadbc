"""The router with several models: whose engine gets a request, and what becomes of models that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from embert.server.engine_client.router import Router
from embert.server.http.errors import Unavailable
from embert.server.ipc.control import EngineState
from embert.server.ipc.shared_counters import SharedCounters
from tests.server.engine_client.fake_engine import (
    FAILED,
    LOADING,
    READY,
    FakeEngine,
    ask,
    connected,
    models_of,
    one_text,
    three_texts,
)


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
