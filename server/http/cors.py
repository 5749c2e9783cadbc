"""CORS: which origins' pages may use the server."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from embert.server.http.errors import BadRequest, ErrorFormats
from embert.server.http.response import error_body


class Cors(CORSMiddleware):
    """Sends a refused preflight an error in the form of its route."""

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
        """ASGI."""
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                await self._preflight(scope["path"], headers)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _preflight(self, path: str, headers: Headers) -> Response:
        response = self.preflight_response(request_headers=headers)
        if response.status_code != 400:
            return response
        error = BadRequest(f"{bytes(response.body).decode()} (--cors-allow-origin)")
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return Response(error_body(error, self._error_formats[path]), 400, kept, media_type="application/json")
