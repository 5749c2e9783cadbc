"""What is known of every path: its label in metrics, its form of errors, and whether it needs a key.

The tasks' routes are also below `/models/NAME`, which names the model in the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from embert.server.config import ConfigError
from embert.server.frontend.operations import OPERATIONS
from embert.server.frontend.routes import TASKS, Operation, TaskRoute, tasks_by_path
from embert.server.http.errors import Dialect, Dialects
from embert.server.request.model_handle import ModelHandle
from embert.server.request.model_registry import ModelRegistry

__all__ = [
    "BELOW",
    "METRIC_ROUTES",
    "METRIC_TASKS",
    "MODELS",
    "ROUTES",
    "ModelPath",
    "dialects_by_path",
    "keyless_paths",
    "labels_by_path",
    "model_paths",
]

COHERE, OPENAI, TEI = Dialect.COHERE, Dialect.OPENAI, Dialect.TEI
ValueT = TypeVar("ValueT")
MODELS = "/models/"

ROUTES: tuple[TaskRoute | Operation, ...] = (*TASKS, *OPERATIONS)


class _ByPath(dict[str, ValueT]):
    """A value for every path that there can be: by route, else by how the path begins, else `rest`.

    A task's route below the name of a model counts as that route, whether there is such a model or not.
    """

    def __init__(
        self,
        values: Mapping[str, ValueT],
        rest: ValueT,
        prefixes: Mapping[str, ValueT],
        below: Mapping[str, str],
    ) -> None:
        """`values` by route; `below` is the route of each path with the name of a model that there is."""
        super().__init__(values)
        self._patterns = [(*_ends(path), value) for path, value in values.items() if "{" in path]
        self._patterns += [(MODELS, path, values[path]) for path in BELOW]
        self._prefixes, self._rest = prefixes, rest
        self.update({path: values[route] for path, route in below.items()})

    def __missing__(self, path: str) -> ValueT:
        for begin, end, value in self._patterns:
            if path.startswith(begin) and path.endswith(end) and len(path) > len(begin) + len(end):
                return value
        return next((value for prefix, value in self._prefixes.items() if path.startswith(prefix)), self._rest)


def _ends(pattern: str) -> tuple[str, str]:
    """What stands before `{id}`, and what after it."""
    begin, _, rest = pattern.partition("{")
    return begin, rest.partition("}")[2]


_OTHER = "other"
_DIALECT_BY_PATH = {path: route.dialect for route in ROUTES for path in route.paths}
# The longest first: `/v1/rerank` and `/rerank` have the same end.
BELOW = sorted((path for row in TASKS for path in row.paths if "{" not in path and path != "/"), key=len, reverse=True)
# All values of the label `route`: what clients send must not make labels.
METRIC_ROUTES = (*_DIALECT_BY_PATH, _OTHER)
METRIC_TASKS = frozenset(path for route in TASKS for path in route.paths)  # those of them that ask a model


def labels_by_path(below: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """The metric label of every path; `below` is the route of each path that has the name of a model in it."""
    return _ByPath({path: path for path in _DIALECT_BY_PATH}, _OTHER, {}, below or {})


def dialects_by_path(below: Mapping[str, str] | None = None) -> Dialects:
    """The dialect of errors of every path. A path below `/v1/` that is no route is a mistake of an OpenAI client."""
    prefixes = {"/v1/": OPENAI, "/openai/": OPENAI, "/v2/": COHERE}
    return _ByPath(_DIALECT_BY_PATH, TEI, prefixes, below or {})


def keyless_paths(groups: Iterable[str], models: Iterable[str] = ()) -> frozenset[str]:
    """The paths that need no key for GET, with these values of --keyless; `models` are the names in paths."""
    names, values = tuple(models), set(groups)
    wanted = [route for route in OPERATIONS if route.keyless in values]
    return frozenset(
        each for route in wanted for path in (*route.paths, *route.files) for each in _with_names(path, names)
    )


def _with_names(path: str, names: tuple[str, ...]) -> Iterator[str]:
    begin, brace, rest = path.partition("{")
    yield from (begin + name + rest.partition("}")[2] for name in names) if brace else (path,)


# --- below the name of a model ---


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
