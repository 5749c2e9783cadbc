"""Batches with texts of sampled requests, as an engine process sees them."""

from __future__ import annotations

import math
import time

from embert.server.observability.tracing.records import BatchRecord, Member
from embert.server.observability.tracing.sender import MESSAGE_BYTES, RecordSender

__all__ = ["BatchTracer"]

FLUSH_INTERVAL_S = 0.05  # the exporting process wakes up for every message
_MEMBER_BYTES = 40  # of a member, beside its context


class BatchTracer:
    """Of one engine process, used by its device loop."""

    def __init__(self, sender: RecordSender, engine: int) -> None:
        self._sender, self._engine = sender, engine
        self._flushed = 0.0

    def record(
        self,
        members: list[Member],
        *,
        started: float,
        ended: float,
        texts: int,
        tokens: int,
        requests: int,
        reason: str = "",
    ) -> None:
        """Record a forward, unless it had no sampled request. `requests` are all in it; `reason` says why it failed."""
        while members:
            size = count = 0
            for member in members:  # a message has a limit, and a batch of very many requests may have several records
                size += _MEMBER_BYTES + len(member.context)
                if count and size > MESSAGE_BYTES:
                    break
                count += 1
            these, members = members[:count], members[count:]
            self._sender.add(BatchRecord(self._engine, started, ended, texts, tokens, requests, reason, these))
        if self._sender.waits and time.monotonic() - self._flushed > FLUSH_INTERVAL_S:
            self.flush()  # an encoder that always has something to do

    @property
    def flush_due_s(self) -> float:
        """Seconds until `flush` is to be called; infinity where nothing is recorded."""
        return FLUSH_INTERVAL_S if self._sender.waits else math.inf

    def flush(self) -> None:
        """Send what is recorded."""
        self._flushed = time.monotonic()
        self._sender.flush()
