"""Properties of every path: its label in metrics, its form of errors, and whether it needs a key.

The tasks' routes are also below `/models/NAME`, which names the model in the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from embert.server.config import ConfigError
from embert.server.frontend.operations import OPERATIONS
from embert.server.frontend.routes import TASKS, Operation, TaskRoute, tasks_by_path
from embert.server.http.errors import ErrorFormat, ErrorFormats
from embert.server.request.model_handle import ModelHandle
from embert.server.request.model_registry import ModelRegistry

__all__ = [
    "METRIC_ROUTES",
    "METRIC_TASKS",
    "MODELS",
    "ROUTES",
    "ROUTES_OF_MODELS",
    "ModelPath",
    "error_formats_by_path",
    "keyless_paths",
    "labels_by_path",
    "model_paths",
]

COHERE, OPENAI, TEI = ErrorFormat.COHERE, ErrorFormat.OPENAI, ErrorFormat.TEI
ValueT = TypeVar("ValueT")
MODELS = "/models/"

ROUTES: tuple[TaskRoute | Operation, ...] = (*TASKS, *OPERATIONS)


class _ByPath(dict[str, ValueT]):
    """A value for every possible path: by route, else by how the path begins, else `rest`.

    A task's route below the name of a model counts as that route, whether the model exists or not.
    """

    def __init__(
        self,
        values: Mapping[str, ValueT],
        rest: ValueT,
        prefixes: Mapping[str, ValueT],
        model_paths: Mapping[str, str],
    ) -> None:
        """`values` by route; `model_paths` is the route of each path with the name of a model that there is."""
        super().__init__(values)
        self._patterns = [(*_ends(path), value) for path, value in values.items() if "{" in path]
        self._patterns += [(MODELS, path, values[path]) for path in ROUTES_OF_MODELS]
        self._prefixes, self._rest = prefixes, rest
        self.update({path: values[route] for path, route in model_paths.items()})

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
_ERROR_FORMATS = {path: route.error_format for route in ROUTES for path in route.paths}
# The longest first: `/v1/rerank` and `/rerank` have the same end.
ROUTES_OF_MODELS = sorted(
    (path for route in TASKS for path in route.paths if "{" not in path and path != "/"), key=len, reverse=True
)
# All values of the label `route`: what clients send must not make labels.
METRIC_ROUTES = (*_ERROR_FORMATS, _OTHER)
METRIC_TASKS = frozenset(path for route in TASKS for path in route.paths)  # those of them that ask a model


def labels_by_path(model_paths: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """The metric label of every path; `model_paths` is the route of each path that has the name of a model in it."""
    return _ByPath({path: path for path in _ERROR_FORMATS}, _OTHER, {}, model_paths or {})


def error_formats_by_path(model_paths: Mapping[str, str] | None = None) -> ErrorFormats:
    """The form of errors of every path. A path below `/v1/` that is no route is a mistake of an OpenAI client."""
    prefixes = {"/v1/": OPENAI, "/openai/": OPENAI, "/v2/": COHERE}
    return _ByPath(_ERROR_FORMATS, TEI, prefixes, model_paths or {})


def keyless_paths(groups: Iterable[str], models: Iterable[str] = ()) -> frozenset[str]:
    """The paths that need no key for GET, with these values of --keyless; `models` are the names in paths."""
    names, values = tuple(models), set(groups)
    keyless = [route for route in OPERATIONS if route.keyless in values]
    return frozenset(
        named for route in keyless for path in (*route.paths, *route.files) for named in _with_names(path, names)
    )


def _with_names(path: str, names: tuple[str, ...]) -> Iterator[str]:
    begin, brace, rest = path.partition("{")
    yield from (begin + name + rest.partition("}")[2] for name in names) if brace else (path,)


# --- with the name of a model ---


class ModelPath(NamedTuple):
    """What is at a path with the name of a model in it."""

    handle: ModelHandle
    name: str
    path: str  # without the name
    route: TaskRoute


def model_paths(registry: ModelRegistry) -> dict[str, ModelPath]:
    """All of them. Raises ConfigError if one name is another name followed by a part of a route."""
    paths: dict[str, ModelPath] = {}
    for name, handle in registry.by_name.items():
        for path, entry in _paths(name, handle):
            other = paths.setdefault(path, entry)
            if other.handle is not handle:
                raise ConfigError(
                    f"the models {other.name!r} and {name!r} would have the same path {path}; give one of them another "
                    "name, as in NAME=MODEL"
                )
    return paths


def _paths(name: str, handle: ModelHandle) -> Iterator[tuple[str, ModelPath]]:
    for path, route in tasks_by_path(handle.model).items():
        if "{" in path:
            continue
        entry = ModelPath(handle, name, path, route)
        yield MODELS + name + path, entry
        if path == "/":
            yield MODELS + name, entry
