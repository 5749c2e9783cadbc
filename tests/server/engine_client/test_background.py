"""A task of an HTTP process that fails is logged and ends the process. None fails in silence."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from embert.server.engine_client.background import exit_on_error, keep_running
from tests.server.connections import one_to_each
from tests.server.live import ROOT, STAND_IN, live, until

GOOD = [101, 7592, 102]


async def fails() -> None:
    await asyncio.sleep(0)
    raise KeyError("nowhere")


async def ends() -> None:
    await asyncio.sleep(0)


async def statuses(coroutine: Coroutine[Any, Any, None], *, may_end: bool = False) -> list[int]:
    """The exit statuses that a process is ended with when a task does this."""
    found: list[int] = []
    task = keep_running(coroutine, may_end=may_end, end=found.append)
    await asyncio.wait([task], timeout=0.05)
    task.cancel()
    await asyncio.wait([task])
    return found


def test_only_canceling_ends_a_task(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(statuses(asyncio.sleep(3600))) == []
    assert asyncio.run(statuses(ends(), may_end=True)) == []
    assert caplog.text == ""
    assert asyncio.run(statuses(ends())) == [70]
    assert "ends" in caplog.text


def test_an_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(statuses(fails(), may_end=True)) == [70]
    found: list[int] = []
    exit_on_error(lambda number: [][number], found.append)(3)  # of a callback of the loop
    assert found == [70]
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL] * 2
    assert "KeyError: 'nowhere'" in caplog.text
    assert "raise KeyError" in caplog.text
    assert "IndexError" in caplog.text


SPOIL = """
import signal

def spoil(number, frame):
    from embert.server.engine_client.connection import EngineConnection
    def boom(*arguments):
        raise RuntimeError("spoilt")
    EngineConnection.connect = boom

signal.signal(signal.SIGUSR2, spoil)
"""


def test_a_process_whose_sweep_fails_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOIL)
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    with live(*STAND_IN, "--workers", "2", env={"PYTHONPATH": paths}, clean_log=False) as server:
        server.wait_announced()
        with one_to_each(server) as connections:
            old = list(connections)
        for pid in old:
            os.kill(pid, signal.SIGUSR2)
        until(lambda: len(server.http_pids) == 2 and not set(old) & set(server.http_pids), what="other HTTP processes")
        server.wait_ready()
        assert server.post("/embed", {"inputs": [GOOD]}).status_code == 200
        assert server.log.count("RuntimeError: spoilt") == 2
        assert server.log.count("ended with status 70; restarting") == 2
