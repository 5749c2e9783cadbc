"""How many tokens are admitted: by number, and by the time they take at the rate that the engines tell."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from embert.server.api.engine_client import EngineClient
from embert.server.config import ServeConfig
from embert.server.ipc.control import EngineInfo, EngineState
from embert.server.ipc.messages import EngineStatus
from embert.server.ipc.shared_counters import SharedCounters

INFO = EngineInfo("test", "cpu", "a test", "float32", "", 1000, 2, 2, 0.0, 0.1)


def limit(rates: list[float | None], options: dict[str, Any]) -> int:
    """The limit with engines of these rates; None: an engine that has not told its rate yet."""

    async def ask() -> int:
        client = EngineClient(ServeConfig(**options), SharedCounters.create(1, len(rates)), 0)
        for index in range(len(rates)):
            client.engine_changed(EngineState(index, "loading"))
        for index, rate in enumerate(rates):
            client.engine_changed(EngineState(index, "ready", "", "/nonexistent", INFO))
            client._engines[index].status = None if rate is None else EngineStatus(index, 0.0, 0, rate)
        found = client.queue_limit
        await client.close()
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("rates", "options", "tokens"),
    [
        ([1000.0], {}, 10_000),
        ([1000.0], {"max_queue_seconds": 3.5}, 3500),
        ([1000.0, 2500.0], {}, 35_000),  # engines work side by side
        ([1000.0, None], {}, 10_000),
        ([1000.0], {"max_queue_seconds": 0.0}, 64_000),  # tokens alone
        ([None], {}, 64_000),  # nothing is known of the rate
        ([1e6], {}, 64_000),
        ([1000.0], {"max_queue_tokens": 5000}, 5000),
        ([0.1], {}, 2000),  # two batches, or the engine would wait for work
        ([0.1, 0.1], {"max_queue_seconds": 0.01}, 4000),
        ([0.1], {"max_queue_tokens": 50}, 50),
    ],
)
def test_the_smaller_of_tokens_and_time_holds(rates: list[float | None], options: dict[str, Any], tokens: int) -> None:
    assert limit(rates, options) == tokens
