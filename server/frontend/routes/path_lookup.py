"""What is known of every path that a client may ask for: its label in metrics, and the dialect of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from embert.server.frontend.routes.model_paths import MODELS
from embert.server.frontend.routes.operations import OPERATIONS
from embert.server.frontend.routes.route import Operation, TaskRoute
from embert.server.frontend.routes.tasks import TASKS
from embert.server.http.errors import Dialect, Dialects

__all__ = ["BELOW", "METRIC_ROUTES", "METRIC_TASKS", "ROUTES", "dialects_by_path", "labels_by_path"]

COHERE, OPENAI, TEI = Dialect.COHERE, Dialect.OPENAI, Dialect.TEI
ValueT = TypeVar("ValueT")

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
