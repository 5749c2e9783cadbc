"""The strict reader of requests."""

from __future__ import annotations

import pytest

from tests.fuzz.reading import End, read

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def head(*fields: bytes) -> bytes:
    return b"\r\n".join((b"POST /embed HTTP/1.1", b"Host: x", *fields, b"", b""))


def test_requests_are_counted_by_their_framing() -> None:
    chunked = head(b"Transfer-Encoding: chunked") + b"3;a=b\r\nabc\r\n0\r\n\r\n"
    reading = read(GET + head(b"Content-Length: %d" % len(GET)) + GET + chunked + b"\r\n" + GET)
    assert [request.method for request in reading.requests] == ["GET", "POST", "POST", "GET"]
    assert reading.end is End.CLEAN
    assert not any(request.doubts for request in reading.requests)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0"])
def test_an_upgrade_changes_no_framing(upgrade: bytes) -> None:
    fields = (b"Connection: Upgrade", b"Upgrade: " + upgrade, b"Content-Length: %d" % len(GET))
    assert len(read(head(*fields) + GET).requests) == 1


def test_where_a_stream_ends() -> None:
    assert read(GET[:-1]).end is End.HEAD
    assert read(head(b"Content-Length: 5") + b"1234").end is End.BODY
    assert read(head(b"Transfer-Encoding: chunked") + b"4\r\nab").end is End.BODY
    assert read(head(b"Transfer-Encoding: chunked") + b"0\r\nx: y\r\n").end is End.BODY
    closing = read(head(b"Connection: close") + GET)
    assert (len(closing.requests), closing.end) == (1, End.LAST)
    assert read(b"GET / HTTP/1.0\r\n\r\n" + GET).end is End.LAST


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /\r\nHost: x\r\n\r\n",
        head(b"Host: y"),
        head(b"x : y"),
        head(b"no colon"),
        head(b"Content-Length: +5") + b"12345",
        head(b"Content-Length: 5, 6"),
        head(b"Transfer-Encoding: identity"),
        head(b"Transfer-Encoding: chunked, chunked"),
        head(b"Transfer-Encoding:\x0bchunked"),
        head(b"Transfer-Encoding: chunked") + b"zz\r\n",
        head(b"Transfer-Encoding: chunked") + b"+3\r\nabc\r\n0\r\n\r\n",
        head(b"Transfer-Encoding: chunked") + b"3\r\nabcd\r\n0\r\n\r\n",
        head(b"Transfer-Encoding: chunked") + b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_what_must_be_refused(stream: bytes) -> None:
    reading = read(GET + stream)
    assert (len(reading.requests), reading.end) == (1, End.BROKEN)
    assert reading.why


@pytest.mark.parametrize(
    "stream",
    [
        GET.replace(b"\r\n", b"\n"),
        head(b"x-folded: a\r\n b"),
        head(b"x: a\x00b"),
        head(b"Content-Length: 0", b"Content-Length: 0"),
        head(b"Content-Length: 99", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
        b"BREW /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        head(b"Transfer-Encoding: chunked") + b"3\nabc\r\n0\r\n\r\n",
    ],
)
def test_what_may_be_refused_is_read_one_way(stream: bytes) -> None:
    (request,) = read(stream).requests
    assert request.doubts
    assert request.end == len(stream)


def test_lengths_win_over_nothing_and_chunks_over_lengths() -> None:
    both = read(head(b"Content-Length: 3", b"Transfer-Encoding: chunked") + b"0\r\n\r\n" + GET)
    assert [request.must_close for request in both.requests] == [True]  # what comes after is not read
