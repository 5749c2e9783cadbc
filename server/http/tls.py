"""TLS between a TCP connection and the HTTP protocol.

The event loop's own TLS hides the TCP connection: one that never begins its handshake is not counted, and what TLS
buffers is not seen. Here a connection is counted from the start, a response is encrypted only as fast as its client
reads, and the write buffer has all that is not in the kernel yet.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from embert.server.config import ConfigError, ServeConfig, tls_context
from embert.server.http.connections import Connections, ConnectionSlot
from embert.server.http.protocol import HEAD_TIMEOUT_S, SURPLUS_S

log = logging.getLogger(__name__)

_RECORD = 16_384  # bytes of the largest TLS record
_HIGH_WATER = 65_536  # bytes that wait to be encrypted, above which the app has to wait, too


class Certificates:
    """The files of TLS, which can be read again."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError for files and ciphers that cannot be used."""
        self._config = config
        self._context = self._read()

    def current(self) -> ssl.SSLContext:
        """The context for a connection that begins now."""
        return self._context

    def refresh(self) -> None:
        """Read the files again. Files that cannot be used leave the certificates as they were."""
        try:
            self._context = self._read()
        except ConfigError as error:
            log.error("%s; the certificates stay as they were", error)  # noqa: TRY400 - the message is complete
        else:
            log.info("new connections get the certificates that are in the files now")

    def _read(self) -> ssl.SSLContext:
        context = tls_context(self._config)
        assert context is not None  # noqa: S101 - there is a --ssl-certfile
        return context


def with_tls(
    protocol: Callable[..., asyncio.Protocol], current: Callable[[], ssl.SSLContext], connections: Connections
) -> Callable[..., asyncio.Protocol]:
    """A protocol of TCP connections, with `protocol` inside of TLS. `current` returns the context of a new one."""

    def make(**options: Any) -> asyncio.Protocol:
        return _TlsConnection(partial(protocol, **options), current(), connections)

    return make


class _TlsConnection(asyncio.Transport, asyncio.Protocol):
    """A connection with TLS: the protocol of the TCP transport, and the transport of the HTTP protocol."""

    transport: asyncio.Transport  # of the TCP connection

    def __init__(self, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext, connections: Connections) -> None:
        super().__init__()
        self._make, self._context, self._connections = make, context, connections
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._http: asyncio.Protocol | None = None  # None until the handshake is done
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._unencrypted: deque[memoryview] = deque()
        self._waiting = 0  # bytes in there
        self._full = False  # the TCP connection takes no more for now
        self._told_to_wait = False  # the HTTP protocol
        self._closing = False

    # --- as a protocol ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        slot = self._connections.add(self)
        if slot is ConnectionSlot.NONE:
            self.abort()
            return
        self._connections.mark_idle(self)
        timeout_s = HEAD_TIMEOUT_S if slot is ConnectionSlot.SERVED else SURPLUS_S
        self._handshake_timer = asyncio.get_running_loop().call_later(timeout_s, self.abort)

    # `Connections` calls these three, but only until the handshake is done.

    def evict(self) -> bool:
        self.abort()
        return True

    def shutdown(self) -> None:
        self.abort()

    def count_unread(self) -> None:
        pass

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._incoming.write(data)
        try:
            if self._http is not None or self._shake_hands():
                self._decrypt()
        except ssl.SSLError:  # not TLS, no common version, no certificate, or no valid record
            self._send()  # the alert that says so
            self._closing = True
            self.transport.close()

    def eof_received(self) -> bool | None:
        return None if self._http is None else self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_all()
        self._end_handshake()
        if self._http is not None:
            self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._encrypt()

    # --- as a transport ---

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._context if name == "sslcontext" else self.transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._closing or self.transport.is_closing()

    def pause_reading(self) -> None:
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Bytes written and not yet in the kernel, encrypted or not."""
        return self._waiting + self.transport.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._closing:
            self._unencrypted.append(memoryview(data))
            self._waiting += len(data)
            self._encrypt()

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self._closing = True
        self._close_if_written()

    def abort(self) -> None:
        self._forget_all()
        self.transport.abort()

    # --- between both ---

    def _shake_hands(self) -> bool:
        """True after the handshake."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return False
        self._send()
        self._end_handshake()  # the HTTP protocol takes its place
        self._http = self._make()
        self._http.connection_made(self)
        return True

    def _end_handshake(self) -> None:
        self._connections.remove(self)
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None

    def _decrypt(self) -> None:
        assert self._http is not None  # noqa: S101 - the handshake is done
        while not self._closing:
            try:
                data = self._tls.read(_RECORD)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                data = b""
            if not data:  # the client has ended TLS
                if not self._http.eof_received():
                    self.close()
                break
            self._http.data_received(data)
            if not self._incoming.pending and not self._tls.pending():
                break  # an exception would say the same
        self._send()  # TLS's own messages

    def _encrypt(self) -> None:
        """Hand over as much as the TCP connection takes."""
        while self._unencrypted and not self._full:
            data = self._unencrypted.popleft()
            if len(data) > _RECORD:
                self._unencrypted.appendleft(data[_RECORD:])
                data = data[:_RECORD]
            self._tls.write(data)
            self._waiting -= len(data)
            self._send()
        if self._http is not None and self._told_to_wait != (self._waiting > _HIGH_WATER):
            self._told_to_wait = not self._told_to_wait
            (self._http.pause_writing if self._told_to_wait else self._http.resume_writing)()
        if self._closing:
            self._close_if_written()

    def _send(self) -> None:
        if self._outgoing.pending and not self.transport.is_closing():
            self.transport.write(self._outgoing.read())

    def _close_if_written(self) -> None:
        if self._unencrypted or self.transport.is_closing():
            return
        try:
            self._tls.unwrap()
        except ssl.SSLError:  # it would wait for the client to end TLS, too
            self._send()
        self.transport.close()

    def _forget_all(self) -> None:
        self._closing = True
        self._unencrypted.clear()
        self._waiting = 0
