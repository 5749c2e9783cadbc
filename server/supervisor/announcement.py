"""What the log says once the server is ready."""

from __future__ import annotations

import logging
import socket

from embert.engine.model import Model
from embert.engine.tasks import Task
from embert.server.config import ServeConfig
from embert.server.ipc.control import ModelInfo

__all__ = ["announce"]

log = logging.getLogger(__name__)


def announce(
    config: ServeConfig, model: Model, info: ModelInfo, devices: list[str], sock: socket.socket, took_s: float
) -> None:
    """Log encoder, limits and address, and a command to try. `sock` is a listening one, `took_s` the whole start."""
    shown = ", ".join(devices) if len(devices) > 1 else info.device
    log.info("encoder  %s on %s (%s), %s; %s", info.encoder, shown, info.device_name, info.dtype, info.choice)
    seconds = f" or {config.max_queue_seconds:g} s" if config.max_queue_seconds else ""
    log.info(
        "limits   batch %d tokens, queue %d tokens%s, request %d texts and %d bytes, %g s",
        info.max_batch_tokens,
        config.queue_budget(info.max_batch_tokens, len(devices)),
        seconds,
        config.max_client_batch_size,
        config.payload_limit,
        config.request_timeout,
    )
    url = _url(sock, tls=config.ssl_certfile is not None)
    log.info(
        "ready    %s after %.1f s, HTTP processes: %d; documentation at %s/docs",
        url,
        took_s,
        config.http_processes,
        url,
    )
    if config.log_format == "text":
        path, body = _example(model)
        key = " -H 'authorization: Bearer KEY'" if config.api_key or config.api_key_file else ""
        log.info("try      curl %s%s -H 'content-type: application/json'%s -d '%s'", url, path, key, body)


def _example(model: Model) -> tuple[str, str]:
    """A path and a body that this model answers."""
    if Task.EMBED in model.tasks:
        return "/v1/embeddings", '{"input": "Hello, world"}'
    if model.heads.classifier is not None and len(model.heads.classifier.labels) == 1:
        return "/rerank", '{"query": "Hello", "texts": ["Hello, world", "Goodbye"]}'
    return "/", '{"inputs": "Hello, world"}'


def _url(sock: socket.socket, *, tls: bool) -> str:
    """Where a client on this machine finds the server."""
    host, port = sock.getsockname()[:2]
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"{'https' if tls else 'http'}://{shown}:{port}"
