"""Limits of connections: their number, which ones are closed for others, and how long each stays open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from embert.server.http import protocol
from embert.server.http.connections import (
    LOG_INTERVAL_S,
    MOST_SURPLUS,
    ConnectionLimit,
    Connections,
    ConnectionSlot,
)
from embert.server.http.protocol import SURPLUS_S
from tests.server.http.echo_server import EARLY, GET, IDLE_S, INNER, LIMIT, Serving, post, scene, skip, wait_until
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


def test_the_connection_idle_for_longest_is_closed_for_another() -> None:
    connections = Connections(ConnectionLimit(3, 1), IDLE_S)
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
    connections = Connections(ConnectionLimit(3, 1), IDLE_S, lambda: now)
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
        assert [os.strerror(errno.EMFILE) in record.getMessage() for record in caplog.records] == [True]
        now += LOG_INTERVAL_S
        connections.check_files()
        assert "4 times" in caplog.records[1].getMessage()


@pytest.mark.parametrize("files", [70, 40_000])
def test_the_limit_leaves_files_for_others(files: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        pytest.skip(f"this process may open {hard} files")
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files})); "
        "from embert.server.http.connections import connection_limit; "
        "limit = connection_limit(16384); print(limit.served, limit.surplus)"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout
    served, surplus = map(int, output.split())
    assert 1 <= served <= 16_384
    assert 1 <= surplus <= MOST_SURPLUS
    assert served + surplus <= max(2, files - 60)
    if files == 40_000:
        assert (served, surplus) == (16_384, MOST_SURPLUS)


# --- too many ---


@scene(served=2, surplus=1)
async def test_too_many_connections(server: Serving) -> None:
    busy = [await server.connect() for _ in range(2)]
    for client in busy:
        await client.send(post(b"a", "/slow"))
    await wait_until(lambda: len(server.asked) == 2)
    third = await server.connect()
    assert not await (await server.connect()).rest()  # not even a response
    response = await third.ask(GET)
    assert (response.body, response.closes) == (b"/livez  surplus", True)  # marked, for `RequestServer`
    assert not await third.rest()
    await server.count(2)
    for sent in (b"", b"\r\n", GET[:9], EARLY, post(b"a", "/slow")):
        client = await server.connect()
        await client.send(sent)
        if sent == EARLY:
            assert (await client.response()).body == b"early surplus"
        await skip(SURPLUS_S + 0.1)
        await client.rest()
        await server.count(2)
    server.going.set()
    assert [(await client.response()).status for client in busy] == [200, 200]


# --- idle ones, and those that go on sending ---


@scene()
async def test_empty_lines_do_not_keep_an_idle_connection_open(server: Serving) -> None:
    fresh, used = await server.connect(), await server.connect()
    assert await used.is_open()
    for _ in range(4):
        for client in (fresh, used):
            await client.send(b"\r\n")
        await skip(IDLE_S / 5)
    assert len(server.connections) == 2
    await skip(IDLE_S / 4)
    assert not await fresh.rest()
    assert not await used.rest()
    flood = await server.connect()
    await flood.send(b"\r\n" * LIMIT)
    assert [response.status for response in await flood.rest()] == [431]


@pytest.mark.parametrize("pause_s", [protocol.LINGER_QUIET_S * 2, protocol.LINGER_QUIET_S / 2])
@scene()
async def test_a_connection_lingers_while_a_body_follows_its_response(server: Serving, pause_s: float) -> None:
    client = await server.connect()
    response = await client.ask(EARLY + b"a")
    assert (response.body, response.closes) == (b"early", True)
    time = asyncio.get_running_loop().time
    began = time()
    with contextlib.suppress(ConnectionError):
        while len(server.connections) and time() - began < 2 * protocol.LINGER_S:
            await client.send(INNER)
            await skip(pause_s)
    passed_s = time() - began
    if pause_s > protocol.LINGER_QUIET_S:
        assert passed_s < 3 * pause_s
    else:
        assert protocol.LINGER_S <= passed_s <= protocol.LINGER_S + 2 * pause_s
    assert server.asked == ["/early"]


@scene()
async def test_the_bytes_after_an_early_response_are_limited(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_BYTES", 1_000_000)
    client = await server.connect()
    await client.ask(EARLY)
    with pytest.raises(ConnectionError):
        await client.send(*[b"x" * 100_000] * 300)


@pytest.mark.parametrize("wrong", [b"POST / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * LIMIT * 9])
@scene()
async def test_a_client_that_keeps_sending_reads_its_error(server: Serving, wrong: bytes) -> None:
    client = await server.connect()
    await client.send(wrong, *[b"x" * 100_000] * 50)
    (response,) = await client.rest()
    assert response.status in (400, 431)


@pytest.mark.parametrize("direct", [GET, post(b"")], ids=["get", "post"])
@scene()
async def test_a_drain_ends_connections_with_their_next_response(server: Serving, direct: bytes) -> None:
    idle, busy, begun = [await server.connect() for _ in range(3)]
    assert (await idle.ask(GET)).closes is False
    await busy.send(post(b"a", "/slow"))
    await begun.send(direct[:20])
    await wait_until(lambda: server.asked[-1:] == ["/slow"])
    server.connections.drain()
    assert await idle.rest() == []
    later = await server.connect()
    for client in (later, begun):
        response = await client.ask(direct if client is later else direct[20:])
        assert (response.status, response.closes) == (200, True)
        assert await client.rest() == []
    server.going.set()
    response = await busy.response()
    assert (response.status, response.closes) == (200, True)
    assert await busy.rest() == []
    await server.count(0)
