"""A plain Starlette application that answers each request with a body of an embedding's size: the least that one does.

uvicorn benchmarks.rivals.echo:app
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ANSWER_BYTES = 2200  # base64 of 384 numbers, with OpenAI's JSON around


async def echo(request: Request) -> Response:
    """Repeat the body, up to the size."""
    body = await request.body()
    return Response((body * (ANSWER_BYTES // max(1, len(body)) + 1))[:ANSWER_BYTES], media_type="application/json")


async def health(_: Request) -> Response:
    """Answer that it runs."""
    return Response()


app = Starlette(routes=[Route("/v1/embeddings", echo, methods=["POST"]), Route("/health", health)])
