"""Times of kernels on the GPU: launches captured in one CUDA graph and replayed, in bursts or under sustained load.

Under sustained load an H100 reaches its power limit, and its matrix products run some 15 % slower than after a rest. So
a figure is of one state and never of a mixture: bursts with a rest before each (the default), or `sustained`, after a
second of the same work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LAUNCHES = 10  # of a graph
BURST_S = 0.01
LOAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing method: the median of `rounds`, each after a rest of `rest_s` or under sustained load."""

    rest_s: float
    rounds: int
    sustained: bool


class Recorded:
    """A graph of LAUNCHES launches on a separate `_cuda_testing.Bench`; `launch` is called with 0 … LAUNCHES - 1."""

    def __init__(self, bench: Any, launch: Callable[[int], None]) -> None:
        self._bench = bench
        self._launch = launch  # keeps its buffers alive as long as the graph
        launch(0)  # one-time work of a library stays out of the graph
        bench.synchronize()
        bench.begin_recording()
        try:
            for i in range(LAUNCHES):
                launch(i)
        finally:
            bench.end_recording()
        self.kernels = bench.recorded / LAUNCHES  # kernels of one launch
        once_s = bench.replay(1)[0] / 1e3
        self._burst = max(4, min(100, round(BURST_S / once_s)))

    def quick_us(self) -> float:
        """Return microseconds a launch from one burst without a rest, to choose among variants."""
        return self._burst_us()

    def round_us(self, timing: Timing) -> float:
        """Return microseconds a launch, in one round."""
        if timing.sustained:
            until = time.perf_counter() + LOAD_S
            while time.perf_counter() < until:
                self._bench.replay(self._burst)
        else:
            time.sleep(timing.rest_s)
        return self._burst_us()

    def us(self, timing: Timing) -> float:
        """Return microseconds a launch, the median of the rounds."""
        return statistics.median(self.round_us(timing) for _ in range(timing.rounds))

    def _burst_us(self) -> float:
        times = self._bench.replay(self._burst)
        return float(statistics.median(times[len(times) // 2 :])) / LAUNCHES * 1e3


def time_interleaved(recorded: Mapping[str, Recorded], timing: Timing) -> dict[str, float]:
    """Return microseconds a launch of each, medians of rounds in which each has one turn."""
    rounds = [{name: each.round_us(timing) for name, each in recorded.items()} for _ in range(timing.rounds)]
    return {name: statistics.median(one[name] for one in rounds) for name in recorded}
