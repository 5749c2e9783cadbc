"""The connection between an HTTP process and an engine process: length-prefixed messages over a Unix stream socket.

An HTTP process sends at most one message per loop tick, with any number of requests; an engine process sends one per
batch, one for a request that fails, and its status. Messages are msgpack arrays. Arrays in them travel as little-endian
bytes. Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.

A round trip takes 44 µs (p99 142) on an H100's host. Over ZeroMQ it takes 142 µs (p99 331), because threads of ZeroMQ
must wake up at both ends.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from itertools import islice

import msgspec

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18  # per recv
_SOCKET_BYTES = 1 << 20  # requested send buffer; the system may allow less
_PIECES = 64  # buffers per sendmsg
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
MESSAGE_BYTES = 1 << 30  # a larger length is invalid
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8  # of EncodeRequest.trace


class EncodeRequest(msgspec.Struct, array_like=True):
    """All texts of one HTTP request."""

    id: int  # unique in the server
    tasks: int  # engine.Task: the tasks of each of its texts
    ids: bytes  # int32 [T], all sequences end to end
    lengths: bytes  # int32 [n]
    token_types: bytes  # int32 [T]; empty: all 0
    dimensions: int  # 0 = all
    normalize: bool
    deadline: float
    admitted: float
    low_priority: bool = False  # runs in the capacity that other requests leave
    isolated: bool = False  # an engine was lost while it ran this request, which now runs in a separate batch
    adapter: int = -1  # index of the adapter for all of its texts; -1: none
    model: int = 0  # its number
    trace: bytes = b""  # of a sampled request: trace id, id of its span, `tracestate`
    prompt_tokens: int = 0  # first tokens of each text, which pooling leaves out
    queries: int = 0  # number of queries. 1: the first sequence, for all others; more: one before each document
    prefix: int = 0  # first tokens that all texts have in common, and that a batch has once


class Submit(msgspec.Struct, array_like=True):
    """HTTP process → engine."""

    requests: list[EncodeRequest]
    cancelled: list[int]  # ids of requests whose client has disconnected


class TaskRows(msgspec.Struct, array_like=True):
    """The rows of one task for some texts: see embert.engine.batch."""

    task: int
    values: bytes  # float32 [rows, columns]
    counts: bytes = b""  # int32 [texts]: the rows of each; empty: one each
    indices: bytes = b""  # int32 [rows], only of sparse vectors


class PartialResult(msgspec.Struct, array_like=True):
    """The rows of consecutive texts of one request. A failed request gets one with `error`, and no more."""

    id: int
    first_text: int
    texts: int
    rows: list[TaskRows]
    queue_s: float
    inference_s: float
    # "backend", "deadline" (has passed), "cannot_meet_deadline" (the queue takes longer) or "weights" (too many)
    error: str = ""
    message: str = ""
    weights: int = 0  # for "weights": a lower bound of their number

    @classmethod
    def failure(cls, request: int, error: str, message: str = "", weights: int = 0) -> PartialResult:
        """The only result of a failed request."""
        return cls(request, 0, 0, [], 0.0, 0.0, error, message, weights)


class TextRows(msgspec.Struct, array_like=True):
    """The rows of one batch for the requests of one HTTP process if each text has one row of the same task.

    Most batches are like this. Lists have an item for each slice of the batch, `values` a row for each of their texts,
    in the same order.
    """

    task: int
    values: bytes  # float32 [texts, columns]
    ids: list[int]  # of the slices' requests
    first_texts: list[int]
    texts: list[int]
    started: float  # when the device began the batch
    ended: float


class EngineStatus(msgspec.Struct, array_like=True):
    """The engine's state, sent with every message and every second."""

    index: int
    last_success: float  # end of the last forward that worked
    queue_tokens: int
    tokens_per_s: list[float]  # by number of the model, measured while it has a queue; 0: unknown or not loaded


class Results(msgspec.Struct, array_like=True):
    """Engine → HTTP process."""

    status: EngineStatus
    parts: list[PartialResult]
    rows: TextRows | None = None


# Thread-safe. Decoding raises msgspec.MsgspecError for anything else.
encode = msgspec.msgpack.Encoder().encode
decode_submit = msgspec.msgpack.Decoder(Submit).decode
decode_results = msgspec.msgpack.Decoder(Results).decode


def address(name: str) -> bytes:
    """The socket address of a name, in the abstract namespace: it needs no disk, and nothing removes it.

    Any user may connect to such an address, so both ends call `is_ours`.
    """
    return b"\0" + name.encode()


def is_ours(sock: socket.socket) -> bool:
    """True if the process at the other end of a connected socket runs as the same user."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


class Channel:
    """One end of a connection. Never blocks. One thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._socket = sock
        self._arrived = bytearray()  # an incomplete message
        self._unsent: deque[memoryview] = deque()

    @classmethod
    def connect(cls, name: str) -> Channel:
        """Connect to the socket of this name. Raises OSError if no process listens, or one of another user."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(address(name))
            if not is_ours(sock):
                raise PermissionError(f"the socket {name} is another user's")
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        """The descriptor to poll; negative once closed."""
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send a message, and keep the rest if the socket buffer is full. True when all is sent.

        Messages to a peer that has exited are lost; `receive` then raises EOFError.
        """
        self._unsent += memoryview(_LENGTH.pack(len(message))), memoryview(message)
        return len(self._unsent) <= 2 and self.flush()

    def flush(self) -> bool:
        """Send more of the rest. True when all is sent. Call it when the descriptor is writable."""
        unsent = self._unsent
        if not unsent:
            return True
        sent = self._write(list(islice(unsent, _PIECES)))
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = unsent[0][sent:]
        return not unsent

    def receive(self) -> list[memoryview]:
        """Return the complete messages. Call it when the descriptor is readable.

        Raises EOFError when the peer has closed its end, ValueError for a length over MESSAGE_BYTES.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise EOFError
        if self._arrived:
            self._arrived += data
            if len(self._arrived) < self._needed():
                return []
            data = bytes(self._arrived)
        messages, start, arrived = [], 0, memoryview(data)
        while (begin := start + _LENGTH.size) <= len(data):
            (length,) = _LENGTH.unpack_from(data, start)
            if length > MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if begin + length > len(data):
                break
            start = begin + length
            messages.append(arrived[begin:start])
        self._arrived[:] = arrived[start:]
        return messages

    def close(self, within_s: float = 0.0) -> None:
        """Send the rest, for at most `within_s` seconds, and close."""
        until = time.monotonic() + within_s
        try:
            while self._unsent and (left_s := until - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                self.flush()
        finally:
            self._socket.close()

    def _needed(self) -> int:
        """Bytes needed to complete the first message, or its length field if that is incomplete or invalid."""
        if len(self._arrived) < _LENGTH.size:
            return _LENGTH.size
        length: int = _LENGTH.unpack_from(self._arrived)[0]
        return _LENGTH.size + (length if length <= MESSAGE_BYTES else 0)

    def _write(self, pieces: list[memoryview]) -> int:
        try:
            return self._socket.sendmsg(pieces)
        except (BlockingIOError, TimeoutError):
            return 0
        except OSError:
            return sum(map(len, pieces))
