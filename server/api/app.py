"""The ASGI app of one API process: FastAPI for operations, plain routes for the work, middleware around both."""

from __future__ import annotations

from types import MethodType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from embert import __version__
from embert.server.api.openapi import ERROR_MODELS, complete_document
from embert.server.api.operations import Operations
from embert.server.api.playground import hint
from embert.server.api.routes import DIALECTS, METRIC_LABELS, OPERATIONS, PROBES, ROUTES, tasks_by_path
from embert.server.api.service import Service
from embert.server.api.task_endpoint import TaskEndpoint
from embert.server.http.auth import AuthMiddleware, Keys
from embert.server.http.cors import with_cors
from embert.server.http.errors import Invalid, NotFound, ServerError, error_body
from embert.server.http.request_metrics import RequestMetricsMiddleware
from embert.server.observability.tracing.request_trace import RequestTracer

__all__ = ["create_app"]

_DESCRIPTION = (
    "Embeddings, scores and labels from BERT-family encoders, in the dialects of OpenAI, text-embeddings-inference, "
    "Cohere and vLLM."
)


def create_app(service: Service, keys: Keys, tracer: RequestTracer | None = None) -> ASGIApp:
    """Everything that answers HTTP. `tracer`: None without traces."""
    app = FastAPIOffline(
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be built from the Host header, and some clients lose the body on it
        title="embert",
        version=__version__,
        description=_DESCRIPTION,
        swagger_ui_oauth2_redirect_url="/docs/oauth2-redirect",
        # FastAPI's own would double ours where a program around embert sets OpenTelemetry up, and may log a text.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    work = {
        path: TaskEndpoint(service, row.handler, row.dialect, row.needs, reranks=row.reranks)
        for path, row in tasks_by_path(service.model).items()
    }
    app.router.routes[:0] = [
        Route(_any_length(path), endpoint, methods=["POST"], include_in_schema=False) for path, endpoint in work.items()
    ]
    _add_operations(app, service)
    app.add_exception_handler(ServerError, _on_server_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    _complete_openapi(app, service)
    hot = {path: endpoint for path, endpoint in work.items() if "{" not in path}
    guarded = AuthMiddleware(app, hot, keys, PROBES, DIALECTS, service.metrics)
    return RequestMetricsMiddleware(
        with_cors(guarded, service.config, DIALECTS), METRIC_LABELS, DIALECTS, service.metrics, tracer
    )


def _add_operations(app: FastAPI, service: Service) -> None:
    bound = Operations(service, hint((route.name, route.summary) for route in ROUTES))
    for row in OPERATIONS:
        if row.endpoint is None:
            continue
        responses: dict[int | str, dict[str, Any]] = {**row.responses}
        for status, text in row.errors.items():
            responses[status] = {"model": ERROR_MODELS[row.dialect], "description": text}
        for path in row.paths:
            app.add_api_route(
                _any_length(path),
                MethodType(row.endpoint, bound),
                methods=["GET"],
                tags=["operations"],
                summary=row.summary,
                responses=responses,
                include_in_schema=path == row.path,
                **row.options,
            )
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.description = ""  # the summary is for clients, the docstring for readers of the code


def _any_length(path: str) -> str:
    """A pattern for Starlette, whose `{id}` may hold slashes."""
    return path.replace("}", ":path}")


def _complete_openapi(app: FastAPI, service: Service) -> None:
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete_document(original(), service.model, service.config)
        return original()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _respond(request: Request, error: ServerError, headers: dict[str, str] | None = None) -> Response:
    body = error_body(error, DIALECTS[request.url.path])
    return Response(body, error.status, headers, media_type="application/json")


async def _on_server_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError)  # noqa: S101 - what it is registered for
    return _respond(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in our dialects."""
    assert isinstance(error, HTTPException)  # noqa: S101 - what it is registered for
    if error.status_code == 405:
        answer = NotFound(f"this route does not take {request.method}")
        answer.status = 405
    else:
        answer = NotFound(_no_such_route(request.url.path))
        answer.status = error.status_code
    headers = dict(error.headers or {})
    if answer.status == 405 and request.url.path == "/":
        headers["Allow"] = "GET, POST"  # two routes, of which Starlette names the first
    return _respond(request, answer, headers)


def _no_such_route(path: str) -> str:
    known = path.rstrip("/")
    if known != path and any(known in route.paths for route in ROUTES):
        return f"no such route; {known} is one, without the slash at the end"
    return "no such route; /docs lists them"


async def _on_validation_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - its signature
    return _respond(request, Invalid("a parameter of this request is not valid"))
