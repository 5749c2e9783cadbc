"""A request on its way through the engines, and the vectors that come back for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import Encoded
from embert.server.api.input.request_options import RequestOptions
from embert.server.ipc.messages import TOKENS, EncodeRequest, Part

__all__ = ["Answer", "PendingRequest", "Receive"]

Receive = Callable[[], Awaitable[Any]]  # ASGI's


@dataclass(slots=True)
class Answer:
    """Vectors of one request, float32 [n, d] or for token vectors [T, hidden_size], and how long they took."""

    vectors: npt.NDArray[np.float32]
    queue_s: float
    inference_s: float


@dataclass(slots=True, eq=False)
class PendingRequest:
    """An admitted request that has no answer yet."""

    id: int  # changes when an engine is lost
    message: EncodeRequest
    encoded: Encoded
    future: asyncio.Future[Answer]
    receive: Receive
    options: RequestOptions
    engine: int = -1  # the index of the engine that has it; -1: none
    vectors: npt.NDArray[np.float32] | None = None  # of a request whose answer comes in parts
    texts_left: int = 0
    queue_s: float = math.inf
    inference_s: float = 0.0
    losses: int = 0  # engines lost while they had it
    watcher: asyncio.Task[None] | None = None

    def add(self, part: Part) -> Answer | None:
        """Take some of the vectors; the answer once all are here."""
        self.queue_s = min(self.queue_s, part.queue_s)
        self.inference_s += part.inference_s
        vectors = np.frombuffer(part.vectors, np.float32)
        lengths = self.encoded.lengths
        if self.message.task == TOKENS:
            rows = int(lengths[part.first_text : part.first_text + part.texts].sum())
            first = int(lengths[: part.first_text].sum())
            total = self.encoded.tokens
        else:
            rows, first, total = part.texts, part.first_text, len(lengths)
        vectors = vectors.reshape(rows, -1)
        if part.texts == len(lengths):
            return Answer(vectors, self.queue_s, self.inference_s)
        if self.vectors is None:
            self.vectors = np.empty((total, vectors.shape[1]), np.float32)
            self.texts_left = len(lengths)
        self.vectors[first : first + rows] = vectors
        self.texts_left -= part.texts
        return None if self.texts_left else Answer(self.vectors, self.queue_s, self.inference_s)

    def restart(self, request_id: int) -> None:
        """Forget the parts that a lost engine answered. Late ones of them carry the old id, and so do not count."""
        self.id = self.message.id = request_id
        self.vectors, self.texts_left = None, 0
