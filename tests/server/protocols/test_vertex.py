"""The instances of one `/vertex` request share the event loop with other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from embert.server.config import ModelConfig
from embert.server.http.errors import Invalid
from embert.server.protocols.request_context import LatencyBreakdown, RequestContext
from embert.server.protocols.vertex import AT_ONCE, VertexRequest, predict
from embert.server.registry.model_handle import RequestLimits

COUNT = 512


class Context:
    """The context of a request, or of an instance."""

    def __init__(self) -> None:
        self.breakdown, self.truncated = LatencyBreakdown(), 0
        self.handle = self
        self.limits = RequestLimits(ModelConfig())
        self.names: dict[str, str] = {}
        self.instance: dict[str, Any] = {}

    async def parse(self, _: type[VertexRequest]) -> VertexRequest:
        return VertexRequest(instances=[{"inputs": str(index)} for index in range(COUNT)])

    def part(self, instance: dict[str, Any], parts: int) -> Context:
        assert parts == COUNT
        part = Context()
        part.instance = instance
        part.truncated = 1 + int(instance["inputs"])
        return part


def run_predict(handler: Callable[[dict[str, Any]], Coroutine[Any, Any, tuple[bytes, bytes]]]) -> tuple[bytes, int]:
    async def run() -> tuple[bytes, int]:
        context = Context()
        response: Any = lambda part: handler(part.instance)  # noqa: E731 - of a Context
        _, body = await predict(cast("RequestContext", context), response)
        assert len(asyncio.all_tasks()) == 1
        return body, context.truncated

    return asyncio.run(run())


def test_other_requests_run_between_the_starts_of_instances() -> None:
    """Each start costs the loop 0.1 ms; all of them in one round would delay all others by 0.2 s."""
    running, most, rounds, starts = 0, 0, -1, [0]

    def each_round() -> None:
        starts.append(0)
        asyncio.get_running_loop().call_soon(each_round)

    async def handler(instance: dict[str, Any]) -> tuple[bytes, bytes]:
        nonlocal running, most, rounds
        if rounds < 0:
            rounds = 0
            each_round()
        starts[-1] += 1
        running += 1
        most = max(most, running)
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1
        return b"", instance["inputs"].encode()

    body, truncated = run_predict(handler)
    assert body == b'{"predictions":[%b]}' % b",".join(b"%d" % index for index in range(COUNT))
    assert truncated == COUNT * (COUNT + 1) // 2
    assert most <= AT_ONCE
    assert max(starts) <= 2


def test_the_first_error_ends_the_others() -> None:
    begun = []

    async def handler(instance: dict[str, Any]) -> tuple[bytes, bytes]:
        begun.append(instance["inputs"])
        if instance["inputs"] == "100":
            raise Invalid("no", "inputs")
        if int(instance["inputs"]) > 50:
            await asyncio.Event().wait()  # for ever
        return b"", b"1"

    with pytest.raises(Invalid, match=r"instances\[100\]"):
        run_predict(handler)
    assert len(begun) <= 101 + AT_ONCE
