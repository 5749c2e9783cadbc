"""An application of Ray Serve: replicas of `embert serve`, whose number follows the requests in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

from embert.ray.replica import Replica
from embert.server.config import ConfigError, ServeConfig

# A replica serves many requests at a time, because a batch is formed of those that wait.
TARGET_ONGOING_REQUESTS = 32
MAX_ONGOING_REQUESTS = 256
MAX_QUEUED_REQUESTS = 1024  # in each of Ray's proxies while every replica has MAX_ONGOING_REQUESTS
MAX_REPLICAS = 8
RAY_OPTIONS = ("host", "port", "ssl_")  # prefixes of options of Ray's proxies, which listen for all replicas


def deployment(
    model: str | Sequence[str] | None = None,
    *,
    num_cpus: float = 1,
    num_gpus: float = 0,
    serve_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Returns an application for `serve.run`, whose routes, responses and errors are those of `embert serve MODEL`.

    Several models are a list, each as MODEL or NAME=MODEL.

    `num_cpus` and `num_gpus` are those of a replica. Each of its engines runs on one GPU, or on the CPU with `num_cpus`
    threads. `serve_options` are arguments of `ray.serve.deployment`, which replace or extend the defaults here; the
    keys of an `autoscaling_config` do so one by one. `options` are those of `embert serve` with underscores, except for
    the address and TLS, which Ray configures.

    Raises ConfigError for an option that is unknown or has a value that is not allowed.
    """
    for name in options:
        if name.startswith(RAY_OPTIONS):
            raise ConfigError(
                f"`{name}` is not a replica's: Ray Serve's proxies listen, and serve.start configures them"
            )
    models = (model,) if isinstance(model, str) else tuple(model or ())
    config = _config({"workers": 1, **options, "model": models})
    arguments = dict(serve_options or {})
    if arguments.get("num_replicas", "auto") == "auto":
        scaling = {"min_replicas": 1, "max_replicas": MAX_REPLICAS, "target_ongoing_requests": TARGET_ONGOING_REQUESTS}
        arguments["autoscaling_config"] = scaling | dict(arguments.get("autoscaling_config") or {})
        arguments.pop("num_replicas", None)
    actor = {"num_cpus": num_cpus, "num_gpus": num_gpus} | dict(arguments.pop("ray_actor_options", None) or {})
    defaults: dict[str, Any] = {
        "name": "embert",
        "ray_actor_options": actor,
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_queued_requests": MAX_QUEUED_REQUESTS,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        # Time for the last request, and then for the server to drain.
        "graceful_shutdown_timeout_s": config.request_timeout + config.drain_timeout,
    }
    replicas: serve.Deployment = serve.deployment(**defaults | arguments)(Replica)
    return replicas.bind(config)


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Builds the application of Ray Serve's config files: `import_path: embert.ray:application`, `args` as above."""
    return deployment(**arguments)


def _config(options: Mapping[str, Any]) -> ServeConfig:
    known = {field.name for field in dataclasses.fields(ServeConfig)}
    for name in options:
        if name not in known:
            raise ConfigError(f"`{name}` is not an option of `embert serve`")
    # In a config file, repeated options are lists.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    return ServeConfig(**values)
