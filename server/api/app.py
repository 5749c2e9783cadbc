"""The ASGI app of one API process: FastAPI for operations, plain routes for the work, the gate around both."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from embert import __version__
from embert.server.api.openapi import add_hot_routes
from embert.server.api.operations import operations
from embert.server.api.routes import HOT_ROUTES, hot_routes
from embert.server.api.service import Service
from embert.server.http.auth import Keys
from embert.server.http.errors import Invalid, NotFound, ServerError, error_body, speaks_openai
from embert.server.http.middleware import Gate, Guard, with_cors

__all__ = ["METRIC_ROUTES", "create_app"]

# The values of the label `route`, all of them: what clients send must not make labels.
METRIC_ROUTES = (
    *HOT_ROUTES,
    "/health", "/ping", "/livez", "/readyz", "/info", "/v1/models", "/v1/models/{id}",
    "/metrics", "/docs", "/openapi.json", "other",
)  # fmt: skip

_DESCRIPTION = "Embeddings from BERT-family encoders, in two dialects: OpenAI's and text-embeddings-inference's."


def create_app(service: Service, keys: Keys) -> ASGIApp:
    """Everything that answers HTTP."""
    app = FastAPIOffline(
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be built from the Host header, and loses bodies in some clients
        title="embert",
        version=__version__,
        description=_DESCRIPTION,
        swagger_ui_oauth2_redirect_url="/docs/oauth2-redirect",
    )
    hot = hot_routes(service)
    app.router.routes[:0] = hot
    app.include_router(operations(service))
    app.add_exception_handler(ServerError, _on_server_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    _complete_openapi(app, service)
    guard = Guard(app, {route.path: route.app for route in hot}, keys, service.metrics)
    return Gate(with_cors(guard, service.config), frozenset(METRIC_ROUTES), service.metrics)


def _complete_openapi(app: FastAPI, service: Service) -> None:
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            add_hot_routes(original(), service.model, service.config.max_client_batch_size)
        return original()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _respond(request: Request, error: ServerError, headers: dict[str, str] | None = None) -> Response:
    body = error_body(error, openai=speaks_openai(request.url.path))
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
    if known != path and known in METRIC_ROUTES:
        return f"no such route; {known} is one, without the slash at the end"
    return "no such route; /docs lists them"


async def _on_validation_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - its signature
    return _respond(request, Invalid("a parameter of this request is not valid"))
