"""The table of routes. Whatever depends on which routes there are is made from it.

That is: the ASGI app, the OpenAPI document, metric labels, the dialect of errors, what needs no key, and the text of
`GET /`. The tests hold docs/api.md against it. A new task is a row in tasks.py, and a file in ../dialects/.
"""

from embert.server.frontend.routes.model_paths import MODELS, ModelPath, model_paths
from embert.server.frontend.routes.operations import OPERATIONS, keyless_paths
from embert.server.frontend.routes.path_lookup import (
    BELOW,
    METRIC_ROUTES,
    METRIC_TASKS,
    ROUTES,
    dialects_by_path,
    labels_by_path,
)
from embert.server.frontend.routes.route import Operation, Route, TaskRoute
from embert.server.frontend.routes.tasks import BY_MODEL, OF_THE_FIRST, TASKS, tasks_by_path

__all__ = [
    "BELOW",
    "BY_MODEL",
    "METRIC_ROUTES",
    "METRIC_TASKS",
    "MODELS",
    "OF_THE_FIRST",
    "OPERATIONS",
    "ROUTES",
    "TASKS",
    "ModelPath",
    "Operation",
    "Route",
    "TaskRoute",
    "dialects_by_path",
    "keyless_paths",
    "labels_by_path",
    "model_paths",
    "tasks_by_path",
]
