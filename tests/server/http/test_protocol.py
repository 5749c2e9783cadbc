"""Heads, bodies, chunks, upgrades, and several requests on one connection."""

from __future__ import annotations

import json
import socket
import struct

import pytest

from embert.server.http.protocol import HEAD_TIMEOUT_S
from tests.server.http.echo_server import (
    GET,
    H2C,
    INNER,
    LIMIT,
    Serving,
    chunked,
    cut,
    post,
    scene,
    skip,
    wait_until,
)

in_pieces = pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])


# --- heads ---


def head_of(size: int) -> bytes:
    start, end = b"POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\nx-filler: ", b"\r\n\r\n"
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("piece", [1 << 20, 1000])
@scene()
async def test_a_head_has_a_size_in_one_piece_or_many(server: Serving, piece: int) -> None:
    client = await server.connect()
    for _ in range(2):  # the connection stays good
        response = await client.ask(*cut(head_of(LIMIT - 20) + b"12345", piece))
        assert (response.status, response.body) == (200, b"/echo 12345")
    client = await server.connect()
    await client.send(*cut(head_of(LIMIT + 200) + b"12345", piece))
    (response,) = await client.rest()
    assert (response.status, response.closes) == (431, True)
    assert json.loads(response.body)["error_type"] == "Validation"
    assert str(LIMIT) in response.error
    for pieces in ([b"GET / HTTP/1.1\r\nx: ", *[b"x" * 1000] * 5], [b"GET /" + b"x" * 100_000]):  # which never end
        client = await server.connect()
        await client.send(*pieces)
        assert [response.status for response in await client.rest()] == [431]
    assert server.counted == [("other", 431)] * 3


@scene()
async def test_a_slow_head(server: Serving) -> None:
    slow, quick = await server.connect(), await server.connect()
    await slow.send(b"GET / HTTP/1.1\r\nhost:")
    await skip(HEAD_TIMEOUT_S / 2)
    await slow.send(b" h\r\n")  # the time is the whole head's
    assert (await quick.ask(GET[:20], GET[20:])).status == 200
    await skip(HEAD_TIMEOUT_S / 2 + 1)
    (response,) = await slow.rest()
    assert (response.status, response.closes) == (408, True)
    assert f"{HEAD_TIMEOUT_S:g} s" in response.error
    await skip(HEAD_TIMEOUT_S)
    assert await quick.is_open()  # the time was the head's, not the connection's
    assert server.counted == [("other", 408)]


TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(50)
# What the message names.
WRONG = {
    "TLS": (TLS_HELLO, "HTTP/1.1"),
    "HTTP/2 with prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), "HTTP/2"),
    "HTTP/0.9": (b"GET /\r\n\r\n", "HTTP/0.9"),
    "no method": (b"BREWTEA / HTTP/1.1\r\nhost: h\r\n\r\n", "HTTP/1.1"),
    "CONNECT": (b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n\r\n" + GET, "CONNECT"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "`Host`; this one has 0"),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", "`Host`; this one has 2"),
    "two hosts of HTTP/1.0": (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "`Host`; this one has 2"),
    "a host with a space": (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", "`Host`"),
    "a host with a path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", "`Host`"),
    "a host with a user": (b"GET / HTTP/1.1\r\nhost: a@b\r\n\r\n", "`Host`"),
    "two lengths": (post(b"12345", "/echo", b"content-length: 4"), "Content-Length"),
    "a length below nothing": (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n", "Content-Length"),
    "length and chunks": (post(b"0\r\n\r\n", "/echo", b"transfer-encoding: chunked"), "Transfer-Encoding"),
    "another coding": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "`Transfer-Encoding` can be `chunked`",
    ),
    "chunked twice": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding",
    ),
    "a target without a host": (b"GET http:///x HTTP/1.1\r\nhost: h\r\n\r\n", "target"),
    "a target that is not ASCII": (b"GET /\xc3\xa9 HTTP/1.1\r\nhost: h\r\n\r\n", "HTTP/1.1"),
    "a space before a colon": (b"GET / HTTP/1.1\r\nhost : h\r\n\r\n", "HTTP/1.1"),
    "a folded header": (b"GET / HTTP/1.1\r\nhost: h\r\nx: a\r\n b\r\n\r\n", "HTTP/1.1"),
}


@in_pieces
@pytest.mark.parametrize("name", WRONG)
@scene()
async def test_wrong_heads_get_one_response(server: Serving, name: str, size: int) -> None:
    sent, named = WRONG[name]
    client = await server.connect()
    await client.send(*cut(sent, size))
    (response,) = await client.rest()
    assert (response.status, response.closes) == (400, True)
    assert b"application/json" in response.head
    assert json.loads(response.body)["error_type"] == "Validation"
    assert named in response.error
    assert server.counted == [("other", 400)]
    assert not server.asked


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nhost:\r\n\r\n", b"\r\n\r\nGET / HTTP/1.1\r\nhost: h\r\n\r\n",
     b"GET http://other HTTP/1.1\r\nhost: h\r\n\r\n", b"GET / HTTP/1.1\r\nhost: [::1]:80 \r\n\r\n",
     b"GET http://other/ HTTP/1.1\r\nHOST: under_score.example:8080\r\n\r\n"],
)  # fmt: skip
@scene()
async def test_valid_heads(server: Serving, head: bytes) -> None:
    response = await (await server.connect()).ask(head)
    assert (response.status, response.body) == (200, b"/ ")


@scene()
async def test_errors_before_the_app_have_the_format_of_the_route(server: Serving) -> None:
    client = await server.connect()
    response = await client.ask(b"POST /v1/embeddings HTTP/1.1\r\n\r\n")
    assert json.loads(response.body)["error"]["type"] == "invalid_request_error"


# --- requests to upgrade to another protocol ---

UPGRADES = {
    "h2c": H2C,
    "websocket": (b"Connection: Upgrade", b"Upgrade: websocket"),
    "TLS": (b"Connection: keep-alive, upgrade", b"Upgrade: TLS/1.0"),
    "two headers": (b"Upgrade: h2c", b"Connection: Upgrade", b"Connection: keep-alive", b"Upgrade: websocket"),
}


@in_pieces
@pytest.mark.parametrize("name", UPGRADES)
@scene()
async def test_an_upgrade_is_ignored_and_the_body_stays_a_body(server: Serving, name: str, size: int) -> None:
    client = await server.connect()
    in_chunks = chunked(b"abc", INNER).replace(b"\r\n\r\n", b"\r\n" + b"\r\n".join(UPGRADES[name]) + b"\r\n\r\n", 1)
    await client.send(*cut(post(INNER, "/echo", *UPGRADES[name]) + in_chunks, size))
    for body in (INNER, b"abc" + INNER):
        response = await client.response()
        assert (response.status, response.body, response.closes) == (200, b"/echo " + body, False)
        assert b"upgrade" not in response.head.lower()
    assert await client.is_open()
    assert server.asked == ["/echo", "/echo", "/livez"]


@scene()
async def test_an_upgrade_that_waits_for_continue_or_closes(server: Serving) -> None:
    client = await server.connect()
    request = post(b"abc", "/echo", b"Expect: 100-continue", b"Connection: Upgrade, close", b"Upgrade: h2c")
    await client.send(request[:-3])
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await client.send(b"abc" + INNER)
    (response,) = await client.rest()
    assert (response.body, response.closes) == (b"/echo abc", True)
    assert server.asked == ["/echo"]


# --- chunks ---


@in_pieces
@scene()
async def test_a_body_in_chunks(server: Serving, size: int) -> None:
    client = await server.connect()
    whole = chunked(b"abc", b"d" * 300, end=b"0;x=y\r\nhost: other\r\nx-request-id: no\r\n\r\n")
    assert (await client.ask(*cut(whole, size))).body == b"/echo abc" + b"d" * 300
    assert await client.is_open()


@in_pieces
@pytest.mark.parametrize(
    "end",
    [b"zz\r\nhello\r\n", b"-5\r\nhello\r\n", b"ffffffffffffffffff\r\nhello", b"0x5\r\nhello\r\n", b"5 \r\nhello\r\n",
     b"5\nhello\n", b"5\r\nhelloXX", b"0\r\nx y: z\r\n\r\n"],
)  # fmt: skip
@scene()
async def test_bad_chunks_are_400(server: Serving, end: bytes, size: int) -> None:
    client = await server.connect()
    await client.send(*cut(post(b"a", "/slow") + chunked(b"abc", end=end) + GET, size))
    server.going.set()
    responses = await client.rest()
    assert [(response.status, response.closes) for response in responses] == [(200, False), (400, True)]
    assert server.asked == ["/slow", "/echo"]  # the app sends the error, in the format of its route


@pytest.mark.parametrize("end", [b"5;" + b"x" * 100_000, b"0\r\nx: " + b"x" * 100_000, b"0\r\n" + b"x: y\r\n" * 20_000])
@scene()
async def test_chunk_extensions_and_trailers_have_a_size(server: Serving, end: bytes) -> None:
    client = await server.connect()
    await client.send(*cut(chunked(b"abc", end=end), 1000))
    (response,) = await client.rest()
    assert response.status == 400
    assert str(LIMIT) in response.error


# --- several requests on one connection, before the first response ---


@scene()
async def test_a_known_head_gives_the_same_request_in_any_pieces(server: Serving) -> None:
    """The second time and later, a head in one packet with its body does not pass the parser."""
    first, second = await server.connect(), await server.connect()
    for body in (b"abcd", b"efgh", b"", b"", b"x" * 50_000, b"y" * 50_000):
        for client in (first, second):
            assert (await client.ask(post(body))).body == b"/echo " + body
    known = post(b"abcd")
    assert (await first.ask(known[:-2], known[-2:])).body == b"/echo abcd"
    await first.send(known + post(b"1234") + known[:30])
    assert [(await first.response()).body for _ in range(2)] == [b"/echo abcd", b"/echo 1234"]
    assert (await first.ask(known[30:])).body == b"/echo abcd"
    assert await first.is_open()
    assert not server.counted  # a large body is not a large head


@pytest.mark.parametrize("size", [1 << 20, 4999, 61])
@scene()
async def test_pipelined_requests_get_responses_in_order(server: Serving, size: int) -> None:
    client = await server.connect()
    bodies = [b"%d" % number for number in range(200)]
    whole = b"".join(post(body) if number % 2 else chunked(body) for number, body in enumerate(bodies))
    await client.send(*cut(whole, size))
    for body in bodies:
        assert (await client.response()).body == b"/echo " + body
    assert await client.is_open()


@in_pieces
@scene()
async def test_garbage_after_a_request_gets_its_response_after_it(server: Serving, size: int) -> None:
    client = await server.connect()
    await client.send(*cut(post(b"a", "/slow") + post(b"b") + b"\x00garbage\r\n\r\n" + GET, size))
    server.going.set()
    responses = await client.rest()
    assert [response.status for response in responses] == [200, 200, 400]
    assert [response.closes for response in responses] == [False, False, True]
    assert server.counted == [("other", 400)]


@scene()
async def test_a_long_body_is_not_part_of_the_next_head(server: Serving) -> None:
    client = await server.connect()
    second, third = post(b"b" * 20_000), post(b"c" * 50)
    await client.send(post(b"x" * 100_000, "/slow") + second[:40])
    await skip(HEAD_TIMEOUT_S / 2)
    await client.send(second[40:] + third[:30])
    await client.send(third[30:])
    await skip(HEAD_TIMEOUT_S + 1)  # a head that waits unread is not slow
    server.going.set()
    assert [len((await client.response()).body) for _ in range(3)] == [100_006, 20_006, 56]


@scene()
async def test_pipelined_requests_are_not_read_without_end(server: Serving) -> None:
    client = await server.connect()
    await client.send(post(b"a", "/slow"))
    client.writer.write(post(b"x" * 100_000) * 640)
    for _ in range(10):
        await skip(1)
    assert client.writer.transport.get_write_buffer_size() > 32_000_000  # of 64, but for what the kernel holds
    server.going.set()


@scene()
async def test_a_client_that_goes_on_after_its_last_request_gets_the_response(server: Serving) -> None:
    """Closing at once would reset the connection, and the client would lose what it has not read yet."""
    client = await server.connect()
    await client.send(post(b"a" * 20_000_000, "/slow", b"connection: close"))
    client.writer.write(post(b"b" * 50_000_000))
    await wait_until(lambda: client.writer.transport.get_write_buffer_size() <= 50_000_000)  # some of it has arrived
    server.going.set()
    assert len((await client.response()).body) == 20_000_006


@scene()
async def test_what_comes_after_the_last_response_began_does_not_cut_it_off(server: Serving) -> None:
    client = await server.connect()
    await client.send(post(b"a" * 20_000_000, "/slow", b"connection: close"))
    server.going.set()
    started = await client.reader.readexactly(1)
    await client.send(post(b"b"))
    head = started + await client.reader.readuntil(b"\r\n\r\n")
    assert len(head + await client.reader.read(-1)) == len(head) + 20_000_006


@pytest.mark.parametrize("leave", ["FIN", "RST"])
@pytest.mark.parametrize(
    "more", [post(b"b"), post(b"b") + post(b"c" * 500_000), post(b"b")[:30], b"G", b"\r\n"], ids=len
)
@scene()
async def test_a_pipelining_client_that_leaves_is_noticed(server: Serving, more: bytes, leave: str) -> None:
    client = await server.connect()
    await client.send(post(b"a", "/slow"), more[:1], more[1:200_000])
    await wait_until(lambda: server.asked)
    if leave == "RST":
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.writer.transport.abort()

    def has_left() -> bool:
        server.connections.check_unread()
        return bool(server.left)

    await wait_until(has_left)
    await server.count(0)
    assert server.asked == ["/slow"]
    assert not server.connections.unread


@scene()
async def test_a_pipelining_client_that_stays_is_served(server: Serving) -> None:
    client = await server.connect()
    await client.send(post(b"a", "/slow"), post(b"b") + post(b"c" * 100_000), post(b"d"))
    await wait_until(lambda: server.connections.unread)
    server.connections.check_unread()
    server.going.set()
    bodies = [(await client.response()).body for _ in range(4)]
    assert bodies == [b"/slow a", b"/echo b", b"/echo " + b"c" * 100_000, b"/echo d"]
    assert not server.connections.unread
