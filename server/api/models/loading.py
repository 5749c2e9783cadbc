"""The models' files to the services of an API process. Imported late: prometheus_client must find its folder."""

from __future__ import annotations

import logging
from typing import Any

from embert.engine import Tokenizer, load_model
from embert.engine.errors import EngineError
from embert.server.api.engines.router import Router
from embert.server.api.input.tokenizer_pool import TokenizerPool
from embert.server.api.models.service import Service
from embert.server.api.models.services import Services
from embert.server.api.routes import METRIC_ROUTES, METRIC_TASKS
from embert.server.ipc.control import StartApi, StartModel
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.latency_buckets import LatencyBuckets

__all__ = ["load_services"]

log = logging.getLogger(__name__)


def load_services(start: StartApi, counters: SharedCounters) -> Services:
    """Read what the supervisor lists. Raises EngineError for files that cannot be read, ConfigError for equal names.

    Of several models, one whose tokenizer cannot be loaded has failed, and the others are served.
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
    services = [_load(each, router, metrics, pool) for each in start.models]
    faults = [each.admission.fault for each in services]
    if all(faults):
        raise EngineError(faults[0])
    for fault in filter(None, faults):
        log.error("%s", fault)
    return Services(config, services, router, metrics, pool)


def _load(start: StartModel, router: Router, metrics: ApiMetrics, pool: TokenizerPool) -> Service:
    model = load_model(start.folder, pooling=start.config.pooling, model_id=start.model_id)
    tokenizer: Any = None  # which nothing uses where there is a fault: see Service.check_fault
    try:
        tokenizer = Tokenizer(model)
    except EngineError as error:
        router.admissions[start.number].fault = str(error)
    return Service(start.config, model, tokenizer, router, metrics, pool, start.number)
