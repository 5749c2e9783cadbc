"""Restart delays of lost processes, and when the server gives up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embert.server.supervisor.child import Child, Kind

__all__ = ["FIRST_STARTS", "STABLE_S", "Backoff", "Outages"]

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 10.0
FIRST_STARTS = 3  # a process that dies this often before the server was ever ready will not come up
STABLE_S = 2.0  # a failure after being ready for so long counts as a first failure


@dataclass(slots=True)
class Backoff:
    """The pause before a start: doubles with every failure, up to BACKOFF_MAX_S."""

    _delay_s: float = BACKOFF_FIRST_S

    def next_s(self) -> float:
        """The pause now; the next one is twice as long."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, BACKOFF_MAX_S)
        return delay_s

    def reset(self) -> None:
        """Begin with the shortest pause again."""
        self._delay_s = BACKOFF_FIRST_S


class Outages:
    """Since when no engine, or no API process, has been able to work (--give-up-after)."""

    def __init__(self, give_up_after_s: float, start_timeout_s: float) -> None:
        """`give_up_after_s` of 0: never."""
        self._give_up_after_s, self._start_timeout_s = give_up_after_s, start_timeout_s
        self._since: dict[Kind, float] = {}

    def note_loss(self, child: Child, siblings: Sequence[Child]) -> None:
        """A child was lost: an outage of its kind begins if none of its siblings is ready."""
        if not any(sibling.ready for sibling in siblings):
            self._since.setdefault(child.kind, time.monotonic())

    def restart_clocks(self, now: float) -> None:
        """Measure current outages from now on, because the supervisor itself was stopped."""
        self._since = dict.fromkeys(self._since, now)

    def exceeded_s(self, kind: Kind, children: Sequence[Child], now: float) -> float | None:
        """The seconds of an outage that has lasted too long, else None. Ends the outage of a kind that is stable."""
        if any(child.ready and now - child.ready_since > STABLE_S for child in children):
            self._since.pop(kind, None)
        since = self._since.get(kind)
        if since is None or any(child.ready for child in children):
            return None
        too_long = self._give_up_after_s and now - since > self._limit_s(children)
        return now - since if too_long else None

    def _limit_s(self, children: Sequence[Child]) -> float:
        """--give-up-after, or more where a start takes so long that it could not succeed within that."""
        slowest_s = max(child.slowest_start_s for child in children)
        return max(self._give_up_after_s, 2 * slowest_s or self._start_timeout_s)
