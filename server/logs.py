"""Log lines of every process: text for people, JSON for collectors. No request text ever reaches them."""

from __future__ import annotations

import logging
import sys
import time

import orjson

__all__ = ["configure_logging"]

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}


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


def configure_logging(process: str, log_format: str, log_level: str) -> None:
    """Send all loggers of this process to stderr, one line a record; `extra` fields appear in JSON lines.

    A full disk or a closed pipe behind stderr loses lines, never a request.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if log_format == "json" else _Text(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(log_level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    if log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
