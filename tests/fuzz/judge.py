"""Compares responses with the promises of HTTP and docs/api.md for what was sent.

Every request read as whole has one response, in order, within its time. A request with a doubt, or one that the server
finds too much, may get an error and the end of the connection instead; a broken one must. Nothing else
comes, and everything that comes is well formed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.fuzz.cases import Ending
from tests.fuzz.client import SENTINEL, Exchange, Outcome
from tests.fuzz.reading import End, Request
from tests.fuzz.responses import Response

# Of docs/api.md; no 5xx but 503.
STATUSES = frozenset({200, 400, 401, 404, 405, 406, 408, 411, 413, 415, 417, 422, 424, 429, 431, 503})
OPENAI = {"message", "type", "param", "code"}
TEI = {"error", "error_type"}
COHERE = {"id", "message"}
TYPESAFE = {"detail"}
OLLAMA = {"error"}


def judge(done: Exchange) -> list[str]:
    """Returns a sentence for each fault."""
    return list(dict.fromkeys(_judge(done)))


def _judge(done: Exchange) -> Iterator[str]:
    if done.malformed:
        yield f"response {len(done.responses) + 1} is malformed: {done.malformed}"
        return
    for number, response in enumerate(done.responses, 1):
        yield from (f"response {number} ({response.status}) {fault}" for fault in _form(response))
    yield from _order(done)
    if done.truncated and done.outcome is not Outcome.LEFT and not done.half_closed:
        yield f"response {len(done.responses) + 1} is cut off"
    if done.outcome is Outcome.LATE:
        yield f"nothing came for {done.waited_s:.1f} s, beyond the deadline, after {len(done.responses)} responses"
    if done.outcome is Outcome.RESET and done.case.ending is Ending.ASK and not _went_on(done):
        yield f"the connection was reset after {len(done.responses)} responses; one may be lost"


def _went_on(done: Exchange) -> bool:
    """True if the client sent more after `Connection: close`, and got every response that was due."""
    reading = done.reading
    if reading.end is not End.LAST or len(done.responses) != len(reading.requests):
        return False
    return reading.requests[-1].end != len(done.case.stream)


def _order(done: Exchange) -> Iterator[str]:
    """Matches responses with requests."""
    reading = done.reading
    asked = [*reading.requests]
    responses = iter(done.responses)
    left = done.half_closed or done.outcome is Outcome.LEFT
    lost = left or done.outcome in (Outcome.LATE, Outcome.RESET)  # reported elsewhere, or nobody's fault
    closing = False
    for number, request in enumerate(asked, 1):
        response = next(responses, None)
        if response is None:
            if not lost:
                yield f"request {number} has no response; the connection was closed"
            return
        yield from _match(done, number, request, response)
        ends = response.says_close or (done.outcome is Outcome.CLOSED and response is done.responses[-1])
        refused = response.status >= 400 and response.says_close
        if refused or (ends and (request.may_close or _may_be_early(request))):
            closing = True
            break
        if ends and not request.must_close and not left and (response.says_close or number < len(asked)):
            yield f"response {number} ({response.status}) ends the connection for no reason"
            return
        closing = request.must_close
    if not closing:
        response = next(responses, None)
        yield from _tail(done, response, lost=lost)
    for response in responses:
        yield f"a response too many: {response.status} {response.body[:60]!r}"
    if closing and not lost and done.outcome is not Outcome.CLOSED:
        yield "the connection stays open after its last response"


def _may_be_early(request: Request) -> bool:
    """True if a response, and the end of the connection, may come before the body's end."""
    return request.method != "POST" and request.head_end != request.end


def _tail(done: Exchange, response: Response | None, *, lost: bool) -> Iterator[str]:
    """Judges `response`, which follows those of the complete requests."""
    tail = done.reading.tail
    post = tail is not None and tail.method == "POST"
    match done.reading.end:
        case End.CLEAN:
            if done.sentinel_sent and response is None and not lost:
                yield "the connection was closed instead of serving another request"
            elif response is not None and not done.sentinel_sent:
                yield f"a response too many: {response.status} {response.body[:60]!r}"
            elif response is not None and (response.status != 200 or _id(response) != SENTINEL):
                yield f"the next request got a response that is not its own: {response.status} {response.body[:60]!r}"
        case End.HEAD:
            if response is not None and not (400 <= response.status < 500 and response.says_close):
                yield f"half a head got a response: {response.status} {response.body[:60]!r}"
        case End.BODY:
            if response is None and not lost:
                yield "the last request, whose body does not end, has no response; the connection was closed"
            elif response is not None and response.status < 400 and post:
                yield f"half a body got a response: {response.status}"
        case End.BROKEN:
            why = done.reading.why
            early = tail is not None and tail.head_end is not None and not post  # responded before its body was broken
            if response is None:
                if not lost:
                    yield f"closed without a response to {why}"
            elif not early and not 400 <= response.status < 500:
                yield f"{response.status} to {why}"
            elif not lost and done.outcome is not Outcome.CLOSED:
                yield f"the connection stays open after {why}"
        case End.LAST:
            pass


def _match(done: Exchange, number: int, request: Request, response: Response) -> Iterator[str]:
    """Checks that `response` can be the response to `request`."""
    refused = response.status >= 400 and response.says_close
    if request.doubts and refused:
        return
    found_id = _id(response)
    if request.request_id is not None and found_id != request.request_id and not (found_id is None and refused):
        yield f"response {number} ({response.status}) is to {found_id!r}, request {number} was {request.request_id!r}"
    expected = done.case.expected.get(request.request_id or b"")
    late = response.status == 408 and len(done.case.pieces) > 1  # the pauses between its pieces were too long
    if expected and not request.doubts and response.status not in expected and not late:
        yield f"request {number} is sound and got {response.status}: {response.body[:200]!r}"


def _id(response: Response) -> bytes | None:
    value = response.headers.get("x-request-id")
    return None if value is None else value.encode("latin-1")


def _form(response: Response) -> Iterator[str]:
    """Checks the form of a response."""
    if response.status not in STATUSES:
        yield f"has a status that is not promised: {response.body[:200]!r}"
    json_said = response.headers.get("content-type", "").startswith("application/json")
    if response.status == 200 and not json_said:
        return
    if not response.body:  # of HEAD
        return
    try:
        content = json.loads(response.body, parse_constant=_refuse_constant)
    except ValueError:
        yield f"is not JSON: {response.body[:200]!r}"
        return
    if response.status == 200:
        return
    if not json_said:
        yield f"has no JSON content type: {response.headers.get('content-type')!r}"
    if response.status == 503 and isinstance(content, dict) and "status" in content:
        return  # of a probe
    error = content.get("error") if isinstance(content, dict) else None
    openai = isinstance(error, dict) and set(error) == OPENAI and set(content) == {"error"}
    cohere = isinstance(content, dict) and set(content) == COHERE
    tei_or_ollama = isinstance(error, str) and set(content) in (TEI, OLLAMA)
    typesafe = isinstance(content, dict) and set(content) == TYPESAFE
    if not openai and not cohere and not tei_or_ollama and not typesafe:
        yield f"has an error of another shape: {response.body[:200]!r}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
