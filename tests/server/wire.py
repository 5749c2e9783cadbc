"""The other end of a process's Unix socket, held by a test."""

from __future__ import annotations

import select
import time
from collections import deque

from embert.server.ipc.channel import Channel, PartialResult, Results, TaskRows


class Wire:
    """Blocking where a Channel is not."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._received: deque[memoryview] = deque()

    @classmethod
    def connect(cls, path: str, within_s: float = 120.0) -> Wire:
        until = time.monotonic() + within_s
        while True:
            try:
                return cls(Channel.connect(path))
            except OSError:
                assert time.monotonic() < until, f"nobody listens at {path}"
                time.sleep(0.01)

    def send(self, message: bytes, within_s: float = 120.0) -> None:
        self.channel.send(message)
        until = time.monotonic() + within_s
        while not self.channel.flush():
            assert time.monotonic() < until
            time.sleep(0.001)

    def next(self, within_s: float = 120.0) -> memoryview | None:
        """The next message; None when there is none in time. EOFError when the other side is gone."""
        until = time.monotonic() + within_s
        while not self._received:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            poll = select.poll()
            poll.register(self.channel, select.POLLIN)
            if poll.poll(1e3 * left_s):
                self._received += self.channel.receive()
        return self._received.popleft()

    def closed(self, within_s: float = 120.0) -> bool:
        """True if the other side closes in time. Drops its messages."""
        try:
            while self.next(within_s) is not None:
                pass
        except EOFError:
            return True
        return False

    def close(self) -> None:
        self.channel.close()


def parts_of(results: Results) -> list[PartialResult]:
    """All results of a message, those of `rows` as PartialResult, too, without their time in the queue."""
    parts, rows = [*results.parts], results.rows
    if rows is not None:
        text_bytes = len(rows.values) // sum(rows.texts)
        first = 0
        for id_, start, texts in zip(rows.ids, rows.first_texts, rows.texts, strict=True):
            values = rows.values[text_bytes * first : text_bytes * (first + texts)]
            task_rows = [TaskRows(rows.task, values)]
            parts.append(PartialResult(id_, start, texts, task_rows, 0.0, rows.ended - rows.started))
            first += texts
    return parts
