"""Whatever a client sends ends in bounded time, and the answers depend on the bytes, not on the packets."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from embert.server.http import protocol
from embert.server.http.connections import IDLE_TIMEOUT_S
from embert.server.http.protocol import HEAD_TIMEOUT_S
from tests.server.http.echo_server import GET, H2C, INNER, Clock, Serving, chunked, cut, play, post, serving

TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"0\r\n\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"\xff", b"HTTP/1.0", b"GET ", b"\r\n\r\n",
    b"Connection: close\r\n", b"Host: evil\r\n", b"Content-Length: 99999999\r\n", b"5\r\nhello\r\n", b"CONNECT ",
)  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    paths = ("/echo", "/early", "/v1/echo")
    parts = [
        chance.choice(
            (
                post(INNER, chance.choice(paths)),
                chunked(b"abc", INNER, path=chance.choice(paths)),
                post(INNER, "/echo", *H2C),
                GET,
            )
        )
        for _ in range(chance.choice((1, 1, 2, 5)))
    ]
    data = bytearray(b"".join(parts))
    for _ in range(chance.choice((0, 1, 1, 2, 3, 6))):
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.choice((1, 2, 8, 30))]
            case 2:
                data[at:at] = chance.choice(TOKENS)
            case 3:
                line = data.find(b"\r\n", at)
                data[line + 2 : line + 2] = chance.choice(TOKENS)
        data = data or bytearray(b"G")
    return bytes(data)


class Pipe(asyncio.Transport):
    """What a client sends, piece by piece, into a protocol without a socket."""

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


@pytest.mark.parametrize("seed", range(4))
def test_anything_is_answered_the_same_way_however_it_is_cut(seed: int) -> None:
    chance = random.Random(seed)

    async def exchange(make: Callable[[], asyncio.Protocol], server: Serving, pieces: list[bytes]) -> list[Any]:
        pipe = Pipe(make())
        await pipe.feed(pieces)
        for seconds in (HEAD_TIMEOUT_S, IDLE_TIMEOUT_S, protocol.LINGER_S):
            for _ in range(10):
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Clock)
            loop.skipped_s += seconds + 1
            for _ in range(10):
                await asyncio.sleep(0)
            if server.left or not len(server.connections):
                break
        waiting = len(server.connections)
        pipe.abort()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not len(server.connections)
        written = pipe.written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        found = re.findall(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(?:[^\r]+\r\n)*?content-length: (\d+)\r\n", written)
        # Errors have the dialect of as much of the path as was known.
        return [*((int(status), int(length) if status == b"200" else 0) for status, length in found), waiting]

    async def scene() -> None:
        async with serving() as server:
            for _ in range(150):
                data = mutated(chance)
                whole = await exchange(server.make, server, [data])
                statuses = [status for status, _ in whole[:-1]]
                assert set(statuses) <= {200, 400, 408, 431}, data
                assert set(statuses[:-1]) <= {200}, data  # whatever is wrong is the last
                places = sorted(chance.sample(range(len(data) + 1), min(len(data), chance.choice((1, 5, 40)))))
                pieces = [data[a:b] for a, b in itertools.pairwise((0, *places, len(data))) if a < b]
                for cuts in (pieces, cut(data, 1)):
                    found = await exchange(server.make, server, cuts)
                    # An answer before the request's end is the last one; in one packet, the end is there already.
                    early = b"/early" in data and whole[: len(found) - 1] == found[:-1]
                    assert found == whole or early, (data, cuts)

    play(scene)
