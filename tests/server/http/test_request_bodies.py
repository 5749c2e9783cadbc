"""Chunks, and what is around them."""

from __future__ import annotations

import pytest

from tests.server.http.echo_server import GET, LIMIT, chunked, cut, play, post, serving


def test_a_body_in_chunks() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            for size in (1 << 20, 1):
                whole = chunked(b"abc", b"d" * 300, end=b"0;x=y\r\nhost: other\r\nx-request-id: no\r\n\r\n")
                assert (await client.ask(*cut(whole, size))).body == b"/echo abc" + b"d" * 300
            assert await client.is_open()

    play(scene)


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
@pytest.mark.parametrize(
    "end",
    [b"zz\r\nhello\r\n", b"-5\r\nhello\r\n", b"ffffffffffffffffff\r\nhello", b"0x5\r\nhello\r\n", b"5 \r\nhello\r\n",
     b"5\nhello\n", b"5\r\nhelloXX", b"0\r\nx y: z\r\n\r\n"],
)  # fmt: skip
def test_bad_chunks_are_400(end: bytes, size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(chunked(b"abc", end=end) + GET, size))
            (answer,) = await client.rest()
            assert (answer.status, answer.closes) == (400, True)
            assert "not a valid HTTP/1.1 request" in answer.error
            assert server.asked == ["/echo"]  # which was told, and answered in its own dialect

    play(scene)


def test_bad_chunks_of_a_request_that_waits_for_its_turn() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow") + chunked(b"abc", end=b"zz\r\n") + GET)
            server.going.set()
            assert [answer.status for answer in await client.rest()] == [200, 400]

    play(scene)


@pytest.mark.parametrize("end", [b"5;" + b"x" * 100_000, b"0\r\nx: " + b"x" * 100_000, b"0\r\n" + b"x: y\r\n" * 20_000])
def test_what_is_around_chunks_has_a_size(end: bytes) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(chunked(b"abc", end=end), 1000))
            (answer,) = await client.rest()
            assert answer.status == 400
            assert f"{LIMIT} bytes" in answer.error

    play(scene)


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
def test_garbage_behind_a_request_is_answered_after_it(size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(post(b"a", "/slow") + post(b"b") + b"\x00garbage\r\n\r\n" + GET, size))
            server.going.set()
            answers = await client.rest()
            assert [answer.status for answer in answers] == [200, 200, 400]
            assert [answer.closes for answer in answers] == [False, False, True]
            assert server.counted == [("other", 400)]

    play(scene)
