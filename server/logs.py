"""Log lines of every process: text for people, JSON for collectors. No request text ever reaches them."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time

import orjson

__all__ = ["configure_logging"]

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}
_STDERR = 2


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process:<10} %(message)s", "%H:%M:%S")


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
        line.update((key, value) for key, value in record.__dict__.items() if key not in _OWN)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class _Stderr(logging.Handler):
    """Writes each record at once, and loses it where that cannot be done at once."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = _STDERR
        with contextlib.suppress(OSError):  # there is no stderr, or nobody reads this pipe any more
            if stat.S_ISFIFO(os.fstat(_STDERR).st_mode):
                # An opening of our own: whoever else has this pipe open must not find that it does not block any more.
                self._fd = os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a wrong message of ours: as in every other handler, a line that is lost
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, line.encode(errors="backslashreplace") + b"\n")


def configure_logging(process: str, log_format: str, log_level: str) -> None:
    """Send all loggers of this process to stderr, one line a record; `extra` fields appear in JSON lines.

    A full disk, a closed pipe or one that nobody reads behind stderr loses lines, and holds up nobody.
    """
    handler = _Stderr()
    handler.setFormatter(_Json(process) if log_format == "json" else _Text(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(log_level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    if log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
