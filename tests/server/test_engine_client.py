"""The API process's side of an engine, with the engine's sockets held by the test."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio

from engine import Encoded
from server.board import open_board
from server.config import ServeConfig
from server.control import EngineInfo, EngineState
from server.engine_client import EngineClient
from server.messages import EncodeRequest, Part, Results, Status, decode_submit, encode
from server.terms import Terms

INFO = EngineInfo("test", "cpu", "a test", "float32", "", 1024, 2, 2, 0.0, 0.1)


class FakeEngine:
    """One start of an engine: takes requests, and answers what it is told to."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, reply: str) -> None:
        self.endpoint = endpoint
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(endpoint)
        self.outbox = context.socket(zmq.PUSH)
        self.outbox.connect(reply)

    async def request(self) -> EncodeRequest:
        while True:
            submit = decode_submit(await asyncio.wait_for(self.inbox.recv(), 5))
            if submit.requests:
                return submit.requests[0]

    async def answer(self, request: int, first: int, rows: list[list[float]]) -> None:
        vectors = np.array(rows, np.float32).tobytes()
        part = Part(request, first, len(rows), vectors, 0.0, 0.0)
        await self.outbox.send(encode(Results(Status(0, 0.0, 0, 0.0), [part])))


async def never_leaves() -> None:
    await asyncio.sleep(3600)


def in_a_minute() -> Terms:
    return Terms(60.0, "--request-timeout", time.monotonic() + 60.0)


def three_texts() -> Encoded:
    return Encoded(np.array([1, 2, 3], np.int32), np.array([1, 1, 1], np.int32), 0)


def test_parts_of_a_lost_engine_are_not_taken_for_its_successors(tmp_path: Path) -> None:
    """They may arrive after it was sent again; counted twice, they would complete it with rows nobody wrote."""

    async def run() -> None:
        reply = f"ipc://{tmp_path}/api"
        client = EngineClient(reply, ServeConfig(), open_board(1, 1), 0)
        context = zmq.asyncio.Context()
        old, new = (FakeEngine(context, f"ipc://{tmp_path}/engine.{start}", reply) for start in (1, 2))
        client.engine_changed(EngineState(0, "ready", "", old.endpoint, INFO))
        answer = asyncio.ensure_future(client.encode(three_texts(), never_leaves, in_a_minute()))
        first = await old.request()
        client.engine_changed(EngineState(0, "down", "killed"))
        client.engine_changed(EngineState(0, "ready", "", new.endpoint, INFO))
        again = await new.request()
        await old.answer(first.id, 0, [[9.0, 9.0], [9.0, 9.0]])
        await asyncio.sleep(0.1)  # it has arrived
        await new.answer(again.id, 0, [[1.0, 1.0]])
        await asyncio.sleep(0.1)
        complete = answer.done()
        await new.answer(again.id, 1, [[2.0, 2.0], [3.0, 3.0]])
        vectors = (await asyncio.wait_for(answer, 5)).vectors.tolist()
        pending = client.pending
        await client.close()
        context.destroy(linger=0)
        assert not complete
        assert vectors == [[1, 1], [2, 2], [3, 3]]
        assert pending == 0

    asyncio.run(run())


def test_a_request_that_took_its_time_leaves_nothing_behind(tmp_path: Path) -> None:
    """Collections are rare here: what waits for one holds memory for minutes."""

    async def run() -> list[str]:
        reply = f"ipc://{tmp_path}/api"
        client = EngineClient(reply, ServeConfig(), open_board(1, 1), 0)
        context = zmq.asyncio.Context()
        engine = FakeEngine(context, f"ipc://{tmp_path}/engine", reply)
        client.engine_changed(EngineState(0, "ready", "", engine.endpoint, INFO))
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                answer = asyncio.ensure_future(client.encode(three_texts(), never_leaves, in_a_minute()))
                request = await engine.request()
                await asyncio.sleep(0.2)  # long enough for somebody to watch for its client
                await engine.answer(request.id, 0, [[1.0, 1.0]] * 3)
                await asyncio.wait_for(answer, 5)
                del answer, request
            await asyncio.sleep(0.1)
            gc.collect()
            found = [type(each).__name__ for each in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        await client.close()
        context.destroy(linger=0)
        return found

    assert {"Answer", "_Pending", "ndarray"}.isdisjoint(asyncio.run(run()))
