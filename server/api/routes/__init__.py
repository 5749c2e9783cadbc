"""The table of routes. Whatever depends on which routes there are is made from it.

That is: the ASGI app, the OpenAPI document, metric labels, the dialect of errors, what needs no key, and the text of
`GET /`. The tests hold docs/api.md against it. A new task is a row in tasks.py, and a file in ../dialects/.
"""

from embert.server.api.routes.by_path import DIALECTS, METRIC_LABELS, METRIC_ROUTES, METRIC_TASKS, ROUTES
from embert.server.api.routes.operations import OPERATIONS, PROBES, keyless_paths
from embert.server.api.routes.row import Operation, Route, TaskRoute
from embert.server.api.routes.tasks import BY_MODEL, TASKS, tasks_by_path

__all__ = [
    "BY_MODEL",
    "DIALECTS",
    "METRIC_LABELS",
    "METRIC_ROUTES",
    "METRIC_TASKS",
    "OPERATIONS",
    "PROBES",
    "ROUTES",
    "TASKS",
    "Operation",
    "Route",
    "TaskRoute",
    "keyless_paths",
    "tasks_by_path",
]
