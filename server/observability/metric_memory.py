"""The metrics of all processes of a server, in memory that they share: each process can read all of them.

The memory is not in a file system: with a mapped file, a full disk would mean SIGBUS, and programs that clean /tmp
would delete it. It exists until the last process closes it.

Each process writes to one region, named by its role (`http-0`), not by its pid. A process that replaces a dead one
continues its counters and histograms, so totals lose nothing and regions do not accumulate.

    region    name, pid, sizes     one page
              lasting series       counters, histograms, and gauges that outlive their process
              live series          gauges that end with their process
              exemplars            two slots; the next write replaces the older one
    series    length of the key in bytes, the key, padded to 8 bytes, the value as a double

Unwritten pages take no memory. Values are aligned doubles with one writer: loads and stores are atomic.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_NUMBER_BYTES = 8
_HEAD_BYTES = 65_536  # one page, on any machine
_NAME_BYTES = 64
_LASTING_BYTES, _LIVE_BYTES, _EXEMPLAR_BYTES = 24 << 20, 6 << 20, 1 << 20
REGION_BYTES = _HEAD_BYTES + _LASTING_BYTES + _LIVE_BYTES + 2 * _EXEMPLAR_BYTES
# Numbers of the first page, after the name: bytes in use of the two series, PID, slot and sizes of exemplars.
_LASTING, _LIVE, _PID, _SLOT, _SIZE = range(5)


class MetricMemory:
    """The memory as one process maps it. The supervisor calls `create` and `add`; children inherit `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._regions: list[Region] = []

    @classmethod
    def create(cls, processes: Sequence[str]) -> MetricMemory:
        """Creates empty regions for these processes. Raises OSError if the system has no descriptor or memory left."""
        fd = os.memfd_create("embert-metrics")
        os.set_inheritable(fd, True)
        memory = cls(fd)
        memory.add(processes)
        return memory

    def add(self, processes: Iterable[str]) -> None:
        """Creates empty regions for more processes, before any of them starts. Raises OSError like `create`."""
        for name in processes:
            os.ftruncate(self.fd, (len(self.regions) + 1) * REGION_BYTES)
            self.regions[-1].name = name

    @property
    def regions(self) -> list[Region]:
        count = os.fstat(self.fd).st_size // REGION_BYTES
        self._regions += [Region(self.fd, index) for index in range(len(self._regions), count)]
        return self._regions

    def region(self, process: str) -> Region:
        """Returns the region of one process. Raises KeyError."""
        for region in self.regions:
            if region.name == process:
                return region
        raise KeyError(process)


class Region:
    """The metrics of one process."""

    def __init__(self, fd: int, index: int) -> None:
        memory = memoryview(mmap.mmap(fd, REGION_BYTES, offset=index * REGION_BYTES))
        self._name = memory[:_NAME_BYTES]
        self._head = memory[_NAME_BYTES:_HEAD_BYTES].cast("q")
        live, exemplars = _HEAD_BYTES + _LASTING_BYTES, _HEAD_BYTES + _LASTING_BYTES + _LIVE_BYTES
        self.lasting = _Series(memory[_HEAD_BYTES:live], self._head, _LASTING)
        self.live = _Series(memory[live:exemplars], self._head, _LIVE)
        self._exemplars = [memory[exemplars:][:_EXEMPLAR_BYTES], memory[exemplars + _EXEMPLAR_BYTES :]]

    @property
    def name(self) -> str:
        return bytes(self._name).rstrip(b"\0").decode()

    @name.setter
    def name(self, name: str) -> None:
        self._name[:] = name.encode().ljust(_NAME_BYTES, b"\0")

    @property
    def pid(self) -> int:
        """PID of the process that owns the region, or 0."""
        return int(self._head[_PID])

    def begin(self) -> None:
        """Makes this process the owner; the one before must be dead."""
        self._head[_PID] = os.getpid()

    def forget(self) -> None:
        """Removes the live series of a dead process."""
        self._head[_LIVE] = self._head[_PID] = 0

    @property
    def exemplars(self) -> bytes:
        slot = self._head[_SLOT]
        return bytes(self._exemplars[slot][: self._head[_SIZE + slot]])

    def put_exemplars(self, data: bytes) -> None:
        """Replaces the exemplars, unless they are too large. A concurrent reader gets the previous ones whole."""
        if len(data) <= _EXEMPLAR_BYTES:
            slot = 1 - self._head[_SLOT]
            self._exemplars[slot][: len(data)] = data
            self._head[_SIZE + slot] = len(data)
            self._head[_SLOT] = slot


class _Series:
    """Values by key. One process writes, any process reads."""

    def __init__(self, memory: memoryview, head: memoryview, used: int) -> None:
        """`head[used]` is the number of bytes in use."""
        self._memory, self._lengths, self.values = memory, memory.cast("q"), memory.cast("d")
        self._head, self._used = head, used
        self._indexes: dict[bytes, int] = {}

    def index(self, key: bytes) -> int:
        """The index of a key's value in `values`; a new one is 0. Raises MemoryError when the memory is full."""
        if not self._indexes:
            self._indexes = dict(self._entries())
        index = self._indexes.get(key)
        if index is None:
            start = self._head[self._used]
            begin = start + _NUMBER_BYTES
            end = begin + -(-len(key) // _NUMBER_BYTES) * _NUMBER_BYTES
            if end + _NUMBER_BYTES > len(self._memory):
                raise MemoryError(f"metric memory is full; {len(self._indexes)} series take {start} bytes")
            index = end // _NUMBER_BYTES
            self._lengths[start // _NUMBER_BYTES] = len(key)
            self._memory[begin : begin + len(key)] = key
            self.values[index] = 0.0
            self._indexes[key] = index
            self._head[self._used] = end + _NUMBER_BYTES  # last: a reader then finds it whole
        return index

    def read(self) -> Iterator[tuple[bytes, float]]:
        for key, index in self._entries():
            yield key, self.values[index]

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        start, used = 0, self._head[self._used]
        while start < used:
            length = self._lengths[start // _NUMBER_BYTES]
            begin = start + _NUMBER_BYTES
            end = begin + -(-length // _NUMBER_BYTES) * _NUMBER_BYTES
            yield bytes(self._memory[begin : begin + length]), end // _NUMBER_BYTES
            start = end + _NUMBER_BYTES


def value_class(region: Region, encode: Any) -> type:
    """Returns a `ValueClass` for prometheus_client that writes to a region. `encode` returns the key of a series.

    A series that does not fit is not counted.
    """
    lock = threading.Lock()

    class SharedValue:
        _multiprocess = True

        def __init__(
            self,
            typ: str,
            metric_name: str,
            name: str,
            labelnames: Sequence[str],
            labelvalues: Sequence[str],
            help_text: str,
            multiprocess_mode: str = "",
            **_: Any,
        ) -> None:
            labels = dict(zip(labelnames, labelvalues, strict=True))
            key = encode((typ, multiprocess_mode, metric_name, name, labels, help_text))
            series = region.live if multiprocess_mode.startswith("live") else region.lasting
            with lock:
                try:
                    self._values, self._index = series.values, series.index(key)
                except MemoryError:
                    self._values, self._index = memoryview(bytearray(_NUMBER_BYTES)).cast("d"), 0

        def inc(self, amount: float) -> None:
            with lock:
                self._values[self._index] += amount

        def set(self, value: float, timestamp: float | None = None) -> None:  # noqa: ARG002 - the library's interface
            self._values[self._index] = value

        def get(self) -> float:
            return float(self._values[self._index])

        def set_exemplar(self, exemplar: object) -> None:
            """Ignores it: scraping.py publishes all exemplars together."""

        def get_exemplar(self) -> None:
            return None

    return SharedValue
