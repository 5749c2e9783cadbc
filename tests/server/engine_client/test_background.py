"""A task of an HTTP process that fails is logged and ends the process. None fails in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from embert.server.engine_client import background


async def fails() -> None:
    raise RuntimeError("spoilt")


async def ends() -> None: ...


@pytest.mark.parametrize(
    ("coroutine", "may_end", "fatal"),
    [(fails, False, True), (fails, True, True), (ends, False, True), (ends, True, False)],
)
def test_a_task_that_fails_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    coroutine: Any,
    may_end: bool,
    fatal: bool,
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(background, "exit_now", exits.append)

    async def run(task: Coroutine[Any, Any, None]) -> None:
        await asyncio.wait([background.keep_running(task, may_end=may_end)])

    asyncio.run(run(coroutine()))
    assert exits == [70] * fatal
    assert ("spoilt" in caplog.text) == (coroutine is fails)
