"""A plain Starlette application that responds to each request with a body of an embedding's size: the lower bound.

uvicorn benchmarks.rivals.echo:app
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

RESPONSE_BYTES = 2200  # base64 of 384 numbers, with OpenAI's JSON around


async def echo(request: Request) -> Response:
    """Repeat the body, up to the size."""
    body = await request.body()
    return Response((body * (RESPONSE_BYTES // max(1, len(body)) + 1))[:RESPONSE_BYTES], media_type="application/json")


async def health(_: Request) -> Response:
    """Respond with 200."""
    return Response()


app = Starlette(routes=[Route("/v1/embeddings", echo, methods=["POST"]), Route("/health", health)])
