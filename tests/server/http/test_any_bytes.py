"""Whatever a client sends ends in bounded time, and the responses depend on the bytes, not on the packets."""

from __future__ import annotations

import asyncio
import itertools
import re
from random import Random
from typing import Any

from embert.server.http import protocol
from embert.server.http.protocol import HEAD_TIMEOUT_S
from tests.server.http.echo_server import GET, H2C, IDLE_S, INNER, Clock, Serving, chunked, cut, post, scene

TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"0\r\n\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"\xff", b"HTTP/1.0", b"GET ", b"\r\n\r\n",
    b"Connection: close\r\n", b"Host: evil\r\n", b"Content-Length: 99999999\r\n", b"5\r\nhello\r\n", b"CONNECT ",
)  # fmt: skip


def mutated(random: Random) -> bytes:
    parts = []
    for _ in range(random.choice((1, 1, 2, 5))):
        path = random.choice(("/echo", "/early", "/v1/echo"))
        requests = (post(INNER, path), chunked(b"abc", INNER, path=path), post(INNER, "/echo", *H2C), GET)
        parts.append(random.choice(requests))
    data = bytearray(b"".join(parts))
    for _ in range(random.choice((0, 1, 1, 2, 3, 6))):
        position = random.randrange(len(data))
        match random.randrange(4):
            case 0:
                data[position] = random.randrange(256)
            case 1:
                del data[position : position + random.choice((1, 2, 8, 30))]
            case 2:
                data[position:position] = random.choice(TOKENS)
            case 3:
                line = data.find(b"\r\n", position)
                data[line + 2 : line + 2] = random.choice(TOKENS)
        data = data or bytearray(b"G")
    return bytes(data)


class Pipe(asyncio.Transport):
    """Sends pieces of data into a protocol, without a socket."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol, self._paused, self._closing = protocol, False, False
        self.written = b""
        self.ended = False
        protocol.connection_made(self)

    async def feed(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            for _ in range(1000):
                if not self._paused or self._closing:
                    break
                await asyncio.sleep(0)
            else:
                raise AssertionError("reading stopped for ever")
            if self._closing:
                return
            self._protocol.data_received(piece)
            await asyncio.sleep(0)

    def write(self, data: Any) -> None:
        assert not self.ended, "written after the end"
        self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = self.ended = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def exchange(server: Serving, pieces: list[bytes]) -> list[Any]:
    """Status and length of each response, and the number of connections that wait for more."""
    pipe = Pipe(server.make())
    await pipe.feed(pieces)
    for seconds in (HEAD_TIMEOUT_S, IDLE_S, protocol.LINGER_S):
        await rounds()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Clock)
        loop.skipped_s += seconds + 1
        await rounds()
        if server.left or not len(server.connections):
            break
    waiting = len(server.connections)
    pipe.abort()
    await rounds()
    assert not len(server.connections)
    written = pipe.written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    responses = re.findall(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(?:[^\r]+\r\n)*?content-length: (\d+)\r\n", written)
    # Errors have the format of as much of the path as was known.
    return [*((int(status), int(length) if status == b"200" else 0) for status, length in responses), waiting]


async def rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@scene()
async def test_the_response_is_the_same_for_any_pieces(server: Serving) -> None:
    random = Random(0)
    for _ in range(150):
        data = mutated(random)
        whole = await exchange(server, [data])
        statuses = [status for status, _ in whole[:-1]]
        assert set(statuses) <= {200, 400, 408, 431}, data
        assert set(statuses[:-1]) <= {200}, data  # only the last one can be an error
        edges = sorted(random.sample(range(len(data) + 1), min(len(data), random.choice((1, 5, 40)))))
        pieces = [data[a:b] for a, b in itertools.pairwise((0, *edges, len(data))) if a < b]
        for cuts in (pieces, cut(data, 1)):
            responses = await exchange(server, cuts)
            # A response before the request's end is the last one; in one packet, the end is there already.
            early = b"/early" in data and whole[: len(responses) - 1] == responses[:-1]
            assert responses == whole or early, (data, cuts)
