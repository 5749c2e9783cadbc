"""Finds children that run but do no work. They are killed, and then restarted like any other that dies.

Each process writes signs of life into shared memory (server/ipc/shared_counters.py).
"""

from __future__ import annotations

import time

from embert.server.config import ServeConfig
from embert.server.ipc.control import ModelInfo
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.supervisor.child import Child

__all__ = ["HangDetector"]

HANG_MIN_S, HANG_BATCHES = 5.0, 100  # a forward hangs after the time of so many full batches, but not before 5 s
# Without --engine-timeout. On a few cores a text of thousands of tokens takes minutes.
USUAL_BOUND_S, LONGEST_TEXTS = 30.0, 3
SIGN_MARGIN_S = 2.0  # signs of life come every second


class HangDetector:
    """Compares signs of life with limits."""

    def __init__(self, config: ServeConfig, counters: SharedCounters) -> None:
        self._config, self._counters = config, counters

    def add_limit(self, engine: Child, info: ModelInfo) -> None:
        """Derive an engine's limit from the speed of a model's first batches; --engine-timeout bounds it.

        Of several models, the slowest one's counts.
        """
        limit_s, bound_s = max(HANG_MIN_S, HANG_BATCHES * info.full_batch_s), self._config.engine_timeout
        if bound_s is None:
            bound_s = max(USUAL_BOUND_S, LONGEST_TEXTS * info.longest_text_s)
        limit_s = min(limit_s, bound_s)
        engine.hang_limit_s = limit_s if engine.limits_unknown else max(engine.hang_limit_s, limit_s)
        engine.limits_unknown = False

    def reason(self, child: Child, now: float) -> str | None:
        """Why a child counts as hung, for the log; None where it does not.

        One that drains does not: it shows no sign of life while it frees its memory, and --drain-timeout ends it.
        """
        if child.draining:
            return None
        if not child.ready:
            limit_s = self._config.start_timeout
            late = now - child.started > limit_s
            return f"not ready {limit_s:g} s after its start (--start-timeout), {child.doing}" if late else None
        if child.kind == "engine":
            since = self._counters.forward_since[child.index]
            if since and now - since > child.hang_limit_s:
                return f"a forward runs for more than {child.hang_limit_s:.1f} s"
            alive = self._counters.engine_alive[child.index]
        else:
            alive = self._counters.api_alive[child.index]
        silence_s = child.hang_limit_s + SIGN_MARGIN_S
        return f"no sign of life for more than {silence_s:.1f} s" if now - alive > silence_s else None

    def restart_clock(self, child: Child) -> None:
        """Measure all limits of a child from now on."""
        now = time.monotonic()
        if not child.ready:
            child.started = child.reported = now
        elif child.kind == "api":
            self._counters.api_alive[child.index] = now
        else:
            self._counters.engine_alive[child.index] = now
            if self._counters.forward_since[child.index]:
                self._counters.forward_since[child.index] = now
