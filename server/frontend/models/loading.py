"""The models' files to the services of an API process."""

from __future__ import annotations

import logging

from embert.engine import Tokenizer, load_model
from embert.engine.errors import EngineError
from embert.server.engine_client.router import Router
from embert.server.frontend.input.tokenizer_pool import TokenizerPool
from embert.server.frontend.models.model_handle import ModelHandle
from embert.server.frontend.models.model_registry import ModelRegistry
from embert.server.frontend.routes import METRIC_ROUTES, METRIC_TASKS
from embert.server.ipc.control import ControlConnection, ModelFailed, Progress, StartApi
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.latency_buckets import LatencyBuckets
from embert.server.observability.metric_memory import MetricMemory

__all__ = ["load_services"]

log = logging.getLogger(__name__)


def load_services(
    start: StartApi, control: ControlConnection, counters: SharedCounters, memory: MetricMemory
) -> ModelRegistry:
    """Read what the supervisor lists. Raises EngineError for files that cannot be read, ConfigError for equal names.

    Of several models, one that this process cannot read has failed, which the supervisor learns over `control`, and the
    others are served.
    """
    config = start.config
    router = Router(start.models, counters, start.worker)
    metrics = ApiMetrics(
        METRIC_ROUTES,
        LatencyBuckets.of(config.latency_buckets),
        tasks=METRIC_TASKS,
        models=[each.name for each in start.models],
        engines=len(start.engines),
    )
    pool = TokenizerPool(config.tokenization_threads, config.payload_limit)
    services, broken = [], dict(start.broken)
    for each in start.models:
        if each.name in broken:
            continue
        control.send(Progress("reading the tokenizer", each.number))
        try:
            model = load_model(each.folder, pooling=each.config.pooling, model_id=each.model_id)
            services.append(ModelHandle(each.config, model, Tokenizer(model), router, metrics, pool, each.number))
        except Exception as error:  # whatever is wrong with a model, the others are served
            reason = str(error)
            if not isinstance(error, EngineError):
                log.debug("reading a model failed", exc_info=True)
                reason = f"{each.model_id} cannot be served: {type(error).__name__}: {error}"
            if len(start.models) == 1:
                raise EngineError(reason) from error
            log.error("%s", reason)  # noqa: TRY400 - users need the sentence, not the traceback
            broken[each.name] = reason
            control.send(ModelFailed(each.number, reason))
    if not services:
        raise EngineError("; ".join(broken.values()))
    return ModelRegistry(config, services, router, metrics, memory, pool, broken)
