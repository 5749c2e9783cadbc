"""The way of records to the exporting process: a datagram socket that all processes of the server inherit.

Sending never blocks. A process that cannot send keeps so many records, drops older ones, and counts their spans.
"""

from __future__ import annotations

import socket
import time
from collections import deque

from embert.server.observability.tracing.records import BatchRecord, RequestRecord, encode, encode_record

__all__ = ["RecordSender"]

MESSAGE_BYTES = 1 << 16  # of records in one message, or of one larger record
WAITING_BYTES = 1 << 20  # of records that could not be sent yet
RETRY_S = 0.05


class RecordSender:
    """Used by one thread."""

    def __init__(self, fd: int, process: str) -> None:
        """`fd` is the socket's descriptor, which this object closes; `process` names the sender."""
        self._socket = socket.socket(fileno=fd)
        self._process = process
        self._waiting: deque[tuple[bytes, int]] = deque()  # records, and how many spans each becomes
        self._bytes = 0  # of them
        self._retry_at = 0.0
        self._dropped = 0  # spans, and not told yet

    @property
    def waits(self) -> bool:
        """Whether there is something to send."""
        return bool(self._waiting or self._dropped)

    def add(self, record: RequestRecord | BatchRecord) -> None:
        """Send a record soon: with the next `flush`, or once there are enough for a message."""
        data = encode_record(record)
        self._waiting.append((data, record.spans))
        self._bytes += len(data)
        if self._bytes >= MESSAGE_BYTES and time.monotonic() >= self._retry_at:
            self._send()
        while self._bytes > WAITING_BYTES:
            self._drop()

    def flush(self) -> None:
        """Send what the socket takes."""
        while self.waits and self._send():
            pass

    def _send(self) -> bool:
        """Send a message of the oldest records; False where the socket does not take it now."""
        records: list[bytes] = []
        size = 0
        for data, _ in self._waiting:
            size += len(data)
            if records and size > MESSAGE_BYTES:
                break
            records.append(data)
        try:
            self._socket.send(encode(self._process, self._dropped, records), socket.MSG_DONTWAIT)
        except BlockingIOError:  # the exporting process is busy, or being started
            self._retry_at = time.monotonic() + RETRY_S
            return False
        except OSError:  # nobody is at the other end, or the system does not let a message be so large
            for _ in records:
                self._drop()
            return bool(records)
        self._dropped = 0
        for _ in records:
            self._bytes -= len(self._waiting.popleft()[0])
        return True

    def _drop(self) -> None:
        data, spans = self._waiting.popleft()
        self._bytes -= len(data)
        self._dropped += spans
