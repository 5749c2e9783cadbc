"""Times of kernels on the GPU: launches recorded as one graph and replayed, in short bursts or after a second of load.

A GPU under steady load is held back by its power limit: an H100's matrix products then run some 15 % slower than right
after a rest. A figure is of one state or of the other, never of a mixture: bursts with a rest before each (the
default), or, `sustained`, after a second of the same work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LAUNCHES", "Recorded", "Timing", "take_turns"]

LAUNCHES = 10  # in a graph
BURST_S = 0.01
LOAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """How figures are taken: medians over `rounds`."""

    rest_s: float
    rounds: int
    sustained: bool


class Recorded:
    """A launch recorded LAUNCHES times on a `_cuda_testing.Bench` of its own; it is given 0 … LAUNCHES - 1."""

    def __init__(self, bench: Any, launch: Callable[[int], None]) -> None:
        self._bench = bench
        self._launch = launch  # what it holds must outlive the graph
        launch(0)  # whatever a library does once, it does now
        bench.synchronize()
        bench.begin_recording()
        try:
            for i in range(LAUNCHES):
                launch(i)
        finally:
            bench.end_recording()
        self.kernels = bench.recorded / LAUNCHES  # a launch
        once_s = bench.replay(1)[0] / 1e3
        self._burst = max(4, min(100, round(BURST_S / once_s)))

    def quick_us(self) -> float:
        """Microseconds a launch, from one burst without a rest: to choose among variants."""
        return self._burst_us()

    def round_us(self, timing: Timing) -> float:
        """Microseconds a launch, in one round."""
        if timing.sustained:
            until = time.perf_counter() + LOAD_S
            while time.perf_counter() < until:
                self._bench.replay(self._burst)
        else:
            time.sleep(timing.rest_s)
        return self._burst_us()

    def us(self, timing: Timing) -> float:
        """Microseconds a launch: the median of the rounds."""
        return statistics.median(self.round_us(timing) for _ in range(timing.rounds))

    def _burst_us(self) -> float:
        times = self._bench.replay(self._burst)
        return float(statistics.median(times[len(times) // 2 :])) / LAUNCHES * 1e3


def take_turns(recorded: Mapping[str, Recorded], timing: Timing) -> dict[str, float]:
    """Microseconds a launch of each, medians of rounds in which everyone has a turn."""
    rounds = [{name: each.round_us(timing) for name, each in recorded.items()} for _ in range(timing.rounds)]
    return {name: statistics.median(one[name] for one in rounds) for name in recorded}
