"""Numbers that every process of one server sees, in shared memory. Each has one writer, so none needs a lock.

    of API process i    tokens it has admitted and not yet answered; when its loop last ran
    of engine i         when it last showed life; since when its forward runs (0: none runs); which requests run

Asking a process that counts for all would cost every request a message there and back. Reading everybody's number costs
0.3 µs, and what it cannot rule out is small: processes that look at the same moment may all admit, so the budget can be
exceeded by one request for each.

What an engine runs stays here when it dies: that is how API processes know which requests may have been its end.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. A number is 8 aligned bytes, which
processors write and read as one.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Collection

__all__ = ["FLIGHTS", "Board", "open_board"]

_NUMBER_BYTES = 8
FLIGHTS = 2  # batches of an engine at once: one runs, one has been handed over
_RUNNING_MAX = 1 << 16  # requests of one batch that are told of; pages that nobody writes take no memory


class Board:
    """One process's view. The supervisor makes the descriptor, with `open_board`; children inherit it."""

    def __init__(self, fd: int, apis: int, engines: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _size(apis, engines))
        numbers = memoryview(self._memory)[: _numbers(apis, engines) * _NUMBER_BYTES].cast("d")
        self._running = memoryview(self._memory)[_numbers(apis, engines) * _NUMBER_BYTES :].cast("q")
        self.admitted_tokens = numbers[:apis]  # [API process]
        self.api_alive = numbers[apis : 2 * apis]  # [API process]
        self.engine_alive = numbers[2 * apis : 2 * apis + engines]  # [engine]
        self.forward_since = numbers[2 * apis + engines :]  # [engine]

    def note_running(self, engine: int, flight: int, ids: Collection[int]) -> None:
        """Of the batch `flight` < FLIGHTS of an engine: the ids of its requests, of which a server has each once."""
        start = (engine * FLIGHTS + flight) * (1 + _RUNNING_MAX)
        told = array("q", ids)[:_RUNNING_MAX]
        self._running[start] = 0
        self._running[start + 1 : start + 1 + len(told)] = told
        self._running[start] = len(told)

    def running(self, engine: int) -> set[int]:
        """The ids of the requests that an engine runs, or ran when it was lost."""
        found: set[int] = set()
        for flight in range(FLIGHTS):
            start = (engine * FLIGHTS + flight) * (1 + _RUNNING_MAX)
            found.update(self._running[start + 1 : start + 1 + self._running[start]])
        return found

    @property
    def admitted(self) -> int:
        """Tokens admitted and not yet answered, of all API processes."""
        return int(sum(self.admitted_tokens))


def open_board(apis: int, engines: int) -> Board:
    """A board of zeros, in memory that lives as long as a process has it open; no disk can be too full for it."""
    fd = os.memfd_create("embert-board")
    os.set_inheritable(fd, True)
    os.ftruncate(fd, _size(apis, engines))
    return Board(fd, apis, engines)


def _numbers(apis: int, engines: int) -> int:
    return 2 * (apis + engines)


def _size(apis: int, engines: int) -> int:
    return (_numbers(apis, engines) + engines * FLIGHTS * (1 + _RUNNING_MAX)) * _NUMBER_BYTES
