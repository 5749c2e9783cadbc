"""Numbers in shared memory that every process of one server reads. Each has one writer, so none needs a lock.

    of HTTP process i    tokens admitted and not yet answered, of each model; when its event loop last ran;
                        requests in flight, a tenth of a second ago; connections (infinity: it accepts none)
    of engine i         when it last showed a sign of life; when its forward began (0: none runs), and of which model;
                        which requests run

Asking one process that counts for all would cost each request a round trip. Reading all numbers costs 0.3 µs.
Processes that read at the same moment may all admit, so the budget can be exceeded by one request for each process.

The ids that an engine runs stay here when the engine dies. HTTP processes then know which requests may have killed it.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. Slots are aligned doubles and 64-bit
integers: loads and stores are atomic.
"""

from __future__ import annotations

import math
import mmap
import os
from array import array
from collections.abc import Collection

__all__ = ["MAX_BATCHES_IN_FLIGHT", "SharedCounters"]

_NUMBER_BYTES = 8
MAX_BATCHES_IN_FLIGHT = 4  # of an engine: two of a model, and short ones of another model behind them
_RUNNING_MAX = 1 << 16  # request ids written for one batch; unwritten pages take no memory


class SharedCounters:
    """One process's view. The supervisor calls `create`; children inherit the descriptor `fd`."""

    def __init__(self, fd: int, processes: int, engines: int, models: int = 1) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _size(processes, engines, models))
        count = _numbers(processes, engines, models)
        numbers = memoryview(self._memory)[: count * _NUMBER_BYTES].cast("d")
        self._running = memoryview(self._memory)[count * _NUMBER_BYTES :].cast("q")
        self.http_alive = numbers[:processes]  # [HTTP process]
        self.engine_alive = numbers[processes : processes + engines]  # [engine]
        self.forward_since = numbers[processes + engines : processes + 2 * engines]  # [engine]
        self.forward_model = numbers[
            processes + 2 * engines : processes + 3 * engines
        ]  # [engine]: the number of its model
        self.in_flight = numbers[processes + 3 * engines : 2 * processes + 3 * engines]  # [HTTP process]
        self.connections = numbers[2 * processes + 3 * engines : 3 * processes + 3 * engines]  # [HTTP process]
        admitted = numbers[3 * processes + 3 * engines :]
        self.admitted_tokens = [
            admitted[i * processes : (i + 1) * processes] for i in range(models)
        ]  # [model][HTTP process]

    @classmethod
    def create(cls, processes: int, engines: int, models: int = 1) -> SharedCounters:
        """Creates the counters of a server without processes. No full disk can prevent it.

        Their memory lives until no process has it open.

        Raises OSError where the system has no descriptor or memory left.
        """
        fd = os.memfd_create("embert-counters")
        os.set_inheritable(fd, True)
        os.ftruncate(fd, _size(processes, engines, models))
        counters = cls(fd, processes, engines, models)
        for http_index in range(processes):
            counters.forget_http(http_index)
        return counters

    def set_running(self, engine: int, slot: int, ids: Collection[int]) -> None:
        """Set the ids of the requests in batch `slot` < MAX_BATCHES_IN_FLIGHT of an engine. Ids are unique in a server.

        The count is 0 while the ids are written, so that a reader never takes old ids for new ones.
        """
        start = (engine * MAX_BATCHES_IN_FLIGHT + slot) * (1 + _RUNNING_MAX)
        written = array("q", ids)[:_RUNNING_MAX]
        self._running[start] = 0
        self._running[start + 1 : start + 1 + len(written)] = written
        self._running[start] = len(written)

    def running(self, engine: int) -> set[int]:
        """The ids of the requests that an engine runs, or ran when it was lost."""
        running: set[int] = set()
        for slot in range(MAX_BATCHES_IN_FLIGHT):
            start = (engine * MAX_BATCHES_IN_FLIGHT + slot) * (1 + _RUNNING_MAX)
            running.update(self._running[start + 1 : start + 1 + self._running[start]])
        return running

    def admitted(self, model: int = 0) -> int:
        """Tokens of a model that are admitted and not yet answered, of all HTTP processes."""
        return int(sum(self.admitted_tokens[model]))

    def forget_http(self, http_index: int) -> None:
        """Nothing of an HTTP process that has died is admitted or in flight any more."""
        self.in_flight[http_index], self.connections[http_index] = 0.0, math.inf
        for tokens in self.admitted_tokens:
            tokens[http_index] = 0.0


def _numbers(processes: int, engines: int, models: int) -> int:
    return 3 * processes + 3 * engines + processes * models


def _size(processes: int, engines: int, models: int) -> int:
    return (_numbers(processes, engines, models) + engines * MAX_BATCHES_IN_FLIGHT * (1 + _RUNNING_MAX)) * _NUMBER_BYTES
