"""Numbers in shared memory that every process of one server reads. Each has one writer, so none needs a lock.

    of HTTP process i   unfinished tokens of each model; when its event loop last ran;
                        requests in flight, a tenth of a second ago; connections (infinity: it accepts none)
    of engine i         its last sign of life; the start of its forward (0: none runs) and the model of that;
                        the ids of the requests that run

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
from itertools import accumulate

_NUMBER_BYTES = 8
MAX_BATCHES_IN_FLIGHT = 4  # of an engine: two of a model, and short ones of another model behind them
_RUNNING_MAX = 1 << 16  # request ids written for one batch; unwritten pages take no memory
_SLOT_NUMBERS = 1 + _RUNNING_MAX  # their count, then the ids


class SharedCounters:
    """One process's view. The supervisor calls `create`; children inherit the descriptor `fd`."""

    def __init__(self, fd: int, processes: int, engines: int, models: int = 1) -> None:
        self.fd = fd
        sizes = _sizes(processes, engines, models)
        self._memory = mmap.mmap(fd, _memory_bytes(sizes, engines))
        memory, count = memoryview(self._memory), sum(sizes)
        numbers = memory[: count * _NUMBER_BYTES].cast("d")
        self._running = memory[count * _NUMBER_BYTES :].cast("q")
        views = [numbers[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self.engine_alive, self.forward_since, self.forward_model = views[:3]  # [engine]
        self.http_alive, self.in_flight, self.connections = views[3:6]  # [HTTP process]
        self.admitted_tokens = views[6:]  # [model][HTTP process]

    @classmethod
    def create(cls, processes: int, engines: int, models: int = 1) -> SharedCounters:
        """Create the counters of a server without processes. Their memory lives until no process has it open.

        Raises OSError if the system has no descriptor or memory left.
        """
        fd = os.memfd_create("embert-counters")
        os.set_inheritable(fd, True)
        os.ftruncate(fd, _memory_bytes(_sizes(processes, engines, models), engines))
        counters = cls(fd, processes, engines, models)
        for http_index in range(processes):
            counters.forget_http(http_index)
        return counters

    def set_running(self, engine: int, slot: int, ids: Collection[int]) -> None:
        """Set the ids of the requests in batch `slot` < MAX_BATCHES_IN_FLIGHT of an engine. Ids are unique in a server.

        The count is 0 while the ids are written, so that a reader never takes old ids for new ones.
        """
        start = (engine * MAX_BATCHES_IN_FLIGHT + slot) * _SLOT_NUMBERS
        written = array("q", ids)[:_RUNNING_MAX]
        self._running[start] = 0
        self._running[start + 1 : start + 1 + len(written)] = written
        self._running[start] = len(written)

    def running(self, engine: int) -> set[int]:
        """Ids of the requests that an engine runs, or ran when it was lost."""
        running: set[int] = set()
        for slot in range(MAX_BATCHES_IN_FLIGHT):
            start = (engine * MAX_BATCHES_IN_FLIGHT + slot) * _SLOT_NUMBERS
            running.update(self._running[start + 1 : start + 1 + self._running[start]])
        return running

    def admitted(self, model: int = 0) -> int:
        return int(sum(self.admitted_tokens[model]))

    def all_http_started(self) -> bool:
        """True if every HTTP process has accepted connections at some time, even if it has died since."""
        return all(self.http_alive)

    def forget_http(self, http_index: int) -> None:
        """Set the counters of an HTTP process that has died."""
        self.in_flight[http_index], self.connections[http_index] = 0.0, math.inf
        for tokens in self.admitted_tokens:
            tokens[http_index] = 0.0


def _sizes(processes: int, engines: int, models: int) -> list[int]:
    return [engines] * 3 + [processes] * (3 + models)


def _memory_bytes(sizes: list[int], engines: int) -> int:
    return (sum(sizes) + engines * MAX_BATCHES_IN_FLIGHT * _SLOT_NUMBERS) * _NUMBER_BYTES
