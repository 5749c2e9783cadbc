"""Connections that wait, trickle or go on sending after their answer end in bounded time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from embert.server.http import protocol
from embert.server.http.connections import IDLE_TIMEOUT_S
from tests.server.http.echo_server import EARLY, GET, INNER, LIMIT, play, post, serving, skip


def test_empty_lines_do_not_keep_an_idle_connection_open() -> None:
    async def scene() -> None:
        async with serving() as server:
            fresh, used = await server.connect(), await server.connect()
            assert await used.is_open()
            for _ in range(4):
                for client in (fresh, used):
                    await client.send(b"\r\n")
                await skip(IDLE_TIMEOUT_S / 5)
            assert len(server.connections) == 2
            await skip(IDLE_TIMEOUT_S / 4)
            assert not await fresh.rest()
            assert not await used.rest()

    play(scene)


def test_a_flood_of_empty_lines_ends() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(b"\r\n" * LIMIT)
            assert [answer.status for answer in await client.rest()] == [431]

    play(scene)


@pytest.mark.parametrize("pause_s", [protocol.LINGER_QUIET_S * 2, protocol.LINGER_QUIET_S / 2])
def test_a_connection_lingers_while_a_body_follows_its_answer(pause_s: float) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            answer = await client.ask(EARLY + b"a")
            assert (answer.body, answer.closes) == (b"early", True)
            passed_s = 0.0
            with contextlib.suppress(ConnectionError):
                while len(server.connections) and passed_s < 2 * protocol.LINGER_S:
                    await client.send(INNER)
                    await skip(pause_s)
                    passed_s += pause_s
            if pause_s > protocol.LINGER_QUIET_S:
                assert passed_s <= 2 * pause_s
            else:
                assert protocol.LINGER_S <= passed_s <= protocol.LINGER_S + 2 * pause_s
            assert server.asked == ["/early"]

    play(scene)


def test_what_follows_an_early_answer_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_BYTES", 1_000_000)

    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.ask(EARLY)
            with pytest.raises(ConnectionError):
                await client.send(*[b"x" * 100_000] * 300)

    play(scene)


@pytest.mark.parametrize("wrong", [b"POST / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * LIMIT * 9])
def test_a_client_that_keeps_sending_reads_its_refusal(wrong: bytes) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(wrong, *[b"x" * 100_000] * 50)
            (answer,) = await client.rest()
            assert answer.status in (400, 431)

    play(scene)


@pytest.mark.parametrize("direct", [GET, post(b"")], ids=["get", "post"])
def test_a_drain_ends_connections_with_their_next_answer(direct: bytes) -> None:
    async def scene() -> None:
        async with serving() as server:
            idle, busy, begun = [await server.connect() for _ in range(3)]
            assert (await idle.ask(GET)).closes is False
            await busy.send(post(b"a", "/slow"))
            await begun.send(direct[:20])
            while not server.asked or server.asked[-1] != "/slow":
                await asyncio.sleep(0.002)
            server.connections.drain()
            assert await idle.rest() == []
            later = await server.connect()
            for client in (later, begun):
                answer = await client.ask(direct if client is later else direct[20:])
                assert (answer.status, answer.closes) == (200, True)
                assert await client.rest() == []
            server.going.set()
            answer = await busy.answer()
            assert (answer.status, answer.closes) == (200, True)
            assert await busy.rest() == []
            await server.count(0)

    play(scene)
