"""How long work takes on engines that share their time equally between models. Pure arithmetic.

While several models have work, each gets the same share of an engine's time. A model's own work of w seconds is so done
after w + Σ min(w, work of another model): others take as much time as it does, or as much as they have work for.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["wait_s", "work_within"]


def wait_s(work_s: float, others_s: Sequence[float]) -> float:
    """Seconds until work of `work_s` seconds is done beside that of other models."""
    return work_s + sum(min(work_s, other_s) for other_s in others_s)


def work_within(limit_s: float, others_s: Sequence[float]) -> float:
    """The most work, in seconds, that is done within `limit_s` beside that of other models: `wait_s`, inverted."""
    left_s, sharing = limit_s, len(others_s) + 1
    for other_s in sorted(others_s):
        if other_s * sharing >= left_s:
            break
        left_s -= other_s  # all of it is done within the time, and the others share the rest
        sharing -= 1
    return left_s / sharing
