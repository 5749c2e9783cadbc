"""Errors of requests. `response.py` renders them in the form of the route's API.

Messages name the field, the limit and the value given, never the text itself.

* ServerError                 500
  * RequestError
    * BadRequest              400
    * EmptyInput              400
    * NotFound                404
    * ModelUnknown            404
    * RequestTimeout          408
    * PayloadTooLarge         413
    * UnsupportedEncoding     415
    * Invalid                 422
    * HeadTooLarge            431
  * Unauthorized              401
  * InferenceFailed           424
  * TaskMissing               424 on TEI's routes, 400 on others
  * Overloaded                429
  * Unavailable               503
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

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
    "RequestTimeout",
    "ServerError",
    "TaskMissing",
    "Unauthorized",
    "Unavailable",
    "UnsupportedEncoding",
    "describe",
    "describe_name",
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
    reject_reason = "unauthorized"


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
