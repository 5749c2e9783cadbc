"""A client that checks every 200 against the vectors that it expects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Answer", "Client", "matches"]

LOST = 0  # the status of a request whose connection broke
TOLERANCE = 1e-3  # the CPU encoder rounds differently in batches of other texts, by less than this


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    status: int
    vectors: npt.NDArray[np.float32] | None  # [texts, dimensions] of a 200


class Client:
    """One keep-alive connection, opened again after it breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def embed(self, texts: Sequence[str], **headers: str) -> Answer:
        """POST /embed; the status is LOST when the connection breaks before the answer is complete."""
        body = json.dumps({"inputs": list(texts)}).encode()
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        request = (
            f"POST /embed HTTP/1.1\r\nhost: localhost\r\naccept: application/octet-stream\r\n"
            f"content-length: {len(body)}\r\n{head}\r\n"
        ).encode() + body
        try:
            status, content = await self._exchange(request)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return Answer(LOST, None)
        if status != 200:
            return Answer(status, None)
        return Answer(status, np.frombuffer(content, "<f4").reshape(len(texts), -1))

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        content = await self._reader.readexactly(int(fields[b"content-length"]))
        if fields.get(b"connection") == b"close":
            self.close()
        return int(head[9:12]), content

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def matches(answer: Answer, expected: npt.NDArray[np.float32]) -> bool:
    """Return whether a 200 holds these vectors, float32 [texts, dimensions], within TOLERANCE."""
    found = answer.vectors
    return found is not None and found.shape == expected.shape and bool(np.abs(found - expected).max() < TOLERANCE)
