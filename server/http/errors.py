"""Errors of requests: data, which `message` renders and `response.py` writes in the form of the route's API.

They have the field, the value and the limit, never the text itself.

* ServerError                 500
  * RequestError            400, or the status that it is given
    * BadRequest              400
    * EmptyInput              400
    * ModelUnknown            404
    * PayloadTooLarge         413
    * Invalid                 422
  * Unauthorized              401
  * InferenceFailed           424
  * TaskMissing               424 on TEI's routes and on those of decisions, 400 on others
  * Overloaded                429
  * Unavailable               503
* TooManyWeights, which the caller turns into PayloadTooLarge
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from embert.server.observability.request_record import CLIENT_ERROR, REFUSED


class ErrorFormat(Enum):
    """API whose form the errors of a route have."""

    OPENAI = "OpenAI"
    TEI = "TEI"
    COHERE = "Cohere"
    OLLAMA = "Ollama"
    TYPESAFE = "TypeSafe"


ErrorFormats = Mapping[str, ErrorFormat]  # by path; has every path


_RETRY_AFTER_MAX_S = 60


class ServerError(Exception):
    """A response other than 200.

    `param` is the field of the request, under the name that the client gave it, and `path` the element, such as
    "[3].text". `subject` is what is wrong in it, such as "text 3", and `reason` the rest of the sentence. Without a
    field, `reason` is the whole sentence. `value`, which `describe` shows, stands at `value_path` in the field; `limit`
    is what `option` sets.
    """

    status = 500
    tei_type = "Backend"
    openai_type = "server_error"
    openai_code: str | None = None
    reject_reason: str | None = None
    outcome = ""  # for metrics, where the status does not say it

    def __init__(
        self,
        reason: str,
        param: str | None = None,
        *,
        path: str = "",
        subject: str = "",
        value: str = "",
        value_path: str = "",
        limit: int | None = None,
        option: str = "",
        retry_after_s: int | None = None,
        status: int | None = None,
    ) -> None:
        """`retry_after_s` counts as a minute at most. `status` replaces that of the class."""
        super().__init__(reason)
        if status is not None:
            self.status = status
        self.reason, self.param, self.path, self.subject = reason, param, path, subject
        self.value, self.value_path, self.limit, self.option = value, value_path, limit, option
        self.instance: int | None = None  # index of the request, where one body has several
        self.retry_after_s = None if retry_after_s is None else min(retry_after_s, _RETRY_AFTER_MAX_S)

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives the field the name that the client used. `names` has it for fields of the schema."""
        if self.param is not None:
            self.param = names.get(self.param, self.param)

    def nest(self, param: str) -> None:
        """Moves the field into the object `param`."""
        self.param, self.path = param, f".{self.param}{self.path}"

    @property
    def message(self) -> str:
        """The sentence for clients: field, value, reason, limit and option."""
        message = f"{self.subject} {self.reason}" if self.subject else self.reason
        if self.param:
            message = f"`{self.param}{self.path}`{':' if self.subject else ''} {message}"
        if self.value:
            message += f"; {f'`{self.param}{self.value_path}`' if self.value_path else 'it'} is {self.value}"
        if self.limit is not None:
            message += f"; the limit is {self.limit}{f' ({self.option})' if self.option else ''}"
        return message if self.instance is None else f"instances[{self.instance}]: {message}"

    def __str__(self) -> str:
        return self.message


class RequestError(ServerError):
    """The request is at fault: 400, or 404 (route), 405, 408 (late), 415 (compressed), 431 (large head)."""

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


class ModelUnknown(RequestError):
    """404: the request names another model."""

    status, openai_code = 404, "model_not_found"


class PayloadTooLarge(RequestError):
    """413: too many bytes or too many inputs."""

    status, reject_reason = 413, "too_large"


class Invalid(RequestError):
    """422: a field's type or value."""

    status = 422

    def __init__(self, reason: str, param: str | None = None, *, kind: str = "Validation", **more: Any) -> None:
        """`kind`: TEI's type of the error, or "Tokenizer"."""
        super().__init__(reason, param, **more)
        self.tei_type = kind


class InferenceFailed(ServerError):
    """424: the encoder failed on this request."""

    status = 424


class TaskMissing(ServerError):
    """424 on TEI's routes and on those of decisions, 400 on others: the model does not have the task."""

    status, openai_type, outcome = 424, "invalid_request_error", CLIENT_ERROR

    def __init__(self, reason: str, *, is_general: bool = False) -> None:
        """`is_general`: 424 in the form of any API."""
        super().__init__(reason)
        self.is_general = is_general


class Overloaded(ServerError):
    """429: over the queue's token budget."""

    status, tei_type, openai_type, reject_reason = 429, "Overloaded", "rate_limit_error", "queue_full"


class Unavailable(ServerError):
    """503: loading, draining, the engine restarting, or a deadline that passed."""

    status, tei_type = 503, "Unhealthy"

    def __init__(self, reason: str, *, reject_reason: str = "loading", **more: Any) -> None:
        """`reject_reason`: "loading", "draining", "deadline", "connections" or "memory"."""
        super().__init__(reason, **more)
        self.reject_reason = reject_reason
        if reject_reason in ("draining", "connections", "memory"):
            self.outcome = REFUSED


@dataclass(eq=False)
class TooManyWeights(Exception):
    """The sparse vectors of a request have more weights than a response may have; not all of them are counted."""

    weights: int


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
            return str(value) if abs(value) < 1e18 else "a number out of range"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return "an object"
