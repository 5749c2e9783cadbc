"""The access log of --access-log: a line for each request, without any text or key of a client.

Lines go to the log, in order with its other lines, and a slow reader delays no request (logs.py). They do not use the
logging package, whose records cost several times as much.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import orjson

from embert.server.observability.request_record import RequestRecord

Client = tuple[str, int] | None  # host and port of a peer; None: a Unix socket


class AccessLog:
    """The access log of one HTTP process."""

    def __init__(self, form: str, process: str, write: Callable[[bytes], None]) -> None:
        """`form` is `text` or `json`; `write` takes a line with its end."""
        self._process, self._pid, self._write = process, os.getpid(), write
        self._line = self._json if form == "json" else self._text
        self._second, self._clock = 0, ("", "")  # of the last line, as text and JSON lines have it

    def note(self, record: RequestRecord, seconds: float, client: Client) -> None:
        """Writes a line about a request that has ended. Its fields are those of `RequestRecord`."""
        self._write(self._line(record, seconds, "" if client is None else _address(*client)))

    def _json(self, record: RequestRecord, seconds: float, peer: str) -> bytes:
        clock, milliseconds = self._now(1)
        line = {
            "time": f"{clock}.{milliseconds:03d}Z",
            "level": "info",
            "process": self._process,
            "pid": self._pid,
            "message": "request",
            "status": record.status,
            "route": record.route,
            "model": record.model,
            "priority": record.priority,
            "tokens": 0,
            "ms": round(seconds * 1e3, 3),
        }
        if (parts := record.parts) is not None:
            line["tokens"] = parts.tokens
            line["tokenize_ms"] = round(parts.tokenize_s * 1e3, 3)
            line["queue_ms"] = round(parts.queue_s * 1e3, 3)
            line["inference_ms"] = round(parts.inference_s * 1e3, 3)
            line["encode_ms"] = round(parts.encode_s * 1e3, 3)
        line["request_id"] = record.id.decode()
        if record.trace_id:
            line["trace_id"] = record.trace_id.decode()
        line["key"] = record.key
        line["peer"] = peer
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def _text(self, record: RequestRecord, seconds: float, peer: str) -> bytes:
        clock, milliseconds = self._now(0)
        parts = record.parts
        times = tokens = ""
        if parts is not None:
            tokens = f" tokens={parts.tokens}"
            times = (
                f" tokenize={parts.tokenize_s * 1e3:.3f} queue={parts.queue_s * 1e3:.3f}"
                f" inference={parts.inference_s * 1e3:.3f} encode={parts.encode_s * 1e3:.3f}"
            )
        model = f" model={record.model or '-'} priority={record.priority}" if record.priority else ""
        trace = f" trace={record.trace_id.decode()}" if record.trace_id else ""
        line = (
            f"{clock}.{milliseconds:03d} INFO    {self._process:<10} {record.status} {record.route}{model}{tokens}"
            f" ms={seconds * 1e3:.3f}{times} id={record.id.decode()}{trace} key={record.key or '-'} peer={peer or '-'}"
        )
        return line.encode() + b"\n"

    def _now(self, form: int) -> tuple[str, int]:
        """Returns the time in seconds as text (0) or JSON (1) lines have it, and milliseconds."""
        now = time.time_ns() // 1_000_000
        second, milliseconds = divmod(now, 1000)
        if second != self._second:
            local = time.strftime("%H:%M:%S", time.localtime(second))
            self._second, self._clock = second, (local, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)))
        return self._clock[form], milliseconds


def _address(host: str, port: int) -> str:
    host = host.removeprefix("::ffff:")  # of IPv4, on a socket of both
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
