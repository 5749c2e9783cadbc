"""Several requests on one connection, before the first is answered."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from embert.server.http.protocol import HEAD_TIMEOUT_S
from tests.server.http.echo_server import chunked, cut, play, post, serving, skip


def test_a_known_head_gives_the_same_request_however_it_comes() -> None:
    """The second time and later, a head in one packet with its body does not pass the parser."""

    async def scene() -> None:
        async with serving() as server:
            first, second = await server.connect(), await server.connect()
            for body in (b"abcd", b"efgh", b"", b"", b"x" * 20_000, b"y" * 20_000):
                for client in (first, second):
                    assert (await client.ask(post(body))).body == b"/echo " + body
            known = post(b"abcd")
            assert (await first.ask(known[:-2], known[-2:])).body == b"/echo abcd"
            await first.send(known + post(b"1234") + known[:30])
            assert [(await first.answer()).body for _ in range(2)] == [b"/echo abcd", b"/echo 1234"]
            assert (await first.ask(known[30:])).body == b"/echo abcd"
            assert await first.is_open()

    play(scene)


@pytest.mark.parametrize("size", [1 << 20, 4999, 61], ids=["whole", "in parts", "in sixties"])
def test_requests_behind_each_other_are_answered_in_order(size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            bodies = [b"%d" % number for number in range(200)]
            whole = b"".join(post(body) if number % 2 else chunked(body) for number, body in enumerate(bodies))
            await client.send(*cut(whole, size))
            for body in bodies:
                assert (await client.answer()).body == b"/echo " + body
            assert await client.is_open()

    play(scene)


def test_a_long_body_is_not_part_of_the_next_head() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            second = post(b"second")
            await client.send(post(b"x" * 100_000, "/slow") + second[:40])
            await skip(HEAD_TIMEOUT_S - 1)
            await client.send(second[40:])
            server.going.set()
            assert len((await client.answer()).body) == 100_006
            assert (await client.answer()).body == b"/echo second"

    play(scene)


def test_a_head_that_waits_unread_is_not_slow() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            third = post(b"c" * 50)
            await client.send(post(b"a", "/slow") + post(b"b" * 20_000) + third[:30])
            await client.send(third[30:])
            await skip(HEAD_TIMEOUT_S + 1)
            server.going.set()
            assert [len((await client.answer()).body) for _ in range(3)] == [7, 20_006, 56]

    play(scene)


def test_requests_that_wait_are_not_read_without_end() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow"))
            client.writer.write(post(b"x" * 100_000) * 640)
            for _ in range(10):
                await skip(1)
            assert client.writer.transport.get_write_buffer_size() > 32_000_000  # of 64, but for what the kernel holds
            server.going.set()

    play(scene)


def test_all_requests_of_a_client_that_leaves_end() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow"), post(b"b", "/slow"))
            client.writer.transport.abort()
            await server.count(0)
            while server.left < 1:
                await asyncio.sleep(0.002)
            assert server.asked == ["/slow"]

    play(scene)


def test_a_client_that_goes_on_after_its_last_request_gets_the_answer() -> None:
    """Closing at once would reset the connection, and what the client has not read yet would be lost."""

    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            last = post(b"a" * 20_000_000, "/slow", b"connection: close")
            await client.send(last)
            client.writer.write(post(b"b" * 50_000_000))
            while client.writer.transport.get_write_buffer_size() > 50_000_000:  # until some of it has arrived
                await skip(0.1)
            server.going.set()
            assert len((await client.answer()).body) == 20_000_006

    play(scene)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize(
    "more", [post(b"b"), post(b"b") + post(b"c" * 500_000), post(b"b")[:30], b"G", b"\r\n"], ids=len
)
def test_a_client_that_pipelines_and_leaves_is_noticed(more: bytes, how: str) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow"), more[:1], more[1:200_000])
            while not server.asked:
                await asyncio.sleep(0.002)
            if how == "RST":
                sock = client.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.writer.transport.abort()
            while not server.left:
                server.connections.check_unread()
                await asyncio.sleep(0.002)
            await server.count(0)
            assert server.asked == ["/slow"]
            assert not server.connections.unread

    play(scene)


def test_a_client_that_pipelines_and_stays_is_answered() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow"), post(b"b") + post(b"c" * 100_000), post(b"d"))
            while not server.connections.unread:
                await asyncio.sleep(0.002)
            server.connections.check_unread()
            server.going.set()
            bodies = [(await client.answer()).body for _ in range(4)]
            assert bodies == [b"/slow a", b"/echo b", b"/echo " + b"c" * 100_000, b"/echo d"]
            assert not server.connections.unread

    play(scene)
