"""Low-priority requests give way to others on the event loop of an HTTP process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from embert.engine import Encoded, Task, TaskOutput
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.engine_client.router import EncodeResult
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.request_head import RequestOptions
from embert.server.observability.request_record import SCOPE_KEY, RequestRecord
from embert.server.protocols.request_context import LatencyBreakdown, RequestContext
from embert.server.registry.low_priority_throttle import LowPriorityThrottle
from embert.server.registry.model_registry import ModelSelector

SMALL, LARGE = 1_000, 20_000  # bytes of a body; a round has 16 384


async def _order(costs: list[int], cancelled: tuple[int, ...] = ()) -> list[str]:
    """In which order low-priority requests work, and rounds of the event loop end."""
    throttle, order = LowPriorityThrottle(), []

    async def low_priority(number: int, cost: int) -> None:
        await throttle.before_tokenizing(cost)
        order.append(f"low {number}")

    tasks = [asyncio.create_task(low_priority(number, cost)) for number, cost in enumerate(costs)]
    waiting = set(tasks)
    await asyncio.sleep(0)  # each has asked
    for number in cancelled:
        tasks[number].cancel()
    while waiting:
        order.append("|")
        await asyncio.sleep(0)
        waiting = {task for task in waiting if not task.done()}
    return order


def _rounds(order: list[str]) -> list[list[str]]:
    """Work between two looks of the event loop."""
    rounds: list[list[str]] = [[]]
    for entry in order:
        if entry == "|":
            rounds.append([])
        else:
            rounds[-1].append(entry)
    return [each for each in rounds if each]


def test_a_large_low_priority_request_has_a_round_for_itself() -> None:
    assert _rounds(asyncio.run(_order([LARGE] * 8))) == [[f"low {number}"] for number in range(8)]


def test_small_low_priority_requests_share_a_round() -> None:
    assert _rounds(asyncio.run(_order([SMALL] * 40))) == [
        [f"low {number}" for number in span] for span in (range(16), range(16, 32), range(32, 40))
    ]


def test_a_request_that_is_cancelled_while_it_waits_delays_no_other() -> None:
    assert _rounds(asyncio.run(_order([LARGE] * 4, cancelled=(1, 2)))) == [["low 0"], ["low 3"]]


def test_one_low_priority_request_does_not_wait() -> None:
    async def only_one() -> None:
        throttle = LowPriorityThrottle()
        for _ in range(3):
            work = throttle.before_tokenizing(LARGE)
            with pytest.raises(StopIteration):  # it ends without waiting for anything
                work.send(None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(only_one())


def test_answers_are_throttled_by_their_bytes() -> None:
    async def answers() -> int:
        throttle, done = LowPriorityThrottle(), 0

        async def answer() -> None:
            nonlocal done
            await throttle.before_response(8 * LARGE)
            done += 1

        tasks = [asyncio.create_task(answer()) for _ in range(3)]
        await asyncio.sleep(0)
        at_once = done
        await asyncio.gather(*tasks)
        assert done == 3
        return at_once

    assert asyncio.run(answers()) == 1


class _Recorder(LowPriorityThrottle):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []

    async def before_tokenizing(self, body_bytes: int) -> None:
        self.asked.append(("tokenize", body_bytes))

    async def before_response(self, vector_bytes: int) -> None:
        self.asked.append(("answer", vector_bytes))


@pytest.mark.parametrize("low_priority", [False, True])
def test_only_low_priority_requests_are_throttled(low_priority: bool) -> None:
    throttle = _Recorder()
    ids = np.arange(3, dtype=np.int32)
    encoded = Encoded(ids, np.array([3], np.int32), 0, None)
    answer = EncodeResult({Task.EMBED: TaskOutput.one_each(np.zeros((2, 4), np.float32))}, 0.0, 0.0)

    async def tokenize(*_: Any, **__: Any) -> Encoded:
        return encoded

    async def encode(*_: Any, **__: Any) -> EncodeResult:
        return answer

    context = object.__new__(RequestContext)
    context.options = cast("RequestOptions", SimpleNamespace(low_priority=low_priority, priority=""))
    context.breakdown, context.trace, context.receive, context.truncated = LatencyBreakdown(), None, receive, 0
    registry = SimpleNamespace(low_priority_throttle=throttle, held=HeldBytes(1 << 20))
    context._selector = cast("ModelSelector", SimpleNamespace(registry=registry))
    context._size, context._param = 300, ""
    context.scope = {SCOPE_KEY: RequestRecord("", b"")}
    handle = MagicMock()
    handle.input_tokenizer.encode, handle.router.encode = tokenize, encode
    handle.served.resolve_options.return_value = None, -1
    handle.response_bytes.return_value = 32
    context.handle = handle

    async def request() -> None:
        found = await context.tokenize(["a"], TokenizeOptions(param="input"))
        await context.run(found)

    asyncio.run(request())
    assert throttle.asked == ([("tokenize", 300), ("answer", 32)] if low_priority else [])


async def receive() -> Any:
    raise AssertionError("nothing is received")
