"""Every answer that is not 200, in the form of each API.

TEI routes answer   {"error": message, "error_type": type}
OpenAI routes       {"error": {"message", "type", "param", "code"}}
Cohere routes       {"id": id, "message": message}

Messages name the field, the limit and the value given, never the text itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class ServerError(Exception):
    """An answer that is not 200."""

    message: str
    param: str | None = None
    retry_after_s: int | None = None
    status: int = field(default=500, init=False)
    tei_type: str = field(default="Backend", init=False)
    openai_type: str = field(default="server_error", init=False)
    openai_code: str | None = field(default=None, init=False)
    reject_reason: str | None = field(default=None, init=False)
    outcome: str = field(default="", init=False)  # for metrics, where the status does not say it

    def __str__(self) -> str:
        return self.message


@dataclass(eq=False)
class BadRequest(ServerError):
    """400: the body is not JSON."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 400, "Validation", "invalid_request_error"


@dataclass(eq=False)
class EmptyInput(ServerError):
    """400: nothing to encode."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 400, "Empty", "invalid_request_error"


@dataclass(eq=False)
class Unauthorized(ServerError):
    """401: a key is needed, and none or a wrong one was sent."""

    def __post_init__(self) -> None:
        self.status, self.tei_type = 401, "Unauthorized"
        self.openai_type, self.openai_code = "authentication_error", "invalid_api_key"


@dataclass(eq=False)
class NotFound(ServerError):
    """404: no such route."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 404, "Validation", "invalid_request_error"


@dataclass(eq=False)
class ModelUnknown(ServerError):
    """404: the request names another model."""

    def __post_init__(self) -> None:
        self.status, self.tei_type = 404, "Validation"
        self.openai_type, self.openai_code = "invalid_request_error", "model_not_found"


@dataclass(eq=False)
class PayloadTooLarge(ServerError):
    """413: too many bytes or too many inputs."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 413, "Validation", "invalid_request_error"
        self.reject_reason = "too_large"


@dataclass(eq=False)
class RequestTimeout(ServerError):
    """408: the rest of a head or body did not arrive in time."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 408, "Validation", "invalid_request_error"


@dataclass(eq=False)
class UnsupportedEncoding(ServerError):
    """415: the body is compressed."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 415, "Validation", "invalid_request_error"


@dataclass(eq=False)
class HeadTooLarge(ServerError):
    """431: the request's line and headers have too many bytes."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 431, "Validation", "invalid_request_error"


@dataclass(eq=False)
class Invalid(ServerError):
    """422: a field's type or value."""

    kind: str = "Validation"  # or "Tokenizer"

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 422, self.kind, "invalid_request_error"


@dataclass(eq=False)
class InferenceFailed(ServerError):
    """424: the encoder failed on this request."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 424, "Backend", "server_error"


@dataclass(eq=False)
class TaskMissing(ServerError):
    """424 on TEI's routes, 400 on others: the model does not have the task."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 424, "Backend", "invalid_request_error"
        self.outcome = CLIENT_ERROR


@dataclass(eq=False)
class Overloaded(ServerError):
    """429: over the queue's token budget."""

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 429, "Overloaded", "rate_limit_error"
        self.reject_reason = "queue_full"


@dataclass(eq=False)
class Unavailable(ServerError):
    """503: loading, draining, the engine restarting, or a deadline that passed."""

    reason: str = "loading"  # "loading", "draining", "deadline", "connections" or "memory"

    def __post_init__(self) -> None:
        self.status, self.tei_type, self.openai_type = 503, "Unhealthy", "server_error"
        self.reject_reason = self.reason
        if self.reason in ("draining", "connections", "memory"):
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
