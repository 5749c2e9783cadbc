"""What the supervisor and the API processes learn about the health of this engine.

The supervisor reads two numbers of shared memory: when the engine last showed a sign of life, and when its forward
began. API processes get an EngineStatus with every message and every second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from embert.engine.errors import EncoderError
from embert.server.engine_worker.scheduling.throughput import BusyTime
from embert.server.ipc.messages import EngineStatus
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.observability.metrics import EngineMetrics

__all__ = ["Health"]

BUSY_INTERVAL_S = 1.0

ResultT = TypeVar("ResultT")


class Health:
    """Of engine `index`. Times are seconds of CLOCK_MONOTONIC."""

    def __init__(
        self,
        index: int,
        counters: SharedCounters,
        busy: BusyTime,
        metrics: EngineMetrics,
        queue_tokens: Callable[[], int],
        rates: Callable[[], list[float]],
    ) -> None:
        """`rates` gives the tokens a second of every model of the server, by number."""
        self._index, self._counters = index, counters
        self._busy, self._metrics, self._queue_tokens, self._rates = busy, metrics, queue_tokens, rates
        self.last_success = 0.0  # end of the last forward that worked
        self._busy_due = 0.0  # when to compute engine_busy_ratio again

    def succeeded(self) -> None:
        """A forward has worked."""
        self.last_success = time.monotonic()
        self._metrics.last_success = time.time()

    def watched(self, model: int, work: Callable[[], ResultT]) -> ResultT:
        """Do work of a model, by number, for which the supervisor kills this process if it takes too long.

        Raises EncoderError in place of MemoryError.
        """
        self._counters.forward_model[self._index] = model
        self._counters.forward_since[self._index] = time.monotonic()
        try:
            return work()
        except MemoryError as error:
            raise EncoderError("not enough memory for this batch") from error
        finally:
            self._counters.forward_since[self._index] = 0.0

    def status(self) -> EngineStatus:
        """The engine's status, which is also a sign of life. Any thread may call it."""
        now = time.monotonic()
        self._counters.engine_alive[self._index] = now
        if now >= self._busy_due:
            self._busy_due = now + BUSY_INTERVAL_S
            self._metrics.busy_ratio.set(self._busy.ratio(now))
        return EngineStatus(self._index, self.last_success, self._queue_tokens(), self._rates())
