"""Overload: admission, refusals, deadlines and priorities. The stand-in works at a known speed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from embert.server.http.request_head import read_request_options
from tests.server.connections import one_to_each, post_on, send
from tests.server.crowd import published
from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.stand_in import HELD

TOKENS_PER_S = 1000
GOOD = [101, 7592, 102]
LONG = [7] * 250
TEXTS_RUN = 'embert_batch_texts_sum{engine="0"}'


@pytest.fixture(scope="module")
def hold_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def slow(hold_file: Path) -> Iterator[Live]:
    """250 tokens a batch, four batches a second, a queue of four seconds."""
    options = ("--max-batch-tokens", "256", "--max-queue-tokens", "4000", "--request-timeout", "60")
    env = {"STAND_IN_TOKENS_PER_S": str(TOKENS_PER_S), "STAND_IN_HOLD_FILE": str(hold_file)}
    env["EMBERT_MAX_QUEUE_SECONDS"] = "0"  # bounded by tokens alone: a held batch makes the measured rate low
    with live(*STAND_IN, *options, env=env) as server:
        yield server


@contextmanager
def held(hold_file: Path) -> Iterator[None]:
    """No batch of `slow` ends meanwhile: what is queued stays queued, however slow this machine is."""
    hold_file.touch()
    try:
        yield
    finally:
        hold_file.unlink()


class Clients:
    """Requests that are sent side by side."""

    def __init__(self, server: Live, pool: ThreadPoolExecutor) -> None:
        self.server, self._pool = server, pool
        self.finished: list[Future[httpx.Response]] = []  # in the order of the responses

    def send(self, inputs: list[list[int]], **headers: str) -> Future[httpx.Response]:
        sent = self._pool.submit(self.ask, inputs, **headers)
        sent.add_done_callback(self.finished.append)
        return sent

    def ask(self, inputs: list[list[int]], **headers: str) -> httpx.Response:
        return self.server.post("/embed", {"inputs": inputs}, headers=headers)

    def fill(self, *requests: list[list[int]], **headers: str) -> list[Future[httpx.Response]]:
        """Send these, the first one ahead of the others, and wait until all tokens are admitted or finished."""
        sent: list[Future[httpx.Response]] = []
        tokens = [min(sum(map(len, inputs)), 4000 // 8) for inputs in requests]  # an eighth of the limit at most

        def all_were_admitted() -> bool:
            finished = sum(count for count, future in zip(tokens, sent, strict=False) if future.done())
            return finished + self.server.metrics()["embert_admitted_tokens"] >= sum(tokens[: len(sent)])

        for some in (requests[:1], requests[1:]):
            sent += [self.send(inputs, **headers) for inputs in some]
            until(all_were_admitted, what="their admission")
        return sent


def admits(server: Live, tokens: int) -> None:
    """Wait until all requests that have no response yet have this many tokens."""
    until(lambda: server.metrics()["embert_admitted_tokens"] == tokens, what=f"{tokens} admitted tokens")


@contextmanager
def clients(server: Live) -> Iterator[Clients]:
    with ThreadPoolExecutor(48) as pool:
        yield Clients(server, pool)
    admits(server, 0)


def texts_run(server: Live) -> float:
    """Texts that have run, and one more."""
    return published(server)[TEXTS_RUN]


def statuses(sent: list[Future[httpx.Response]]) -> set[int]:
    return {future.result().status_code for future in sent}


# --- the budget ---


SMALL_QUEUE = ("--max-queue-tokens", "600", "--max-batch-tokens", "256")


@pytest.fixture(scope="module")
def pair() -> Iterator[Live]:
    """Two HTTP processes, and a queue of 600 tokens."""
    with live(*STAND_IN, *SMALL_QUEUE, "--workers", "2", env=PATIENT) as server:
        yield server


def test_the_budget_is_that_of_all_http_processes_together(pair: Live) -> None:
    server = pair
    with one_to_each(server) as connections, ThreadPoolExecutor(16) as pool:
        with server.held():
            filling = [pool.submit(server.post, "/embed", {"inputs": [101, HELD, 102]})]
            admits(server, 3)
            filling += [pool.submit(server.post, "/embed", {"inputs": [7] * 50}) for _ in range(10)]
            admits(server, 503)
            for connection in connections.values():
                status, headers, said = post_on(connection, {"inputs": [7] * 200})
                assert status == 429
                assert (
                    "the queue holds 503 tokens and this request has 200; the limit is 600 (--max-queue-tokens)" in said
                )
                assert int(headers["retry-after"]) >= 1
            small = [pool.submit(post_on, each, {"inputs": GOOD}) for each in connections.values()]
            admits(server, 509)  # the small ones have room
        assert {each.result()[0] for each in small} == {200}
        assert statuses(filling) == {200}
        _, connection = connections.popitem()
        assert post_on(connection, {"inputs": [[7] * 200] * 5})[0] == 200  # more than the budget


def test_what_a_killed_http_process_had_admitted_is_free_again(pair: Live) -> None:
    server = pair
    with one_to_each(server) as connections, ThreadPoolExecutor(1) as pool:
        (victim, first), (_, second) = connections.items()
        with server.held():
            filling = pool.submit(post_on, first, {"inputs": [[101, HELD, 102], *[[7] * 200] * 2]})
            # The first two of its texts run together, the third waits.
            until(lambda: server.metrics()["embert_queue_tokens"] == 200, what="the request")
            admits(server, 600 // 8)  # also where the other process gets the scrape
            os.kill(victim, signal.SIGKILL)
            # And what it had queued is not run: its responses would find nobody.
            until(lambda: server.metrics()["embert_queue_tokens"] == 0, what="the end of its requests")
        admits(server, 0)
        assert post_on(second, {"inputs": [7] * 200})[0] == 200
        assert isinstance(filling.exception(), ConnectionError)
        until(lambda: server.metrics()["embert_http_restarts_total"] == 1, what="the supervisor's count")
        assert server.metrics()['embert_cancelled_texts_total{stage="queued"}'] == 1


# --- deadlines ---


@pytest.mark.parametrize("given", ["0", "-1", "soon", "", "inf", "nan", "1e3", "1_0", "0.0", "1" * 20])
def test_a_timeout_that_cannot_be_is_422(slow: Live, given: str) -> None:
    response = slow.post("/v1/embeddings", {}, headers={"x-request-timeout": given})
    assert response.status_code == 422
    assert f"`X-Request-Timeout` must be a number of seconds above 0; it is {given!r}" in response.text


@pytest.mark.parametrize("given", ["high", "BULK", ""])
def test_a_priority_that_cannot_be_is_422(slow: Live, given: str) -> None:
    response = slow.post("/v1/embeddings", {"input": "a"}, headers={"x-priority": given})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "X-Priority"
    assert f"must be `interactive` or `bulk`; it is {given!r}" in response.text


def test_nobody_waits_beyond_the_deadline_of_the_request(slow: Live, hold_file: Path) -> None:
    before = texts_run(slow)
    with clients(slow) as some, held(hold_file):
        response = some.ask([GOOD], **{"x-request-timeout": "1"})
        assert response.status_code == 503
        assert "not served within 1 s (X-Request-Timeout)" in response.json()["error"]
        assert int(response.headers["retry-after"]) >= 1
        assert slow.metrics()[TEXTS_RUN] == before
    until(lambda: slow.metrics()[TEXTS_RUN] == before + 1, what="the end of the batch that it was in")


def test_the_servers_timeout_ends_a_request() -> None:
    with live(*STAND_IN, "--request-timeout", "0.5") as server, server.held():
        for headers in ({}, {"x-request-timeout": "100"}):
            response = server.post("/embed", {"inputs": [[101, HELD, 102]]}, headers=headers)
            assert response.status_code == 503
            assert "within 0.5 s (--request-timeout)" in response.json()["error"]


@pytest.mark.parametrize(
    ("given", "timeout_s", "set_by"), [(b"0.5", 0.5, "X-Request-Timeout"), (b"100", 60.0, "--request-timeout")]
)
def test_the_servers_timeout_bounds_that_of_the_request(given: bytes, timeout_s: float, set_by: str) -> None:
    options = read_request_options([(b"x-request-timeout", given)], 10.0, 60.0)
    assert (options.timeout_s, options.set_by, options.deadline) == (timeout_s, set_by, 10.0 + timeout_s)


def test_a_deadline_that_cannot_be_met_fails_early_and_does_not_reach_the_encoder(slow: Live, hold_file: Path) -> None:
    rejected = 'embert_rejected_total{reason="deadline"}'
    ran, before = texts_run(slow), slow.metrics()[rejected]
    with clients(slow) as some:
        with held(hold_file):
            sent = some.fill(*[[LONG]] * 14)  # three and a half seconds
            hopeless = some.ask([LONG] * 2, **{"x-request-timeout": "3"})
            assert hopeless.status_code == 503
            # Told by the engine, not by whoever watches the time.
            assert "cannot be served in time, the work queued before it takes" in hopeless.json()["error"]
            assert "it has 3 s (X-Request-Timeout)" in hopeless.json()["error"]
            assert 2 <= int(hopeless.headers["retry-after"]) <= 60
            # Small requests take their turns between the others' texts: this one is in time.
            small = some.send([GOOD], **{"x-request-timeout": "50"})
            admits(slow, 14 * 250 + 3)
        assert small.result().status_code == 200
        assert some.finished.index(small) < 13  # ahead of others that were there before
        assert statuses(sent) == {200}
    assert texts_run(slow) - ran == 15 + 1
    assert slow.metrics()[rejected] == before + 1


# --- leaving ---


def test_a_client_that_leaves_gives_its_share_of_the_budget_back(slow: Live, hold_file: Path) -> None:
    before = texts_run(slow)
    with clients(slow) as some:
        with held(hold_file):
            blocking = some.send([GOOD])
            admits(slow, 3)
            leaving = send(slow, {"inputs": [LONG] * 15})
            admits(slow, 3 + 500)
            leaving.close()
            admits(slow, 3)
            assert not blocking.done()
        assert some.ask([LONG] * 15).status_code == 200
    assert texts_run(slow) - before == 16 + 1  # of those who left, none


# --- fair share ---


def test_bulk_leaves_room_in_the_queue_and_lets_others_go_first(slow: Live, hold_file: Path) -> None:
    bulk = {"x-priority": "bulk"}
    with clients(slow) as some:
        with held(hold_file):
            waiting = some.fill(*[[LONG]] * 12, **bulk)  # three quarters of the budget, all that bulk may have
            refused = some.ask([LONG] * 6, **bulk)
            assert refused.status_code == 429
            assert "4000 (--max-queue-tokens), of which low-priority requests may fill 75%" in refused.json()["error"]
            urgent = [some.send([LONG]) for _ in range(3)]
            admits(slow, 15 * 250)
        assert statuses(urgent) == statuses(waiting) == {200}
        # First come, first served would have been all twelve before them.
        assert max(some.finished.index(each) for each in urgent) < 10
