"""How many connections there may be, and which of them make room."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from embert.server.http.connections import LOG_INTERVAL_S, MOST_SURPLUS, ConnectionLimit, Connections, ConnectionSlot
from tests.server.live import ROOT


class Fake:
    transport: asyncio.Transport

    def __init__(self, *, stays: bool = False) -> None:
        self.stays, self.evicted = stays, False

    def evict(self) -> bool:
        self.evicted = not self.stays
        return self.evicted

    def count_unread(self) -> None: ...

    def shutdown(self) -> None: ...


def test_the_connection_idle_for_longest_makes_room() -> None:
    connections = Connections(ConnectionLimit(3, 1))
    unsent, first, second = Fake(stays=True), Fake(), Fake()
    for each in (unsent, first, second):
        assert connections.add(each) is ConnectionSlot.SERVED
        connections.mark_idle(each)
    connections.mark_busy(first)
    connections.mark_idle(first)
    assert connections.add(Fake()) is ConnectionSlot.SERVED
    assert (unsent.evicted, first.evicted, second.evicted) == (False, False, True)
    connections.mark_busy(first)
    surplus = Fake()
    assert connections.add(surplus) is ConnectionSlot.SURPLUS
    connections.mark_idle(surplus)  # it has its own time
    assert connections.add(Fake()) is ConnectionSlot.NONE
    assert not surplus.evicted
    connections.remove(first)
    assert connections.add(Fake()) is ConnectionSlot.SERVED
    assert len(connections) == len(list(connections)) == 4


def test_idle_ones_are_closed_without_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    connections = Connections(ConnectionLimit(3, 1), lambda: now)
    idle = Fake()
    connections.add(idle)
    connections.mark_idle(idle)
    connections.check_files()
    assert not idle.evicted

    def fails(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", fails)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            connections.check_files()
        assert idle.evicted
        assert len(caplog.records) == 1
        assert "no file can be opened (Too many open files)" in caplog.text
        now += LOG_INTERVAL_S
        connections.check_files()
        assert "4 times since" in caplog.records[1].getMessage()


@pytest.mark.parametrize("files", [70, 100, 200, 1000, 40_000])
def test_the_limit_leaves_files_for_others(files: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        pytest.skip(f"this process may open {hard} files")
    code = (
        "from embert.server.http.connections import connection_limit; "
        "limit = connection_limit(16384); print(limit.served, limit.surplus)"
    )
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"
    told = subprocess.run([sys.executable, "-c", f"{limit}; {code}"], cwd=ROOT, capture_output=True, check=True)
    served, surplus = map(int, told.stdout.split())
    assert 1 <= served <= 16_384
    assert 1 <= surplus <= MOST_SURPLUS
    assert served + surplus <= max(2, files - 60)
    if files == 40_000:
        assert (served, surplus) == (16_384, MOST_SURPLUS)
