"""Many verifying clients at once, and their record of statuses, latencies and wrong vectors."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import numpy as np

from benchmarks.lib.texts import QUERY_TOKENS, texts
from benchmarks.soak.slo import Objective
from benchmarks.soak.verifying_client import Client, matches
from embert.engine import load_model

__all__ = ["Clients"]


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
        self.good: list[tuple[float, float]] = []  # when each request that got a 200 was sent and answered
        self.stopped = False

    async def learn(self) -> None:
        """Ask for the vector of every text by itself, before any fault."""
        client = Client(self.port)
        rows = []
        for text in self.texts:
            answer = await client.embed([text])
            assert answer.vectors is not None
            rows.append(answer.vectors[0])
        self.expected = np.stack(rows)
        client.close()

    async def run(self, seed: int, pause_s: float, largest: int, **headers: str) -> None:
        """Run one client until `stopped`: requests of 1 to `largest` texts, with `pause_s` between them."""
        client, random = Client(self.port), np.random.default_rng(seed)
        while not self.stopped:
            chosen = random.integers(0, len(self.texts), int(random.integers(1, largest + 1)))
            sent = time.monotonic()
            answer = await client.embed([self.texts[index] for index in chosen], **headers)
            answered = time.monotonic()
            self.statuses[answer.status] += 1
            self.slowest_s = max(self.slowest_s, answered - sent)
            if answer.status == 200:
                self.wrong += not matches(answer, self.expected[chosen])
                self.good.append((sent, answered))
            await asyncio.sleep(pause_s if answer.status == 200 else max(0.05, pause_s))
        client.close()

    def objectives(self, *allowed: int) -> list[Objective]:
        """Return the objectives of every answer: only `allowed` statuses, and no wrong vector."""
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        promised = f"{' and '.join(map(str, allowed))} only"
        return [
            Objective("answers", statuses, promised, kept=set(self.statuses) <= set(allowed)),
            Objective("wrong vectors", str(self.wrong), "0", kept=self.wrong == 0),
        ]
