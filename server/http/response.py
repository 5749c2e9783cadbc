"""A whole response, and errors in the form of each API.

TEI routes send     {"error": message, "error_type": type}
OpenAI routes send  {"error": {"message", "type", "param", "code"}}
Cohere routes send  {"id": id, "message": message}
Ollama routes send  {"error": message}
TypeSafe routes send {"detail": [{"loc": ["body", field, …], "msg": message, "type": type}]}, or {"detail": message}
"""

from __future__ import annotations

import copy
import re
import uuid
from typing import NamedTuple

import orjson
from starlette.types import Send

from embert.server.http.errors import ErrorFormat, ModelUnknown, ServerError, TaskMissing

Headers = list[tuple[bytes, bytes]]
Body = bytes | memoryview


class Response(NamedTuple):
    """Status, header fields with names in lower case and Content-Length among them, and body."""

    status: int
    headers: Headers
    body: Body
    reason: str = ""  # message of an error, for traces
    outcome: str = ""  # outcome of an error, for metrics


def error_body(error: ServerError, error_format: ErrorFormat) -> bytes:
    message = error.message
    if error_format is ErrorFormat.COHERE:
        return orjson.dumps({"id": str(uuid.uuid4()), "message": message})
    if error_format is ErrorFormat.OPENAI:
        fields = {"message": message, "type": error.openai_type, "param": error.param, "code": error.openai_code}
        return orjson.dumps({"error": fields})
    if error_format is ErrorFormat.OLLAMA:
        # Its clients recognize a missing model by these words, and then offer to fetch it.
        return orjson.dumps({"error": f"model not found: {message}" if isinstance(error, ModelUnknown) else message})
    if error_format is ErrorFormat.TYPESAFE:
        if not error.param:
            return orjson.dumps({"detail": message})
        steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", f"{error.param}{error.path}")
        location = ["body", *(name or int(index) for index, name in steps)]
        rest = copy.copy(error)  # the location has the field
        rest.param, rest.value_path = None, ""
        return orjson.dumps({"detail": [{"loc": location, "msg": rest.message, "type": "value_error"}]})
    return orjson.dumps({"error": message, "error_type": error.tei_type})


def error_response(error: ServerError, error_format: ErrorFormat) -> Response:
    """Renders an error as a response in the form of an API."""
    body = error_body(error, error_format)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.status == 408:
        headers.append((b"connection", b"close"))  # the rest may still come
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 415:
        headers.append((b"accept-encoding", b"identity"))
    status = error.status
    if status == 424 and error_format is not ErrorFormat.TEI and isinstance(error, TaskMissing):
        status = 424 if error.is_general else 400
    return Response(status, headers, body, error.message, error.outcome)


async def send_response(send: Send, response: Response) -> None:
    """Sends a response over ASGI. `reason` and `outcome` are for traces and metrics; servers ignore them."""
    status, headers, body, reason, outcome = response
    start = {"type": "http.response.start", "status": status, "headers": headers}
    await send({**start, "reason": reason, "outcome": outcome})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ServerError, error_format: ErrorFormat) -> None:
    await send_response(send, error_response(error, error_format))
