"""Clients that verify vectors, many at once, their record of statuses and latencies, and an objective's row."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.lib.texts import QUERY_TOKENS, texts
from embert.engine import load_model


@dataclass(frozen=True, slots=True)
class Objective:
    """One measured figure; `promised` is empty where it has no objective."""

    what: str
    measured: str
    promised: str = ""
    kept: bool = True


LOST = 0  # the status of a request whose connection broke
TOLERANCE = 1e-3  # the CPU encoder rounds differently in batches of other texts, by less than this


@dataclass(frozen=True, slots=True)
class Response:
    """The response to one request."""

    status: int
    vectors: npt.NDArray[np.float32] | None  # [texts, dimensions] of a 200


class Client:
    """One keep-alive connection, opened again after it breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def embed(self, texts: Sequence[str], **headers: str) -> Response:
        """POST /embed; the status is LOST when the connection breaks before the response is complete."""
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
            return Response(LOST, None)
        if status != 200:
            return Response(status, None)
        return Response(status, np.frombuffer(content, "<f4").reshape(len(texts), -1))

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


def matches(response: Response, expected: npt.NDArray[np.float32]) -> bool:
    """Return whether a 200 holds these vectors, float32 [texts, dimensions], within TOLERANCE."""
    vectors = response.vectors
    return (
        vectors is not None and vectors.shape == expected.shape and bool(np.abs(vectors - expected).max() < TOLERANCE)
    )


class Clients:
    """Clients that ask for texts whose vectors they know."""

    def __init__(self, port: int) -> None:
        tokenizer = load_model().transformer_folder / "tokenizer.json"
        self.port = port
        self.texts = [text.text for text in texts(QUERY_TOKENS, 256, tokenizer)]
        self.expected = np.empty((0, 0), np.float32)  # [texts, dimensions]
        self.statuses: Counter[int] = Counter()
        self.wrong = 0
        self.slowest_s = 0.0
        self.good: list[tuple[float, float]] = []  # when each request that got a 200 was sent and ended
        self.stopped = False

    async def learn(self) -> None:
        """Ask for the vector of every text by itself, before any fault."""
        client = Client(self.port)
        rows = []
        for text in self.texts:
            response = await client.embed([text])
            assert response.vectors is not None
            rows.append(response.vectors[0])
        self.expected = np.stack(rows)
        client.close()

    async def run(self, seed: int, pause_s: float, largest: int, **headers: str) -> None:
        """Run one client until `stopped`: requests of 1 to `largest` texts, with `pause_s` between them."""
        client, random = Client(self.port), np.random.default_rng(seed)
        while not self.stopped:
            chosen = random.integers(0, len(self.texts), int(random.integers(1, largest + 1)))
            sent = time.monotonic()
            response = await client.embed([self.texts[index] for index in chosen], **headers)
            ended = time.monotonic()
            self.statuses[response.status] += 1
            self.slowest_s = max(self.slowest_s, ended - sent)
            if response.status == 200:
                self.wrong += not matches(response, self.expected[chosen])
                self.good.append((sent, ended))
            await asyncio.sleep(pause_s if response.status == 200 else max(0.05, pause_s))
        client.close()

    def objectives(self, *allowed: int) -> list[Objective]:
        """Return the objectives of all responses: only `allowed` statuses, and no wrong vector."""
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        promised = f"{' and '.join(map(str, allowed))} only"
        return [
            Objective("responses", statuses, promised, kept=set(self.statuses) <= set(allowed)),
            Objective("wrong vectors", str(self.wrong), "0", kept=self.wrong == 0),
        ]
