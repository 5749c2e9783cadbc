"""Numbers that every process of one server sees, in shared memory. Each has one writer, so none needs a lock.

    of API process i    tokens it has admitted and not yet answered; when its loop last ran
    of engine i         when it last showed life; since when its forward runs (0: none runs)

Asking a process that counts for all would cost every request a message there and back. Reading everybody's number costs
0.3 µs, and what it cannot rule out is small: processes that look at the same moment may all admit, so the budget can be
exceeded by one request for each.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. A number is 8 aligned bytes, which
processors write and read as one.
"""

from __future__ import annotations

import mmap
import os

__all__ = ["Board", "open_board"]

_NUMBER_BYTES = 8


class Board:
    """One process's view. The supervisor makes the descriptor, with `open_board`; children inherit it."""

    def __init__(self, fd: int, apis: int, engines: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _size(apis, engines))
        numbers = memoryview(self._memory).cast("d")
        self.admitted_tokens = numbers[:apis]  # [API process]
        self.api_alive = numbers[apis : 2 * apis]  # [API process]
        self.engine_alive = numbers[2 * apis : 2 * apis + engines]  # [engine]
        self.forward_since = numbers[2 * apis + engines :]  # [engine]

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


def _size(apis: int, engines: int) -> int:
    return 2 * (apis + engines) * _NUMBER_BYTES
