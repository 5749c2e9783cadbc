"""The application of one HTTP process: `serve.py` with a task for each path, and FastAPI for operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from embert import __version__
from embert.server.frontend.openapi import ERROR_MODELS, complete_document, description
from embert.server.frontend.operations import Operations
from embert.server.frontend.playground import hint
from embert.server.frontend.routes import (
    FIRST_MODEL_PATHS,
    METRIC_TASKS,
    MODEL_SUFFIXES,
    MODELS_PREFIX,
    OPERATIONS,
    ROUTES,
    SWAGGER_FILES,
    SWAGGER_FOLDER,
    ModelPath,
    TaskRoute,
    error_formats_by_path,
    keyless_paths,
    labels_by_path,
    model_paths,
    tasks_by_path,
)
from embert.server.frontend.serve import RequestObserver, RequestServer, TaskEndpoint
from embert.server.http.auth import Keys
from embert.server.http.errors import ErrorFormats, RequestError, ServerError, describe_name
from embert.server.http.response import error_body
from embert.server.observability.access_log import AccessLog
from embert.server.registry.model_handle import ModelHandle
from embert.server.registry.model_registry import ModelRegistry, ModelSelector

if TYPE_CHECKING:
    from embert.server.observability.tracing.request_trace import RequestTracer


def create_app(
    registry: ModelRegistry, keys: Keys, access_log: AccessLog | None = None, tracer: RequestTracer | None = None
) -> RequestServer:
    """Builds what serves all requests. `tracer` is None without traces.

    Raises ConfigError where two models would have the same path.
    """
    by_model = model_paths(registry)
    routes = {path: entry.path for path, entry in by_model.items()}
    labels, error_formats = labels_by_path(routes), error_formats_by_path(routes)
    app = FastAPIOffline(
        docs_url=None,  # `_docs` is ours: FastAPI has absolute paths in it, which a proxy may serve elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be built from the Host header, and some clients lose the body on it
        title="embert",
        version=__version__,
        description=description(registry),
        servers=[{"url": "./"}],  # relative to the document
        # FastAPI's own would double ours where a program around embert sets OpenTelemetry up, and may log a text.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    first = registry.first
    tasks = {
        path: _endpoint(registry, route, first if path in FIRST_MODEL_PATHS else None)
        for path, route in tasks_by_path(first.model).items()
    }
    tasks |= {path: _endpoint(registry, entry.route, entry.handle, entry.name) for path, entry in by_model.items()}
    cors = None
    if origins := registry.config.cors_allow_origin:
        cors = partial(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # includes `authorization`, so that browsers can send a key
            expose_headers=["*"],
        )
    observer = RequestObserver(labels, METRIC_TASKS, error_formats, registry.metrics, registry.held, access_log, tracer)
    server = RequestServer(tasks, app, observer, keys, keyless_paths(("probes",), registry.by_name), cors)
    _add_operations(app, registry)
    _add_errors(app, registry, by_model, error_formats, server.has_task)
    _complete_openapi(app, registry)
    return server


def _endpoint(
    registry: ModelRegistry, route: TaskRoute, default: ModelHandle | None, path_model: str | None = None
) -> TaskEndpoint:
    has_field = "model" in route.request.model_fields
    selector = ModelSelector(registry, route.capability, default, path_model, has_field=has_field)
    model = "" if selector.by_body else selector.default.name
    return TaskEndpoint(selector, route.handler, selector.can, model)


def _add_operations(app: FastAPI, registry: ModelRegistry) -> None:
    models = [handle.model for handle in registry.all]
    routes = [
        (route.name, route.summary)
        for route in ROUTES
        if not isinstance(route, TaskRoute) or any(map(route.suits, models))
    ]
    operations = Operations(registry, hint(routes, registry.names))
    for operation in OPERATIONS:
        if operation.endpoint is None:
            continue
        responses: dict[int | str, dict[str, Any]] = {**operation.responses}
        for status, text in operation.errors.items():
            responses[status] = {"model": ERROR_MODELS[operation.error_format], "description": text}
        for path in operation.paths:
            app.add_api_route(
                path.replace("}", ":path}"),  # in Starlette's form, with which the name may hold slashes
                MethodType(operation.endpoint, operations),
                methods=["GET"],
                tags=["operations"],
                summary=operation.summary,
                responses=responses,
                include_in_schema=path == operation.path,
                **operation.options,
            )
    app.add_api_route("/docs", _docs, response_class=HTMLResponse, include_in_schema=False)
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.description = ""  # the summary is for clients, the docstring for readers of the code


async def _docs() -> HTMLResponse:
    """The page at `/docs`, which finds its files behind any path of a proxy."""
    script, style, icon = (f"{SWAGGER_FOLDER}/{name}" for name in SWAGGER_FILES)
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="embert",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )


def _complete_openapi(app: FastAPI, registry: ModelRegistry) -> None:
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete_document(original(), [(handle.model, handle.config) for handle in registry.all])
        return original()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _add_errors(
    app: FastAPI,
    registry: ModelRegistry,
    by_model: Mapping[str, ModelPath],
    error_formats: ErrorFormats,
    has_task: Callable[[str], bool],
) -> None:
    """Renders what FastAPI, Starlette and the operations raise in the form of the route's API."""

    def respond(request: Request, error: ServerError, headers: dict[str, str] | None = None) -> Response:
        body = error_body(error, error_formats[request.scope["path"]])
        return Response(body, error.status, headers, media_type="application/json")

    async def on_server_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServerError)  # noqa: S101 - what it is registered for
        return respond(request, error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - what it is registered for
        path, headers = request.scope["path"], dict(error.headers or {})
        if error.status_code == 405 or (error.status_code == 404 and has_task(path)):
            refusal: ServerError = RequestError(f"this route does not take {request.method}", status=405)
            headers.setdefault("Allow", "POST")
        else:
            refusal = _no_route(path, registry, by_model)
            if error.status_code != 404:
                refusal.status = error.status_code
        if refusal.status == 405 and path == "/":
            headers["Allow"] = "GET, POST"  # two routes, of which Starlette names the first
        return respond(request, refusal, headers)

    app.add_exception_handler(ServerError, on_server_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def _no_route(path: str, registry: ModelRegistry, by_model: Mapping[str, ModelPath]) -> ServerError:
    """The error of a path without a route. It names the route that was meant, where a base address is wrong."""
    shown_path = describe_name(path)
    words = [word for word in path.split("/") if word]
    words = [word for index, word in enumerate(words) if word not in ("v1", "v2") or word not in words[:index][-1:]]
    routes = {path for route in ROUTES for path in route.paths} | by_model.keys()
    suggestion = "/" + "/".join(words)
    if suggestion in routes and suggestion != "/":
        return RequestError(f"no such route: {shown_path}; {suggestion} is one", status=404)
    if path.startswith(MODELS_PREFIX):
        rest = path.removeprefix(MODELS_PREFIX)
        names = (rest.removesuffix(route) for route in MODEL_SUFFIXES if rest.endswith(route))
        try:
            registry.check_broken(rest.removesuffix("/"))
            if name := next(names, ""):
                registry.in_path(name)
        except ServerError as error:
            return error
    ends = ("/" + "/".join(words[begin:]) for begin in range(1, len(words)))
    suggestion = next((end for end in ends if end in routes), "")
    return RequestError(
        f"no such route: {shown_path}; {f'{suggestion} is one' if suggestion else '/docs lists them'}", status=404
    )
