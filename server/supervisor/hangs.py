"""Detects children that run but do no work, and outages of all children of a kind.

Hung children are killed, and then restarted like any other that dies. Each process writes signs of life into shared
memory (server/ipc/shared_counters.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from embert.server.config import ServeConfig
from embert.server.ipc.control import ModelInfo
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.supervisor.child import Child, Kind

HANG_MIN_S, HANG_BATCHES = 5.0, 100  # a forward hangs after the time of 100 full batches, but not before 5 s
# Without --engine-timeout. On a few cores a text of thousands of tokens takes minutes.
USUAL_BOUND_S, LONGEST_TEXTS = 30.0, 3
STABLE_S = 2.0  # a process that was ready for longer starts after the shortest pause when it is lost
GIVE_UP_AFTER_S = 300.0  # longer than a GPU or a file system may be away and still come back by itself
SIGN_MARGIN_S = 2.0  # signs of life come every second


class HangDetector:
    """Compares signs of life with limits."""

    def __init__(self, config: ServeConfig, counters: SharedCounters) -> None:
        self._config, self._counters = config, counters

    def add_limit(self, engine: Child, info: ModelInfo) -> None:
        """Derive an engine's limit from the speed of a model's first batches; --engine-timeout bounds it.

        Of several models, the slowest one's counts.
        """
        longest_s, bound_s = LONGEST_TEXTS * info.longest_text_s, self._config.engine_timeout
        limit_s = max(HANG_MIN_S, HANG_BATCHES * info.full_batch_s, longest_s)
        if bound_s is None:
            bound_s = max(USUAL_BOUND_S, longest_s)
        limit_s = min(limit_s, bound_s)
        engine.hang_limit_s = limit_s if engine.limits_unknown else max(engine.hang_limit_s, limit_s)
        engine.limits_unknown = False

    def reason(self, child: Child, now: float) -> str | None:
        """The reason for which a child counts as hung, or None.

        A child that drains does not: it shows no sign of life while it frees its memory, and --drain-timeout ends it.
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
            alive = self._counters.http_alive[child.index]
        silence_s = child.hang_limit_s + SIGN_MARGIN_S
        return f"no sign of life for more than {silence_s:.1f} s" if now - alive > silence_s else None

    def restart_clock(self, child: Child) -> None:
        """Measure all limits of a child from now on."""
        now = time.monotonic()
        if not child.ready:
            child.started = child.reported = now
        elif child.kind == "http":
            self._counters.http_alive[child.index] = now
        else:
            self._counters.engine_alive[child.index] = now
            if self._counters.forward_since[child.index]:
                self._counters.forward_since[child.index] = now


class Outages:
    """The times since when no engine, or no HTTP process, has been ready (GIVE_UP_AFTER_S)."""

    def __init__(self, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._since: dict[Kind, float] = {}

    def note_loss(self, child: Child, siblings: Sequence[Child]) -> None:
        """Count a lost child. An outage of its kind begins if none of its siblings is ready."""
        if not any(sibling.ready for sibling in siblings):
            self._since.setdefault(child.kind, time.monotonic())

    def restart_clocks(self, now: float) -> None:
        """Measure outages from now on, because the supervisor itself was stopped."""
        self._since = dict.fromkeys(self._since, now)

    def exceeded_s(self, kind: Kind, children: Sequence[Child], now: float) -> float | None:
        """Seconds of an outage that has lasted too long, otherwise None. Ends the outage of a kind that is stable."""
        if any(child.ready and now - child.ready_since > STABLE_S for child in children):
            self._since.pop(kind, None)
        since = self._since.get(kind)
        if since is None or any(child.ready for child in children):
            return None
        return now - since if now - since > self._limit_s(children) else None

    def _limit_s(self, children: Sequence[Child]) -> float:
        """GIVE_UP_AFTER_S, or longer if no start could succeed within that."""
        slowest_s = max(child.slowest_start_s for child in children)
        return max(GIVE_UP_AFTER_S, 2 * slowest_s or self._start_timeout_s)
