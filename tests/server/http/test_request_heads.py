"""What is wrong with a request's head is answered once, and requests for another protocol stay HTTP/1.1."""

from __future__ import annotations

import json

import pytest

from embert.server.http.protocol import HEAD_TIMEOUT_S
from tests.server.http.echo_server import GET, H2C, INNER, LIMIT, chunked, cut, play, post, serving, skip


def head_of(size: int) -> bytes:
    start, end = b"POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\nx-filler: ", b"\r\n\r\n"
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_a_head_has_a_size_in_one_piece_or_many(piece: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            for _ in range(2):  # the connection stays good
                answer = await client.ask(*cut(head_of(LIMIT - 20) + b"12345", piece))
                assert (answer.status, answer.body) == (200, b"/echo 12345")
            client = await server.connect()
            await client.send(*cut(head_of(LIMIT + 200) + b"12345", piece))
            (answer,) = await client.rest()
            assert (answer.status, answer.closes) == (431, True)
            assert json.loads(answer.body)["error_type"] == "Validation"
            assert f"{LIMIT} bytes" in answer.error
            assert server.counted == [("other", 431)]

    play(scene)


def test_a_head_that_never_ends_is_not_kept() -> None:
    async def scene() -> None:
        async with serving() as server:
            for pieces in ([b"GET / HTTP/1.1\r\nx: ", *[b"x" * 1000] * 5], [b"GET /" + b"x" * 100_000]):
                client = await server.connect()
                await client.send(*pieces)
                assert [answer.status for answer in await client.rest()] == [431]
            assert server.counted == [("other", 431)] * 2

    play(scene)


def test_a_large_body_is_not_a_large_head() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            for _ in range(2):
                assert len((await client.ask(post(b"x" * 50_000))).body) == 50_006
            assert not server.counted

    play(scene)


def test_a_slow_head() -> None:
    async def scene() -> None:
        async with serving() as server:
            slow, quick = await server.connect(), await server.connect()
            await slow.send(b"GET / HTTP/1.1\r\nhost:")
            await skip(HEAD_TIMEOUT_S / 2)
            await slow.send(b" h\r\n")  # the time is the whole head's
            assert (await quick.ask(GET[:20], GET[20:])).status == 200
            await skip(HEAD_TIMEOUT_S / 2 + 1)
            (answer,) = await slow.rest()
            assert (answer.status, answer.closes) == (408, True)
            assert "20 s" in answer.error
            await skip(HEAD_TIMEOUT_S)
            assert await quick.is_open()  # the time was the head's, not the connection's
            assert server.counted == [("other", 408)]

    play(scene)


TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(50)
WRONG = {
    "TLS": (TLS_HELLO, "not a valid HTTP/1.1 request"),
    "HTTP/2 with prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), "HTTP/2"),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nhost: h\r\n\r\n", "HTTP/2.0"),
    "HTTP/0.9": (b"GET /\r\n\r\n", "HTTP/0.9"),
    "no method": (b"BREWTEA / HTTP/1.1\r\nhost: h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "CONNECT": (b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n\r\n" + GET, "CONNECT is for proxies"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "one `Host`; this one has 0"),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", "one `Host`; this one has 2"),
    "two hosts of HTTP/1.0": (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "one `Host`; this one has 2"),
    "a host with a space": (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", "`Host` must be"),
    "a host with a path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", "`Host` must be"),
    "a host with a user": (b"GET / HTTP/1.1\r\nhost: a@b\r\n\r\n", "`Host` must be"),
    "two lengths": (post(b"12345", "/echo", b"content-length: 4"), "Content-Length"),
    "a length below nothing": (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n", "Content-Length"),
    "length and chunks": (post(b"0\r\n\r\n", "/echo", b"transfer-encoding: chunked"), "Transfer-Encoding"),
    "chunks and length": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        "Content-Length",
    ),
    "another coding": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "`Transfer-Encoding` can be `chunked`",
    ),
    "chunked twice": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding",
    ),
    "a target that is none": (b"GET h:80 HTTP/1.1\r\nhost: h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "a target without a host": (b"GET http:///x HTTP/1.1\r\nhost: h\r\n\r\n", "target must be a path"),
    "a target that is not ASCII": (b"GET /\xc3\xa9 HTTP/1.1\r\nhost: h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "a space before a colon": (b"GET / HTTP/1.1\r\nhost : h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "a folded header": (b"GET / HTTP/1.1\r\nhost: h\r\nx: a\r\n b\r\n\r\n", "not a valid HTTP/1.1 request"),
}


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_heads_are_answered_once(name: str, size: int) -> None:
    async def scene() -> None:
        sent, said = WRONG[name]
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(sent, size))
            (answer,) = await client.rest()
            assert (answer.status, answer.closes) == (400, True)
            assert b"application/json" in answer.head
            assert json.loads(answer.body)["error_type"] == "Validation"
            assert said in answer.error
            assert server.counted == [("other", 400)]
            assert not server.asked

    play(scene)


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nhost:\r\n\r\n", b"\r\n\r\nGET / HTTP/1.1\r\nhost: h\r\n\r\n",
     b"GET http://other HTTP/1.1\r\nhost: h\r\n\r\n", b"GET / HTTP/1.1\r\nhost: [::1]:80 \r\n\r\n",
     b"GET http://other/ HTTP/1.1\r\nHOST: under_score.example:8080\r\n\r\n"],
)  # fmt: skip
def test_heads_that_are_not_wrong(head: bytes) -> None:
    async def scene() -> None:
        async with serving() as server:
            answer = await (await server.connect()).ask(head)
            assert (answer.status, answer.body) == (200, b"/ ")

    play(scene)


def test_errors_before_the_app_speak_the_routes_dialect() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            answer = await client.ask(b"POST /v1/embeddings HTTP/1.1\r\n\r\n")
            assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"

    play(scene)


# --- requests that ask for another protocol ---

UPGRADES = {
    "h2c": H2C,
    "websocket": (b"Connection: Upgrade", b"Upgrade: websocket"),
    "TLS": (b"Connection: keep-alive, upgrade", b"Upgrade: TLS/1.0"),
    "in two headers": (b"Upgrade: h2c", b"Connection: Upgrade", b"Connection: keep-alive", b"Upgrade: websocket"),
}


@pytest.mark.parametrize("size", [1 << 20, 7, 1], ids=["whole", "in sevens", "byte by byte"])
@pytest.mark.parametrize("name", UPGRADES)
def test_an_upgrade_is_ignored_and_the_body_stays_a_body(name: str, size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            asks = post(INNER, "/echo", *UPGRADES[name])
            await client.send(*cut(asks + asks.replace(b"/echo", b"/next"), size))
            for path in (b"/echo", b"/next"):
                answer = await client.answer()
                assert (answer.status, answer.body, answer.closes) == (200, path + b" " + INNER, False)
                assert b"upgrade" not in answer.head.lower()
            assert await client.is_open()
            assert server.asked == ["/echo", "/next", "/livez"]

    play(scene)


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
def test_an_upgrade_with_chunks(size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            asks = chunked(b"abc", INNER).replace(b"\r\n\r\n", b"\r\n" + b"\r\n".join(H2C) + b"\r\n\r\n", 1)
            assert (await client.ask(*cut(asks, size))).body == b"/echo abc" + INNER
            assert await client.is_open()

    play(scene)


def test_an_upgrade_that_waits_for_continue_or_closes() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            asks = post(b"abc", "/echo", b"Expect: 100-continue", b"Connection: Upgrade, close", b"Upgrade: h2c")
            await client.send(asks[:-3])
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"abc" + INNER)
            (answer,) = await client.rest()
            assert (answer.body, answer.closes) == (b"/echo abc", True)
            assert server.asked == ["/echo"]

    play(scene)
