"""The end of a connection whose last answer is given while more arrives: the rest of the request, or requests after it.

Closing at once would reset a connection on which data still arrives, and the client would never see its answer. So the
server closes its own side and reads on, until the client closes too, or for a bounded time and number of bytes.
"""

from __future__ import annotations

import asyncio

__all__ = ["LINGER_BYTES", "LINGER_QUIET_S", "LINGER_S", "LingeringClose"]

LINGER_QUIET_S = 2.0  # without a byte more
LINGER_S = 30.0  # in all
LINGER_BYTES = 128 << 20


class LingeringClose:
    """Begins at once. The owner reports arriving data, and the loss of the connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._bytes_left = LINGER_BYTES
        self._until, self._last = loop.time() + LINGER_S, loop.time()
        if transport.can_write_eof():  # TLS cannot: its clients know the end by the answer's length
            transport.write_eof()
        self._timer = loop.call_later(LINGER_QUIET_S, self._check)

    def received(self, size: int) -> None:
        """Note that so many more bytes came; they are dropped."""
        self._last = self._loop.time()
        self._bytes_left -= size
        if self._bytes_left < 0:
            self.cancel()
            self._transport.close()

    def cancel(self) -> None:
        """Stop the timer: the connection is closed."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        until = min(self._until, self._last + LINGER_QUIET_S)
        if now < until:
            self._timer = self._loop.call_later(until - now, self._check)
        else:
            self._transport.close()
