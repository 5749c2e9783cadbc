"""Log lines of every process: text for people, JSON for log collectors. They never contain text of a request."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import NoReturn

import orjson

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}
_STDERR = 2
WAITING_BYTES = 1 << 20  # of lines that stderr does not accept yet
FLUSH_S = 0.5
RETRY_S = 0.01
DUMP_SIGNAL = signal.SIGUSR1  # makes every process write the stacks of its threads

# Trace of the request that this task works on, in hexadecimal, or empty.
trace_id: ContextVar[str] = ContextVar("trace_id", default="")


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process:<10} %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record)
        return f"{line} trace_id={trace_id}" if (trace_id := _trace_id(record)) else line


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if trace_id := _trace_id(record):
            line["trace_id"] = trace_id
        line.update((key, value) for key, value in record.__dict__.items() if key not in _OWN)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def _trace_id(record: logging.LogRecord) -> str:
    """Returns the trace of the line itself (`extra`), or of the request that this task works on."""
    return str(getattr(record, "trace_id", "")) or trace_id.get()


class _Stderr(logging.Handler):
    """Writes each record at once. Bytes that stderr does not accept are left to a thread, so that no caller blocks.

    Records are written whole and in order. If the buffer is full, records are dropped, and a line has their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._write = _write_to(_STDERR)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost = 0
        self._changed = threading.Condition()  # guards the fields above

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a wrong format string must not end the process: drop the line
            return
        self.write(line.encode(errors="backslashreplace") + b"\n")

    def write(self, data: bytes) -> None:
        """Writes a whole line, with its end, after those before it."""
        with self._changed:
            if not self._waiting:
                data = self._write_part(data)
                if not data:
                    return
                self._keep(data)
                self._start_thread()
            elif self._waiting_bytes + len(data) <= WAITING_BYTES:
                if self._lost:
                    self._keep(self._lost_lines())
                self._keep(data)
            else:
                self._lost += 1

    def flush(self) -> None:
        """Waits up to FLUSH_S until the reader has read the buffered lines; every process calls this at its end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, FLUSH_S)

    def _keep(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)

    def _write_part(self, data: bytes) -> bytes:
        """Writes a line, and returns the rest that stderr does not accept."""
        try:
            return data[self._write(data) :]
        except BlockingIOError:
            return data
        except OSError:  # the disk is full, or the reader of this pipe has exited: drop the line
            return b""

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._write_buffered, name="log", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self._waiting.clear()
            self._waiting_bytes = 0
            self._lost += 1

    def _write_buffered(self) -> None:
        writable = select.poll()
        writable.register(_STDERR, select.POLLOUT)
        while True:
            writable.poll()
            with self._changed:
                data = self._waiting.popleft()
                left = self._write_part(data)
                self._waiting_bytes += len(left) - len(data)
                if left:
                    self._waiting.appendleft(left)
                elif not self._waiting and self._lost:
                    self._keep(self._lost_lines())
                elif not self._waiting:
                    self._changed.notify_all()
                    return
            if len(left) == len(data):
                time.sleep(RETRY_S)  # stderr is writable, but cannot take a whole line

    def _lost_lines(self) -> bytes:
        text = f"{self._lost} lines before this one are lost: the log reader is too slow"
        self._lost = 0
        return self.format(logging.makeLogRecord({"levelno": 30, "levelname": "WARNING", "msg": text})).encode() + b"\n"


def _write_to(fd: int) -> Callable[[bytes], int]:
    """Returns a function that writes to a descriptor and raises BlockingIOError instead of blocking.

    O_NONBLOCK is set on a new open file, not on the given descriptor: other processes share that one and expect it to
    block.
    """
    with contextlib.suppress(OSError):  # stderr is closed, or the reader of this pipe has exited
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            return partial(_send, socket.socket(fileno=os.dup(fd)))
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            return partial(os.write, own)
    return partial(os.write, fd)


def _send(sock: socket.socket, data: bytes) -> int:
    return sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def configure_logging(process: str, log_format: str, log_level: str) -> Callable[[bytes], None]:
    """Makes all loggers of this process write to stderr, one line for each record, in JSON with the `extra` fields.

    SIGUSR1 writes the stacks of all threads there, as plain text. With a full disk, or a pipe, socket or terminal
    without a reader, lines are dropped and no caller blocks. Returns a function that writes a preformatted line.
    """
    handler = _Stderr()
    handler.setFormatter(_Json(process) if log_format == "json" else _Text(process))
    faulthandler.register(DUMP_SIGNAL, file=_STDERR)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(log_level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    if log_level != "debug":
        for chatty in ("uvicorn", "httpx", "httpx2"):  # the hub's client asks for each file with httpx
            logging.getLogger(chatty).setLevel(logging.WARNING)
    return handler.write


def exit_now(status: int) -> NoReturn:
    """Ends this process without waiting for its threads, but up to FLUSH_S for a slow reader of the log."""
    logging.shutdown()
    os._exit(status)
