"""A small HTTP server that is right, but for one planted fault: what the judge has to notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable

from tests.fuzz.reading import End, Request, read

__all__ = ["FAULTS", "serve"]


def answer(
    status: int, body: bytes, *, name: bytes | None = None, close: bool = False, length: int | None = None
) -> bytes:
    """The bytes of an answer."""
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    head %= (status, len(body) if length is None else length)
    if name is not None:
        head += b"x-request-id: %b\r\n" % name
    return head + (b"connection: close\r\n" if close else b"") + b"\r\n" + body


def error(status: int, *, name: bytes | None = None, close: bool = False) -> bytes:
    return answer(status, b'{"error":"no","error_type":"Validation"}', name=name, close=close)


def right(request: Request) -> bytes:
    """The answer of a server without fault."""
    if request.method not in ("GET", "HEAD", "POST"):
        return error(405, name=request.request_id, close=request.must_close)
    body = b"[[0.5,0.25]]" if request.method == "POST" else b'{"status":"ok"}'
    if request.method == "HEAD":
        return answer(200, b"", name=request.request_id, close=request.must_close, length=len(body))
    return answer(200, body, name=request.request_id, close=request.must_close)


Act = Callable[[asyncio.StreamWriter, Request], object]


def _writes(make: Callable[[Request], bytes]) -> Act:
    return lambda writer, request: writer.write(make(request))


def _replaces(old: bytes, new: bytes) -> Act:
    return _writes(lambda request: right(request).replace(old, new))


def _reset(writer: asyncio.StreamWriter, request: Request) -> None:
    del request
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


def _then_close(make: Callable[[Request], bytes]) -> Act:
    def act(writer: asyncio.StreamWriter, request: Request) -> None:
        writer.write(make(request))
        writer.close()

    return act


async def _twice(writer: asyncio.StreamWriter, request: Request) -> None:
    writer.write(right(request))
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(right(request))


# What is done to a POST that is whole, instead of `right`. The sentinel is a GET, which is served.
FAULTS: dict[str, Act] = {
    "right": _writes(right),
    "twice": _writes(lambda request: right(request) * 2),
    "twice, the second after a while": _twice,
    "never": lambda writer, request: None,
    "closed": lambda writer, request: writer.close(),
    "reset": _reset,
    "closed after a good answer": _then_close(right),
    "500": _writes(lambda request: error(500, name=request.request_id)),
    "501": _then_close(lambda request: error(501, name=request.request_id, close=True)),
    "another's": _writes(lambda request: answer(200, b"[[1]]", name=b"another")),
    "nobody's": _writes(lambda request: answer(200, b"[[1]]")),
    "refused": _writes(lambda request: error(400, name=request.request_id)),
    "not HTTP": _writes(lambda request: b"hello\r\n\r\n"),
    "HTTP/1.0": _replaces(b"HTTP/1.1", b"HTTP/1.0"),
    "without a length": _replaces(b"content-length", b"x-length"),
    "too short": _writes(lambda request: answer(200, b"[[1]]", name=request.request_id, length=50)),
    "too long": _writes(lambda request: right(request) + b"x"),
    "upgraded": _replaces(b"HTTP/1.1 200 X", b"HTTP/1.1 101 X\r\nupgrade: h2c"),
    "NaN": _replaces(b"0.5,0.25", b"0.5, NaN"),
    "not JSON": _replaces(b"[[0.5", b"[[[.5"),
    "an error of another shape": _writes(lambda request: answer(422, b'{"detail":"no"}', name=request.request_id)),
    "the body as a request": _writes(
        lambda request: right(request) + answer(200, b'{"status":"ok"}', name=b"smuggled")
    ),
}


@contextlib.asynccontextmanager
async def serve(fault: str, *, refuses: bool = True, wrong_after: int | None = None) -> AsyncIterator[tuple[str, int]]:
    """The address of a server with this fault.

    With `refuses` false, what is not HTTP ends the connection without a word. From the POST of number `wrong_after` on,
    vectors are wrong.
    """
    posts = 0
    handlers: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(converse(reader, writer))
        handlers.add(task)
        task.add_done_callback(handlers.discard)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer_all(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        stream, answered = b"", 0
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                stream += data
                reading = read(stream)
                for request in reading.requests[answered:]:
                    answered += 1
                    posts += request.method == "POST"
                    if wrong_after is not None and posts > wrong_after and request.method == "POST":
                        writer.write(answer(200, b"[[0.5,0.75]]", name=request.request_id))
                        continue
                    done = (FAULTS[fault] if request.method == "POST" else FAULTS["right"])(writer, request)
                    if asyncio.iscoroutine(done):
                        await done
                if reading.end is End.LAST:
                    break
                if reading.end is End.BROKEN:
                    if refuses:
                        writer.write(error(400, close=True))
                    break
            if not writer.is_closing():
                writer.write_eof()  # and read on: to close with data unread would reset the connection
                while await reader.read(65536):
                    pass

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        try:
            yield host, port
        finally:
            left = list(handlers)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def document() -> dict[str, object]:
    """The OpenAPI document of such a server."""
    schema = {"type": "object", "required": ["inputs"], "properties": {"inputs": {"type": "string", "minLength": 1}}}
    content = {"application/json": {"schema": schema, "example": {"inputs": "Hello, world"}}}
    found: dict[str, object] = json.loads(
        json.dumps({"paths": {"/embed": {"post": {"requestBody": {"content": content}}}, "/livez": {"get": {}}}})
    )
    return found
