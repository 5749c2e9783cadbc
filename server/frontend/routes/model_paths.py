"""The tasks' routes below `/models/NAME`, which name the model in the path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from embert.server.config import ConfigError
from embert.server.frontend.models.model_handle import ModelHandle
from embert.server.frontend.models.model_registry import ModelRegistry
from embert.server.frontend.routes.route import TaskRoute
from embert.server.frontend.routes.tasks import tasks_by_path

__all__ = ["MODELS", "ModelPath", "model_paths"]

MODELS = "/models/"


class ModelPath(NamedTuple):
    """What is at a path with the name of a model in it."""

    service: ModelHandle
    name: str
    route: str  # the path without the name
    row: TaskRoute


def model_paths(services: ModelRegistry) -> dict[str, ModelPath]:
    """All of them. Raises ConfigError for names of which one is the other with a part of a route behind it."""
    found: dict[str, ModelPath] = {}
    for name, service in services.by_name.items():
        for path, place in _paths(name, service):
            other = found.setdefault(path, place)
            if other.service is not service:
                raise ConfigError(
                    f"the models {other.name!r} and {name!r} would have the same path {path}; give one of them another "
                    "name, as in NAME=MODEL"
                )
    return found


def _paths(name: str, service: ModelHandle) -> Iterator[tuple[str, ModelPath]]:
    for route, row in tasks_by_path(service.model).items():
        if "{" in route:
            continue
        yield MODELS + name + route, ModelPath(service, name, route, row)
        if route == "/":
            yield MODELS + name, ModelPath(service, name, route, row)
