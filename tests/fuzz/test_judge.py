"""The judge notices every planted fault of a response, and finds none where there is none."""

from __future__ import annotations

import pytest

from tests.fuzz import heads
from tests.fuzz.cases import SOUND, Case, Ending
from tests.fuzz.client import Exchange, Outcome
from tests.fuzz.judge import judge
from tests.fuzz.reading import read
from tests.fuzz.responses import Malformed, ResponseReader


def post(*fields: bytes, body: bytes = b'{"inputs": "Hello, world"}') -> bytes:
    lines = (b"POST /embed HTTP/1.1", b"Host: x", b"X-Request-Id: first", b"Content-Length: %d" % len(body), *fields)
    return b"\r\n".join((*lines, b"", b"")) + body


def response(status: int = 200, body: bytes = b"[[0.5]]", *fields: bytes, id_: bytes = b"first") -> bytes:
    lines = (b"HTTP/1.1 %d X" % status, b"Content-Type: application/json", b"Content-Length: %d" % len(body), *fields)
    return b"\r\n".join((*lines, b"X-Request-Id: " + id_, b"", b"")) + body


ERROR = b'{"error":"no","error_type":"Validation"}'
CLOSE = b"Connection: close"
UPGRADE = post(b"Connection: Upgrade", b"Upgrade: h2c", body=heads.INNER)
REFUSED = response(400, ERROR, CLOSE)
OPEN, CLOSED, RESET, LATE = Outcome.OPEN, Outcome.CLOSED, Outcome.RESET, Outcome.LATE

# What was sent, what came back, how the connection ended, and what the judge names; "" where nothing is wrong.
CASES: list[tuple[bytes, bytes, Outcome, str]] = [
    (post(), response(), OPEN, ""),
    (post() + post(), response() * 2, OPEN, ""),
    (post(CLOSE), response(200, b"[[1]]", CLOSE), CLOSED, ""),
    (post(), response() * 2, OPEN, "too many"),
    (post(), b"", LATE, "after 0 responses"),
    (post(), b"", CLOSED, "request 1 has no response"),
    (post() + post(), response(), RESET, "reset"),
    (post() + post(), response(200, b"[[1]]", CLOSE), CLOSED, "for no reason"),
    (post(), response(500, ERROR), OPEN, "500"),
    (post(), response(418, ERROR), OPEN, "418"),
    (post(), response(id_=b"another"), OPEN, "b'another'"),
    (post(), response(400, ERROR), OPEN, "sound"),
    (post(), b"hello\r\n\r\n", CLOSED, "malformed"),
    (post(), response().replace(b"HTTP/1.1", b"HTTP/1.0"), CLOSED, "HTTP/1.0"),
    (post(), response().replace(b"Content-Length", b"X-Length"), CLOSED, "malformed"),
    (post(), response()[:-2], CLOSED, "cut off"),
    (post(), response(101, b""), CLOSED, "malformed"),
    (post(), response(200, b"[[NaN]]"), OPEN, "not JSON"),
    (post(), response(200, b"[[0.5,"), OPEN, "not JSON"),
    (post(), response(422, b'{"fault":"no"}'), OPEN, "another shape"),
    (UPGRADE, response(), OPEN, ""),
    (UPGRADE, response() + response(id_=b"smuggled"), OPEN, "too many"),
    (b"GET /livez HTTP/1.1\r\n\r\n", REFUSED, CLOSED, ""),
    (b"GET /livez HTTP/1.1\r\n\r\n", b"", CLOSED, "without a response"),
    (b"GET /livez HTTP/1.1\r\n\r\n", REFUSED, OPEN, "stays open"),
    (post() + b"garbage\r\n\r\n", response() + REFUSED, CLOSED, ""),
    (b"\r" + post(), response(), OPEN, ""),  # CR and LF before a request line are skipped, as by llhttp and nginx
    (post()[:-1], response(), OPEN, "half a body"),
    (post()[:20], response(), OPEN, "half a head"),
    (post()[:20], b"", CLOSED, ""),
    (post(), b"", Outcome.LEFT, ""),
]


def faults_of(sent: bytes, received: bytes, outcome: Outcome) -> list[str]:
    case = Case(0, "planted", (sent,), ending=Ending.ASK, expected={b"first": SOUND})
    done = Exchange(case, read(sent), outcome=outcome)
    reader = ResponseReader(lambda index: "POST")
    try:
        done.responses += reader.feed(received)
    except Malformed as error:
        done.malformed = str(error)
    done.truncated = reader.in_response
    return judge(done)


@pytest.mark.parametrize(("sent", "received", "outcome", "named"), CASES)
def test_faults(sent: bytes, received: bytes, outcome: Outcome, named: str) -> None:
    faults = faults_of(sent, received, outcome)
    assert bool(faults) == bool(named), faults
    assert named in " ".join(faults)
