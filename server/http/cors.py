"""Browsers of other origins (CORS)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from embert.server.config import ServeConfig
from embert.server.http.errors import BadRequest, ErrorFormats, error_body

__all__ = ["with_cors"]


def with_cors(app: ASGIApp, config: ServeConfig, error_formats: ErrorFormats) -> ASGIApp:
    """Let browsers of the allowed origins in. Returns `app` itself where no origin is allowed."""
    if not config.cors_allow_origin:
        return app
    return _Cors(app, config.cors_allow_origin, error_formats)


class _Cors(CORSMiddleware):
    """Answers a refused preflight with an error in the route's form."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], error_formats: ErrorFormats) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # includes `authorization`, so that browsers can send a key
            expose_headers=["*"],
        )
        self._error_formats = error_formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                await self._answer(scope["path"], headers)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _answer(self, path: str, headers: Headers) -> Response:
        answer = self.preflight_response(request_headers=headers)
        if answer.status_code != 400:
            return answer
        what = bytes(answer.body).decode().removeprefix("Disallowed CORS ")
        why = f"the origin's preflight asks for what is not allowed (--cors-allow-origin): {what}"
        answer_headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return Response(
            error_body(BadRequest(why), self._error_formats[path]), 400, answer_headers, media_type="application/json"
        )
