"""Compares responses with the promises of HTTP and docs/api.md for what was sent.

Every request read as whole has one answer, in order, within its time. A request with a doubt, or one that the server
finds too much, may be answered with an error and the end of the connection instead; a broken one must. Nothing else
comes, and everything that comes is well formed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.fuzz.answers import Answer
from tests.fuzz.cases import Ending
from tests.fuzz.client import SENTINEL, Exchange, Outcome
from tests.fuzz.reading import End, Request

__all__ = ["STATUSES", "judge"]

# Of docs/api.md; no 5xx but 503.
STATUSES = frozenset({200, 400, 401, 404, 405, 406, 408, 411, 413, 415, 417, 422, 424, 429, 431, 503})
OPENAI = {"message", "type", "param", "code"}
TEI = {"error", "error_type"}
COHERE = {"id", "message"}


def judge(done: Exchange) -> list[str]:
    """Returns a sentence for each fault."""
    return list(dict.fromkeys(_judge(done)))


def _judge(done: Exchange) -> Iterator[str]:
    if done.malformed:
        yield f"answer {len(done.answers) + 1} is malformed: {done.malformed}"
        return
    for number, answer in enumerate(done.answers, 1):
        yield from (f"answer {number} ({answer.status}) {fault}" for fault in _form(answer))
    yield from _order(done)
    if done.truncated and done.outcome is not Outcome.LEFT and not done.half_closed:
        yield f"answer {len(done.answers) + 1} is cut off"
    if done.outcome is Outcome.LATE:
        yield f"nothing came for {done.waited_s:.1f} s, beyond the deadline, after {len(done.answers)} answers"
    if done.outcome is Outcome.RESET and done.case.ending is Ending.ASK and not _went_on(done):
        yield f"the connection was reset after {len(done.answers)} answers; one may be lost"


def _went_on(done: Exchange) -> bool:
    """True if the client sent more after `Connection: close`, and got every response that was due."""
    reading = done.reading
    if reading.end is not End.LAST or len(done.answers) != len(reading.requests):
        return False
    return reading.requests[-1].end != len(done.case.stream)


def _order(done: Exchange) -> Iterator[str]:
    """Matches responses with requests."""
    reading = done.reading
    asked = [*reading.requests]
    answers = iter(done.answers)
    left = done.half_closed or done.outcome is Outcome.LEFT
    lost = left or done.outcome in (Outcome.LATE, Outcome.RESET)  # reported elsewhere, or nobody's fault
    closing = False
    for number, request in enumerate(asked, 1):
        answer = next(answers, None)
        if answer is None:
            if not lost:
                yield f"request {number} has no answer; the connection was closed"
            return
        yield from _match(done, number, request, answer)
        ends = answer.says_close or (done.outcome is Outcome.CLOSED and answer is done.answers[-1])
        refused = answer.status >= 400 and answer.says_close
        if refused or (ends and (request.may_close or _may_be_early(request))):
            closing = True
            break
        if ends and not request.must_close and not left and (answer.says_close or number < len(asked)):
            yield f"answer {number} ({answer.status}) ends the connection for no reason"
            return
        closing = request.must_close
    if not closing:
        answer = next(answers, None)
        yield from _tail(done, answer, lost=lost)
    for answer in answers:
        yield f"an answer too many: {answer.status} {answer.body[:60]!r}"
    if closing and not lost and done.outcome is not Outcome.CLOSED:
        yield "the connection stays open after its last answer"


def _may_be_early(request: Request) -> bool:
    """True if a response, and the end of the connection, may come before the body's end."""
    return request.method != "POST" and request.head_end != request.end


def _tail(done: Exchange, answer: Answer | None, *, lost: bool) -> Iterator[str]:
    """Judges `answer`, which follows those of the complete requests."""
    tail = done.reading.tail
    post = tail is not None and tail.method == "POST"
    match done.reading.end:
        case End.CLEAN:
            if done.sentinel_sent and answer is None and not lost:
                yield "the connection was closed instead of serving another request"
            elif answer is not None and not done.sentinel_sent:
                yield f"an answer too many: {answer.status} {answer.body[:60]!r}"
            elif answer is not None and (answer.status != 200 or _id(answer) != SENTINEL):
                yield f"the next request got an answer that is not its own: {answer.status} {answer.body[:60]!r}"
        case End.HEAD:
            if answer is not None and not (400 <= answer.status < 500 and answer.says_close):
                yield f"half a head got an answer: {answer.status} {answer.body[:60]!r}"
        case End.BODY:
            if answer is None and not lost:
                yield "the last request, whose body does not end, has no answer; the connection was closed"
            elif answer is not None and answer.status < 400 and post:
                yield f"half a body got an answer: {answer.status}"
        case End.BROKEN:
            why = done.reading.why
            early = tail is not None and tail.head_end is not None and not post  # answered before its body was broken
            if answer is None:
                if not lost:
                    yield f"closed without an answer to {why}"
            elif not early and not 400 <= answer.status < 500:
                yield f"{answer.status} to {why}"
            elif not lost and done.outcome is not Outcome.CLOSED:
                yield f"the connection stays open after {why}"
        case End.LAST:
            pass


def _match(done: Exchange, number: int, request: Request, answer: Answer) -> Iterator[str]:
    """Checks that `answer` can be the response to `request`."""
    refused = answer.status >= 400 and answer.says_close
    if request.doubts and refused:
        return
    answered = _id(answer)
    if request.request_id is not None and answered != request.request_id and not (answered is None and refused):
        yield f"answer {number} ({answer.status}) is to {answered!r}, request {number} was {request.request_id!r}"
    expected = done.case.expected.get(request.request_id or b"")
    if expected and not request.doubts and answer.status not in expected:
        yield f"request {number} is sound and got {answer.status}: {answer.body[:200]!r}"


def _id(answer: Answer) -> bytes | None:
    value = answer.headers.get("x-request-id")
    return None if value is None else value.encode("latin-1")


def _form(answer: Answer) -> Iterator[str]:
    """Checks the form of a response."""
    if answer.status not in STATUSES:
        yield f"has a status that is not promised: {answer.body[:200]!r}"
    json_said = answer.headers.get("content-type", "").startswith("application/json")
    if answer.status == 200 and not json_said:
        return
    if not answer.body:  # of HEAD
        return
    try:
        content = json.loads(answer.body, parse_constant=_refuse_constant)
    except ValueError:
        yield f"is not JSON: {answer.body[:200]!r}"
        return
    if answer.status == 200:
        return
    if not json_said:
        yield f"has no JSON content type: {answer.headers.get('content-type')!r}"
    if answer.status == 503 and isinstance(content, dict) and "status" in content:
        return  # of a probe
    error = content.get("error") if isinstance(content, dict) else None
    openai = isinstance(error, dict) and set(error) == OPENAI and set(content) == {"error"}
    cohere = isinstance(content, dict) and set(content) == COHERE
    if not openai and not cohere and not (isinstance(error, str) and set(content) == TEI):
        yield f"has an error of another shape: {answer.body[:200]!r}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
