"""Schedulers of models whose batches cost what the test says."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from embert.engine.models.flops import TokenCounts
from embert.server.engine_worker.lanes import BatchLimits
from embert.server.engine_worker.scheduler import Batch, Scheduler
from embert.server.engine_worker.throughput import ThroughputEstimate


def scheduler_of(
    tokens: int,
    *,
    longest_text: int = 0,
    models: Sequence[Hashable] = (None, "small", "large"),
    fixed_s: float = 0.0,
    token_s: float = 1e-6,
    counts: TokenCounts | None = None,
) -> Scheduler:
    """A scheduler of these models, each with these limits of a batch, which takes `fixed_s` and `token_s` a token."""
    scheduler = Scheduler()
    for model in models:
        cost = ThroughputEstimate(tokens)
        cost.calibrate(fixed_s, token_s)
        scheduler.add_model(model, BatchLimits(cost, tokens, longest_text, counts))
    return scheduler


def next_batch(scheduler: Scheduler) -> Batch:
    """The next batch, where there is one."""
    batch = scheduler.next_batch()
    assert batch is not None
    return batch
