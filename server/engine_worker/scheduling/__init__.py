"""Forms batches, chooses their model and estimates their durations. Pure: the callers have clocks and threads."""

from embert.server.engine_worker.scheduling.queues import BatchLimits
from embert.server.engine_worker.scheduling.requests import Batch, Request, Slice
from embert.server.engine_worker.scheduling.scheduler import Scheduler
from embert.server.engine_worker.scheduling.throughput import ThroughputEstimate

__all__ = ["Batch", "BatchLimits", "Request", "Scheduler", "Slice", "ThroughputEstimate"]
