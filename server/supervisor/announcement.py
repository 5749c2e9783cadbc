"""Logs what is served once the server is ready."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from embert.engine.model import Model
from embert.engine.tasks import Task
from embert.server.config import ServeConfig
from embert.server.ipc.control import EngineState
from embert.server.supervisor.planned_model import PlannedModel

log = logging.getLogger(__name__)


def announce(
    config: ServeConfig,
    models: list[PlannedModel],
    broken: Mapping[str, str],
    engines: list[EngineState],
    sock: socket.socket,
    took_s: float,
) -> bool:
    """Log encoders, limits and address, and a command to try. Returns False if no model works.

    `broken` has the names of models that cannot be read, with the reasons. `sock` is listening, and `took_s` is the
    duration of the whole start.
    """
    works: list[PlannedModel] = []
    for model in models:
        number, name = model.start.number, model.start.name
        states = [engine.models[number] for engine in engines if number in engine.models]
        info = next((state.info for state in states if state.info is not None), None)
        if info is None or name in broken:
            log.error("model    %s is not served: %s", name, broken.get(name) or states[0].detail)
            continue
        works.append(model)
        prefix = f"{name}: " if len(models) > 1 else ""
        shown = ", ".join(model.devices) if len(model.devices) > 1 else info.device
        log.info(
            "encoder  %s%s on %s (%s), %s; %s", prefix, info.encoder, shown, info.device_name, info.dtype, info.choice
        )
        model_config = model.start.config
        seconds = f" or {model_config.max_queue_seconds:g} s" if model_config.max_queue_seconds else ""
        log.info(
            "limits   %sbatch %d tokens, queue %d tokens%s, request %d texts and %d bytes, %g s",
            prefix,
            info.max_batch_tokens,
            model_config.queue_budget(info.max_batch_tokens, len(model.devices)),
            seconds,
            model_config.max_client_batch_size,
            model_config.payload_limit,
            model_config.request_timeout,
        )
    if not works:
        return False
    url = _url(sock, tls=config.ssl_certfile is not None)
    total = len({*broken, *(model.start.name for model in models)})
    counts = f", models: {len(works)} of {total}" if total > 1 else ""
    log.info(
        "ready    %s after %.1f s%s, HTTP processes: %d; documentation at %s/docs",
        url,
        took_s,
        counts,
        config.http_processes,
        url,
    )
    if config.log_format == "text":
        path, body = _example(works[0].model)
        if works[0] is not models[0]:
            path = f"/models/{works[0].start.name}{path}"
        key = " -H 'authorization: Bearer KEY'" if config.api_key or config.api_key_file else ""
        log.info("try      curl %s%s -H 'content-type: application/json'%s -d '%s'", url, path, key, body)
    return True


def _example(model: Model) -> tuple[str, str]:
    """A path and a body for this model."""
    if Task.EMBED in model.tasks:
        return "/v1/embeddings", '{"input": "Hello, world"}'
    if model.heads.decider is not None:
        return "/v1/decisions", '{"input": "Hello", "questions": [{"type": "predicate", "instructions": "A greeting"}]}'
    if model.heads.classifier is not None and len(model.heads.classifier.labels) == 1:
        return "/rerank", '{"query": "Hello", "texts": ["Hello, world", "Goodbye"]}'
    return "/", '{"inputs": "Hello, world"}'


def _url(sock: socket.socket, *, tls: bool) -> str:
    """URL of the server for a client on this machine."""
    host, port = sock.getsockname()[:2]
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"{'https' if tls else 'http'}://{shown}:{port}"
