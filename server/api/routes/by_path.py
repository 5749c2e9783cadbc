"""What is known of every path that a client may ask for: its label in metrics, and the dialect of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from embert.server.api.routes.operations import OPERATIONS
from embert.server.api.routes.row import Operation, TaskRoute
from embert.server.api.routes.tasks import TASKS
from embert.server.http.errors import Dialect, Dialects

__all__ = ["DIALECTS", "METRIC_LABELS", "METRIC_ROUTES", "METRIC_TASKS", "ROUTES"]

COHERE, OPENAI, TEI = Dialect.COHERE, Dialect.OPENAI, Dialect.TEI
ValueT = TypeVar("ValueT")

ROUTES: tuple[TaskRoute | Operation, ...] = (*TASKS, *OPERATIONS)


class _ByPath(dict[str, ValueT]):
    """A value for every path that there can be: by route, else by how the path begins, else `rest`."""

    def __init__(self, values: Mapping[str, ValueT], rest: ValueT, prefixes: Mapping[str, ValueT]) -> None:
        super().__init__(values)
        self._patterns = [(*_ends(path), value) for path, value in values.items() if "{" in path]
        self._prefixes, self._rest = prefixes, rest

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
# All values of the label `route`: what clients send must not make labels.
METRIC_ROUTES = (*_DIALECT_BY_PATH, _OTHER)
METRIC_TASKS = frozenset(path for route in TASKS for path in route.paths)  # those of them that ask a model
METRIC_LABELS: Mapping[str, str] = _ByPath({path: path for path in _DIALECT_BY_PATH}, _OTHER, {})
# A path below these that is no route is a mistake of one of OpenAI's clients, or of Cohere's.
DIALECTS: Dialects = _ByPath(_DIALECT_BY_PATH, TEI, {"/v1/": OPENAI, "/openai/": OPENAI, "/v2/": COHERE})
