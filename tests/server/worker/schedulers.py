"""Schedulers of models whose batches cost what the test says."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from embert.server.worker.scheduling import BatchLimits, Scheduler

__all__ = ["scheduler_of"]


def scheduler_of(
    tokens: int,
    texts: int | None = None,
    longest_text: int | None = None,
    *,
    models: Sequence[Hashable] = (None, "small", "large"),
    cost_s: Callable[[int], float] = float,
) -> Scheduler:
    """A scheduler of these models, each with these limits of a batch."""
    scheduler = Scheduler()
    for model in models:
        scheduler.add_model(model, BatchLimits.of(tokens, texts, longest_text, cost_s))
    return scheduler
