"""Batches with texts of sampled requests, as an engine process sees them."""

from __future__ import annotations

from embert.server.observability.tracing.records import BatchRecord, Member
from embert.server.observability.tracing.sender import MESSAGE_BYTES, RecordSender

__all__ = ["BatchTracer"]

_MEMBER_BYTES = 40  # of a member, beside its context


class BatchTracer:
    """Of one engine process, used by its device loop."""

    def __init__(self, sender: RecordSender, engine: int) -> None:
        self._sender, self._engine = sender, engine

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

    def flush(self) -> None:
        """Send what is recorded; to be called whenever the encoder has nothing to do."""
        self._sender.flush()
