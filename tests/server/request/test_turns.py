"""Steps of large requests, on an event loop whose time passes only in steps and between its iterations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from embert.server.request.turns import MEMORY_S, SHARE_S, Turns

STEP_S, ITERATION_S = 0.005, 0.0001


class Clock(asyncio.SelectorEventLoop):
    """An event loop with its own time. Its `iterations` end with the time of an iteration."""

    now = 0.0
    iterations = 0

    def time(self) -> float:
        return self.now

    def iterate(self) -> None:
        self.now += ITERATION_S
        self.iterations += 1
        self.call_soon(self.iterate)


def play(scene: Callable[[Clock], Awaitable[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Clock)
        monkeypatch.setattr("embert.server.request.turns.time.perf_counter", loop.time)
        loop.call_soon(loop.iterate)

        async def run() -> None:
            await scene(loop)

        runner.run(run())


@pytest.mark.parametrize("step_s", [0.001, SHARE_S / 3])
def test_an_iteration_has_one_step_or_short_ones(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []

    async def scene(loop: Clock) -> None:
        turns = Turns()
        turns.short_requests += 1

        async def large(name: str) -> None:
            for _ in range(2):
                await turns.wait()
                done.append((name, loop.iterations))
                loop.now += step_s

        clients = [asyncio.create_task(large(name)) for name in "abcd"]
        await asyncio.sleep(0)
        if step_s > SHARE_S:
            clients[1].cancel()  # its client leaves while it waits
        await asyncio.wait(clients)
        before = loop.iterations
        await turns.wait()
        assert loop.iterations == before, "a request alone waits"

    play(scene, monkeypatch)
    assert {name for name, _ in done} == ({*"acd"} if step_s > SHARE_S else {*"abcd"})
    most = max(Counter(iteration for _, iteration in done).values())
    assert most == 1 if step_s > SHARE_S else 1 < most <= 5


def test_low_priority_requests_take_turns_even_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    iterations: list[int] = []

    async def scene(loop: Clock) -> None:
        turns = Turns()

        async def low_priority() -> None:
            await turns.take()
            iterations.append(loop.iterations)
            loop.now += STEP_S

        await asyncio.gather(*(low_priority() for _ in range(4)))

    play(scene, monkeypatch)
    assert len({*iterations}) == 4


def test_large_requests_alone_need_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(loop: Clock) -> None:
        turns = Turns()
        turns.short_requests += 1
        await turns.wait()
        loop.now += MEMORY_S
        before = loop.iterations
        for _ in range(3):
            await turns.wait()
            loop.now += STEP_S
        assert loop.iterations == before

    play(scene, monkeypatch)


def test_a_long_step_leaves_as_much_time_to_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[float, float]] = []

    async def scene(loop: Clock) -> None:
        turns = Turns()

        def step() -> None:
            began = loop.now
            loop.now += STEP_S
            steps.append((began, loop.now))

        await asyncio.gather(*(turns.run([step, step], lambda: None) for _ in range(2)))

    play(scene, monkeypatch)
    assert len(steps) == 4
    assert all(began - ended >= STEP_S for (_, ended), (began, _) in pairwise(steps))
