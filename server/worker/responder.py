"""Turns the vectors of a batch into answers, and sends each to the API process that asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import Task
from embert.engine.errors import EncoderError
from embert.server.ipc.framing import Channel
from embert.server.ipc.messages import Part
from embert.server.worker.batching import Payload
from embert.server.worker.scheduler import Slice

__all__ = ["Responder"]

log = logging.getLogger(__name__)


class Responder:
    """Used by the device loop alone."""

    def __init__(self, send: Callable[[Channel, list[Part]], None], drop: Callable[[Hashable], None]) -> None:
        """`drop` removes the waiting texts of a request that has failed."""
        self._send, self._drop = send, drop

    def answer(
        self, slices: list[Slice], task: Any, vectors: npt.NDArray[np.float32], started: float, ended: float
    ) -> None:
        """Send the rows of `vectors`, float32 [texts, d] or [tokens, d], to the requests that they belong to.

        A row that is not finite fails its request, and no other.
        """
        sizes = [piece.tokens if task is Task.TOKENS else piece.stop - piece.start for piece in slices]
        all_finite = bool(np.isfinite(vectors.sum(dtype=np.float64)))
        outgoing: dict[Channel, list[Part]] = {}
        row = 0
        for piece, size in zip(slices, sizes, strict=True):
            payload: Payload = piece.request.payload
            rows = slice(row, row + size)
            row += size
            if not all_finite and not np.isfinite(vectors[rows]).all():
                self.fail([piece], EncoderError("the encoder returned a vector that is not finite"))
                continue
            answer = vectors[rows]
            if task is Task.EMBED and payload.dimensions:
                answer = answer[:, : payload.dimensions]
            part = Part(
                payload.id,
                piece.start,
                piece.stop - piece.start,
                answer.tobytes(),
                started - payload.admitted,
                ended - started,
            )
            outgoing.setdefault(payload.reply_to, []).append(part)
        for channel, parts in outgoing.items():
            self._send(channel, parts)

    def fail(self, slices: list[Slice], error: Exception) -> None:
        """Answer these requests with an error. Their other texts need not run."""
        log.error("%d request(s) failed: %s", len(slices), error)
        for piece in slices:
            payload: Payload = piece.request.payload
            self._drop(piece.request.key)
            part = Part(payload.id, piece.start, piece.stop - piece.start, b"", 0.0, 0.0, "backend", str(error))
            self._send(payload.reply_to, [part])
