"""Every answer that is not 200, in the form of each API.

TEI routes answer   {"error": message, "error_type": type}
OpenAI routes       {"error": {"message", "type", "param", "code"}}
Cohere routes       {"id": id, "message": message}

Messages name the field, the limit and the value given, never the text itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import orjson
from starlette.types import Send

from embert.server.observability.request_record import CLIENT_ERROR, REFUSED

__all__ = [
    "BadRequest",
    "EmptyInput",
    "ErrorFormat",
    "ErrorFormats",
    "HeadTooLarge",
    "InferenceFailed",
    "Invalid",
    "ModelUnknown",
    "NotFound",
    "Overloaded",
    "PayloadTooLarge",
    "Reply",
    "RequestTimeout",
    "ServerError",
    "TaskMissing",
    "Unauthorized",
    "Unavailable",
    "UnsupportedEncoding",
    "describe",
    "describe_name",
    "error_body",
    "error_reply",
    "send_error",
    "send_reply",
    "status_of",
]


class ErrorFormat(Enum):
    """Whose API a route speaks: the form of its errors."""

    OPENAI = "OpenAI"
    TEI = "TEI"
    COHERE = "Cohere"


ErrorFormats = Mapping[str, ErrorFormat]  # of every path that there can be


_RETRY_AFTER_MAX_S = 60


class ServerError(Exception):
    """An answer that is not 200."""

    status = 500
    tei_type = "Backend"
    openai_type = "server_error"
    openai_code: str | None = None
    reject_reason: str | None = None
    outcome = ""  # for metrics, where the status does not say it

    def __init__(self, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        """`param` is the field of the request that the message is about. `retry_after_s` counts as a minute at most."""
        super().__init__(message)
        self.message, self.param = message, param
        self.retry_after_s = None if retry_after_s is None else min(retry_after_s, _RETRY_AFTER_MAX_S)

    def __str__(self) -> str:
        return self.message


class RequestError(ServerError):
    """The request is at fault."""

    status, tei_type, openai_type = 400, "Validation", "invalid_request_error"


class BadRequest(RequestError):
    """400: the body is not JSON."""


class EmptyInput(RequestError):
    """400: nothing to encode."""

    tei_type = "Empty"


class Unauthorized(ServerError):
    """401: a key is needed, and none or a wrong one was sent."""

    status, tei_type, openai_type, openai_code = 401, "Unauthorized", "authentication_error", "invalid_api_key"


class NotFound(RequestError):
    """404: no such route."""

    status = 404


class ModelUnknown(RequestError):
    """404: the request names another model."""

    status, openai_code = 404, "model_not_found"


class PayloadTooLarge(RequestError):
    """413: too many bytes or too many inputs."""

    status, reject_reason = 413, "too_large"


class RequestTimeout(RequestError):
    """408: the rest of a head or body did not arrive in time."""

    status = 408


class UnsupportedEncoding(RequestError):
    """415: the body is compressed."""

    status = 415


class HeadTooLarge(RequestError):
    """431: the request's line and headers have too many bytes."""

    status = 431


class Invalid(RequestError):
    """422: a field's type or value."""

    status = 422

    def __init__(self, message: str, param: str | None = None, *, kind: str = "Validation") -> None:
        """`kind`: TEI's type of the error, or "Tokenizer"."""
        super().__init__(message, param)
        self.tei_type = kind


class InferenceFailed(ServerError):
    """424: the encoder failed on this request."""

    status = 424


class TaskMissing(ServerError):
    """424 on TEI's routes, 400 on others: the model does not have the task."""

    status, openai_type, outcome = 424, "invalid_request_error", CLIENT_ERROR


class Overloaded(ServerError):
    """429: over the queue's token budget."""

    status, tei_type, openai_type, reject_reason = 429, "Overloaded", "rate_limit_error", "queue_full"


class Unavailable(ServerError):
    """503: loading, draining, the engine restarting, or a deadline that passed."""

    status, tei_type = 503, "Unhealthy"

    def __init__(self, message: str, retry_after_s: int | None = None, reason: str = "loading") -> None:
        """`reason`: "loading", "draining", "deadline", "connections" or "memory"."""
        super().__init__(message, None, retry_after_s)
        self.reason = self.reject_reason = reason
        if reason in ("draining", "connections", "memory"):
            self.outcome = REFUSED


def error_body(error: ServerError, error_format: ErrorFormat) -> bytes:
    """The error in this form, as JSON."""
    if error_format is ErrorFormat.COHERE:
        return orjson.dumps({"id": str(uuid.uuid4()), "message": error.message})
    if error_format is ErrorFormat.OPENAI:
        facts = {"message": error.message, "type": error.openai_type, "param": error.param, "code": error.openai_code}
        return orjson.dumps({"error": facts})
    return orjson.dumps({"error": error.message, "error_type": error.tei_type})


def status_of(error: ServerError, error_format: ErrorFormat) -> int:
    """The status of an error in this form."""
    return 400 if isinstance(error, TaskMissing) and error_format is not ErrorFormat.TEI else error.status


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    head: bytes  # lines `name: value` with CRLF, names in lower case, Content-Length among them
    body: bytes
    reason: str = ""  # of an error, for traces
    outcome: str = ""  # of an error, for metrics


def error_reply(error: ServerError, error_format: ErrorFormat) -> Reply:
    """An error, as an answer."""
    body = error_body(error, error_format)
    head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    if error.retry_after_s is not None:
        head += b"retry-after: %d\r\n" % error.retry_after_s
    if error.status == 408:
        head += b"connection: close\r\n"  # the rest may still come
    if error.status == 401:
        head += b"www-authenticate: Bearer\r\n"
    if error.status == 415:
        head += b"accept-encoding: identity\r\n"
    return Reply(status_of(error, error_format), head, body, error.message, error.outcome)


async def send_reply(send: Send, reply: Reply) -> None:
    """Answer by ASGI."""
    headers = [tuple(line.split(b": ", 1)) for line in reply.head.split(b"\r\n")[:-1]]
    begin = {"type": "http.response.start", "status": reply.status, "headers": headers}
    # The last two are for traces and metrics; servers ignore them.
    await send({**begin, "reason": reply.reason, "outcome": reply.outcome})
    await send({"type": "http.response.body", "body": reply.body})


async def send_error(send: Send, error: ServerError, error_format: ErrorFormat) -> None:
    """Answer with an error, by ASGI."""
    await send_reply(send, error_reply(error, error_format))


# --- values in messages: never a text ---


def describe_name(name: str) -> str:
    """A client's name for an error message: as it is, unless it looks like a text."""
    return repr(name) if len(name) <= 100 and name.isprintable() else describe(name)


def describe(value: Any) -> str:
    """Describes a value without revealing a text."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value) if abs(value) < 1e18 else "not a number of any use"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return "an object"
