"""An application of Ray Serve: replicas of `embert serve`, as many as the requests in flight ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

from embert.ray.replica import Replica
from embert.server.config import ConfigError, ServeConfig

# A replica answers many requests at a time, because a batch is made of what waits.
TARGET_ONGOING_REQUESTS = 32
MAX_ONGOING_REQUESTS = 256
MAX_QUEUED_REQUESTS = 1024  # that wait in each of Ray's proxies while every replica has its most
MAX_REPLICAS = 8
RAYS_OWN = ("host", "port", "ssl_")  # Ray's proxies listen, for all replicas


def deployment(
    model: str | Sequence[str] | None = None,
    *,
    num_cpus: float = 1,
    num_gpus: float = 0,
    serve_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """An application for `serve.run`, whose routes, answers and errors are those of `embert serve MODEL`.

    Several models are a list, each as MODEL or NAME=MODEL.

    `num_cpus` and `num_gpus` are a replica's, and what its engines run on: a GPU each, or the CPU with so many threads.
    `serve_options` are arguments of `ray.serve.deployment`, in place of ours or beside them; the keys of an
    `autoscaling_config` are taken one by one. `options` are those of `embert serve` with underscores, except for the
    address and TLS, which are Ray's.

    Raises ConfigError for an option that is unknown or has a value that is not allowed.
    """
    for name in options:
        if name.startswith(RAYS_OWN):
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
    ours: dict[str, Any] = {
        "name": "embert",
        "ray_actor_options": actor,
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_queued_requests": MAX_QUEUED_REQUESTS,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        # A request that is answered last has had all of its time, and the server ends in order after it.
        "graceful_shutdown_timeout_s": config.request_timeout + config.drain_timeout,
    }
    bound: serve.Deployment = serve.deployment(**ours | arguments)(Replica)
    return bound.bind(config)


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """For Ray Serve's config files: `import_path: embert.ray:application`, and `args` with the arguments above."""
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
