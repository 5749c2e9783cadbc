"""The judge notices every planted fault, and finds none where there is none."""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz import heads
from tests.fuzz.broken_server import FAULTS, document, serve
from tests.fuzz.campaign import Campaign
from tests.fuzz.cases import SOUND, Case, Ending, Maker
from tests.fuzz.client import Limits, exchange
from tests.fuzz.judge import judge
from tests.fuzz.reading import End, read
from tests.fuzz.routes import Routes

PATIENT = Limits(timeout_s=60, slack_s=60)
QUICK = Limits(timeout_s=0.1, slack_s=0.2)
BODY = b'{"inputs": "Hello, world"}'


def post(name: bytes = b"first", *fields: bytes, body: bytes = BODY) -> bytes:
    lines = (b"POST /embed HTTP/1.1", b"Host: x", b"X-Request-Id: " + name, b"Content-Length: %d" % len(body), *fields)
    return b"\r\n".join((*lines, b"", b"")) + body


def faults_of(
    fault: str, *pieces: bytes, ending: Ending = Ending.ASK, limits: Limits = PATIENT, **options: bool
) -> list[str]:
    """What the judge says of one connection to a server with this fault."""

    async def run() -> list[str]:
        case = Case(0, "planted", pieces, ending=ending, expected={b"first": SOUND})
        async with serve(fault, **options) as address:
            return judge(await exchange(address, case, limits))

    return asyncio.run(run())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str) -> None:
    limits = QUICK if fault in ("never", "too short") else PATIENT
    found = faults_of(fault, post(), limits=limits)
    assert bool(found) == (fault != "right"), found
    named = {"500": "(500)", "never": "after 0 answers", "another's": "b'another'", "closed": "request 1 has no answer"}
    assert named.get(fault, "") in "".join(found)


@pytest.mark.parametrize("stream", [b"GET /livez HTTP/1.1\r\n\r\n", post() + b"garbage\r\n\r\n"])
def test_what_is_not_http_must_be_refused_with_an_error(stream: bytes) -> None:
    assert faults_of("right", stream) == []
    assert len(faults_of("right", stream, refuses=False)) == 1


def test_half_a_request_gets_no_answer() -> None:
    assert faults_of("right", post()[:-1], ending=Ending.HALF) == []
    assert faults_of("right", post()[:20], ending=Ending.ASK) == []
    assert len(faults_of("right", post()[:-1], limits=QUICK)) == 1  # this server waits for ever


@pytest.mark.parametrize("ending", [Ending.CLOSE, Ending.RESET])
def test_clients_that_leave_are_owed_nothing(ending: Ending) -> None:
    assert faults_of("never", post(), ending=ending) == []


def test_a_body_that_is_answered_as_a_request_is_noticed() -> None:
    upgrade = (b"Connection: Upgrade", b"Upgrade: h2c")
    assert faults_of("right", post(b"first", *upgrade, body=heads.INNER)) == []
    assert faults_of("the body as a request", post(b"first", *upgrade, body=heads.INNER))


def campaign(address: tuple[str, int], seed: int) -> Campaign:
    return Campaign(address, Maker(Routes(document()), seed, large=0), Limits(timeout_s=1, slack_s=20), workers=8)


def test_a_right_server_passes() -> None:
    """Client, reader and judge agree with each other over cases of every kind."""

    async def run() -> Campaign:
        async with serve("right") as address:
            found = campaign(address, seed=2)
            cases = map(found.maker.make, range(120))
            # This server has no deadlines: it waits for the rest of a body for ever.
            whole = iter([case for case in cases if read(case.stream).end is not End.BODY])
            await asyncio.gather(*(found.work(whole) for _ in range(8)))
            return found

    found = asyncio.run(run())
    assert not found.findings, found.findings[0].report()
    assert found.statuses[200] > 70
    assert found.statuses[400] > 10


def test_wrong_vectors_are_noticed() -> None:
    async def run() -> list[list[str]]:
        async with serve("right", wrong_after=1) as address:
            found = campaign(address, seed=0)
            await found.canary()
            await found.canary()
            return [finding.faults for finding in found.findings]

    assert asyncio.run(run()) == [["a good request got vectors that are not its own"]]


def test_cases_are_the_same_again() -> None:
    first, second = (Maker(Routes(document()), 7, large=0.1) for _ in range(2))
    assert [first.make(index) for index in range(60)] == [second.make(index) for index in reversed(range(60))][::-1]
    assert first.make(1).stream != Maker(Routes(document()), 8).make(1).stream
