"""The latency breakdown of a request, for the headers of its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from embert.server.engine_client.pending import Answer

__all__ = ["LatencyBreakdown"]

_HEAD = (
    b"x-compute-type: %b\r\nx-compute-time: %d\r\nx-compute-characters: %d\r\nx-compute-tokens: %d\r\n"
    b"x-total-time: %d\r\nx-tokenization-time: %d\r\nx-queue-time: %d\r\nx-inference-time: %d\r\n"
    b"server-timing: tokenize;dur=%d.%03d, queue;dur=%d.%03d, inference;dur=%d.%03d, total;dur=%d.%03d\r\n"
)


@dataclass(slots=True)
class LatencyBreakdown:
    """Of one request. Seconds of perf_counter."""

    started: float = field(default_factory=time.perf_counter)
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    inference_s: float = 0.0
    encode_s: float = 0.0
    engine: int = -1  # that had it, or had it last; -1: none
    characters: int = 0
    tokens: int = 0
    answered: float | None = None  # when the engine's answer was complete

    def note(self, answer: Answer) -> None:
        """Take over the engine's times."""
        self.queue_s, self.inference_s, self.engine = answer.queue_s, answer.inference_s, answer.engine
        self.answered = time.perf_counter()

    def note_failure(self, engine: int, waited_s: float) -> None:
        """The engine gave no rows: all of the time counts as time in its queue."""
        self.engine, self.queue_s = engine, waited_s

    def encoded(self) -> None:
        """The answer's body is there."""
        if self.answered is not None:
            self.encode_s = time.perf_counter() - self.answered

    def add(self, part: LatencyBreakdown) -> None:
        """Take over what a part of the request took."""
        self.queue_s = min(self.queue_s, part.queue_s) if self.answered is not None else part.queue_s
        self.tokenize_s += part.tokenize_s
        self.inference_s += part.inference_s
        self.engine = part.engine
        self.characters += part.characters
        self.tokens += part.tokens
        self.answered = max(self.answered or 0.0, part.answered or 0.0) or None

    def head(self, compute_type: bytes) -> bytes:
        """Header lines: TEI's in whole milliseconds, Server-Timing in fractions, of the same microseconds."""
        tokenize_us, queue_us = round(self.tokenize_s * 1e6), round(self.queue_s * 1e6)
        inference_us, total_us = round(self.inference_s * 1e6), round((time.perf_counter() - self.started) * 1e6)
        tokenize_ms, queue_ms = tokenize_us // 1000, queue_us // 1000
        inference_ms, total_ms = inference_us // 1000, total_us // 1000
        return _HEAD % (
            compute_type,
            (tokenize_us + inference_us) // 1000,
            self.characters,
            self.tokens,
            total_ms,
            tokenize_ms,
            queue_ms,
            inference_ms,
            tokenize_ms,
            tokenize_us - 1000 * tokenize_ms,
            queue_ms,
            queue_us - 1000 * queue_ms,
            inference_ms,
            inference_us - 1000 * inference_ms,
            total_ms,
            total_us - 1000 * total_ms,
        )
