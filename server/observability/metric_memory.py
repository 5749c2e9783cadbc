"""The metrics of all processes of a server, in memory that they share: any process reads what each of them wrote.

No file system holds it. A full disk cannot take it away, which for a mapped file means SIGBUS, and no program that
cleans /tmp finds it. It lives as long as a process has it open.

Each process writes to a region of its own, named by its role (`http-0`), not by its pid. A process that replaces a dead
one continues its counters and histograms, so totals lose nothing and regions do not accumulate.

    region    name, pid, sizes     one page
              lasting series       counters, histograms, and gauges that outlive their process
              live series          gauges that end with their process
              exemplars            two slots; the older one is written
    series    length of the key in bytes, the key, padded to 8 bytes, the value as a double

Unwritten pages take no memory. Values are aligned doubles with one writer: loads and stores are atomic.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["MetricMemory", "Region", "value_class"]

_NUMBER_BYTES = 8
_HEAD_BYTES = 65_536  # one page, on any machine
_NAME_BYTES = 64
_LASTING_BYTES, _LIVE_BYTES, _EXEMPLAR_BYTES = 24 << 20, 6 << 20, 1 << 20
REGION_BYTES = _HEAD_BYTES + _LASTING_BYTES + _LIVE_BYTES + 2 * _EXEMPLAR_BYTES
# Numbers of the head, after the name: the first two are bytes that are used.
_LASTING, _LIVE, _PID, _SLOT, _SIZE = range(5)


class MetricMemory:
    """One process's view. The supervisor calls `create` and `add`; children inherit the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._regions: list[Region] = []

    @classmethod
    def create(cls, processes: Sequence[str]) -> MetricMemory:
        """Empty regions for these processes. Raises OSError where the system has no descriptor or memory left."""
        fd = os.memfd_create("embert-metrics")
        os.set_inheritable(fd, True)
        memory = cls(fd)
        memory.add(processes)
        return memory

    def add(self, processes: Iterable[str]) -> None:
        """Empty regions for more processes, before any of them is started. Raises OSError like `create`."""
        for name in processes:
            os.ftruncate(self.fd, (len(self.regions) + 1) * REGION_BYTES)
            self.regions[-1].name = name

    @property
    def regions(self) -> list[Region]:
        """Of all processes."""
        count = os.fstat(self.fd).st_size // REGION_BYTES
        self._regions += [Region(self.fd, index) for index in range(len(self._regions), count)]
        return self._regions

    def region(self, process: str) -> Region:
        """The region of one process. Raises KeyError."""
        for region in self.regions:
            if region.name == process:
                return region
        raise KeyError(process)


class Region:
    """What one process has written."""

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
        """The process's."""
        return bytes(self._name).rstrip(b"\0").decode()

    @name.setter
    def name(self, name: str) -> None:
        self._name[:] = name.encode().ljust(_NAME_BYTES, b"\0")

    @property
    def pid(self) -> int:
        """Of the living process; 0: there is none."""
        return int(self._head[_PID])

    def begin(self) -> None:
        """This process writes from now on; the one that did before must be dead."""
        self._head[_PID] = os.getpid()

    def forget(self) -> None:
        """The process is dead: its live series are gone."""
        self._head[_LIVE] = self._head[_PID] = 0

    @property
    def exemplars(self) -> bytes:
        """The exemplars that `put_exemplars` wrote last."""
        slot = self._head[_SLOT]
        return bytes(self._exemplars[slot][: self._head[_SIZE + slot]])

    def put_exemplars(self, data: bytes) -> None:
        """Replace the exemplars, unless they are too large. A concurrent reader gets the previous ones whole."""
        if len(data) <= _EXEMPLAR_BYTES:
            slot = 1 - self._head[_SLOT]
            self._exemplars[slot][: len(data)] = data
            self._head[_SIZE + slot] = len(data)
            self._head[_SLOT] = slot


class _Series:
    """Values by key. One process writes, any process reads."""

    def __init__(self, memory: memoryview, head: memoryview, used: int) -> None:
        """`head[used]` are the bytes that are used."""
        self._memory, self._lengths, self.values = memory, memory.cast("q"), memory.cast("d")
        self._head, self._used = head, used
        self._places: dict[bytes, int] = {}

    def place(self, key: bytes) -> int:
        """The index of a key's value in `values`; a new one is 0. Raises MemoryError when the memory is full."""
        if not self._places:
            self._places = dict(self._entries())
        place = self._places.get(key)
        if place is None:
            start = self._head[self._used]
            begin = start + _NUMBER_BYTES
            end = begin + -(-len(key) // _NUMBER_BYTES) * _NUMBER_BYTES
            if end + _NUMBER_BYTES > len(self._memory):
                raise MemoryError(f"metric memory is full; {len(self._places)} series take {start} bytes")
            place = end // _NUMBER_BYTES
            self._lengths[start // _NUMBER_BYTES] = len(key)
            self._memory[begin : begin + len(key)] = key
            self.values[place] = 0.0
            self._places[key] = place
            self._head[self._used] = end + _NUMBER_BYTES  # last: a reader then finds it whole
        return place

    def read(self) -> Iterator[tuple[bytes, float]]:
        """Each key and its value."""
        for key, place in self._entries():
            yield key, self.values[place]

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        start, used = 0, self._head[self._used]
        while start < used:
            length = self._lengths[start // _NUMBER_BYTES]
            begin = start + _NUMBER_BYTES
            end = begin + -(-length // _NUMBER_BYTES) * _NUMBER_BYTES
            yield bytes(self._memory[begin : begin + length]), end // _NUMBER_BYTES
            start = end + _NUMBER_BYTES


def value_class(region: Region, encode: Any) -> type:
    """prometheus_client's `ValueClass`, writing to a region. `encode` makes a key of what it is constructed with.

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
                    self._values, self._place = series.values, series.place(key)
                except MemoryError:
                    self._values, self._place = memoryview(bytearray(_NUMBER_BYTES)).cast("d"), 0

        def inc(self, amount: float) -> None:
            with lock:
                self._values[self._place] += amount

        def set(self, value: float, timestamp: float | None = None) -> None:  # noqa: ARG002 - the library's interface
            self._values[self._place] = value

        def get(self) -> float:
            return float(self._values[self._place])

        def set_exemplar(self, exemplar: object) -> None:
            """Exemplars are published as a whole: scraping.py."""

        def get_exemplar(self) -> None:
            return None

    return SharedValue
