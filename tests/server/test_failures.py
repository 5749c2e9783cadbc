"""Responses when the encoder fails, when there is too much work, and while it loads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.stand_in import FAIL, HELD, NAN, expected

GOOD = [101, 7592, 102]
OPTIONS = ("--max-batch-tokens", "256", "--max-queue-tokens", "600", "--openai-accepts", "token-ids")
NAMED = {"model": "sentence-transformers/all-MiniLM-L6-v2"}  # which token ids want on OpenAI's routes


def order(number: int) -> list[int]:
    return [101, number, 102]


@pytest.fixture(scope="module")
def failing() -> Iterator[Live]:
    with live(*STAND_IN, *OPTIONS, env=PATIENT) as running:
        yield running


@pytest.fixture
def client(failing: Live) -> Iterator[httpx.Client]:
    with failing.client() as client:
        yield client
        response = client.post("/embed", json={"inputs": GOOD})  # whatever happened
        assert np.allclose(response.json()[0], expected(GOOD), atol=1e-6)


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message, in either dialect."""
    error = response.json()["error"]
    if isinstance(error, str):
        return response.status_code, response.json()["error_type"], error
    assert error["param"] is None
    assert error["code"] is None
    return response.status_code, error["type"], error["message"]


@pytest.mark.parametrize("number", [FAIL, NAN])
def test_a_failed_forward_is_424(client: httpx.Client, number: int) -> None:
    said = "told to fail" if number == FAIL else "not finite"
    status, kind, message = error_of(client.post("/embed", json={"inputs": order(number)}))
    assert (status, kind) == (424, "Backend")
    assert said in message
    status, kind, message = error_of(client.post("/v1/embeddings", json={"input": [GOOD, order(number)], **NAMED}))
    assert (status, kind) == (424, "server_error")
    assert said in message
    for accept in ("application/json", "application/octet-stream"):
        assert client.post("/embed_all", json={"inputs": order(number)}, headers={"accept": accept}).status_code == 424


@pytest.mark.parametrize("number", [FAIL, NAN])
def test_a_failure_is_its_own_requests_only(client: httpx.Client, failing: Live, number: int) -> None:
    """Other requests of the batch get their vectors."""
    others = [[101, 5000 + i, 102] for i in range(12)]
    with ThreadPoolExecutor(14) as pool:
        with failing.held() as runs:  # so that the rest is batched
            blocking = pool.submit(client.post, "/embed", json={"inputs": order(HELD)})
            until(runs.exists, what="the blocking request")
            bad = pool.submit(client.post, "/embed", json={"inputs": order(number)})
            good = [pool.submit(client.post, "/embed", json={"inputs": ids}) for ids in others]
            until(lambda: failing.metrics()["embert_queue_tokens"] == 3 * 13, what="the others in the queue")
        assert blocking.result().status_code == 200
        assert bad.result().status_code == 424
        for ids, response in zip(others, good, strict=True):
            assert np.allclose(response.result().json()[0], expected(ids), atol=1e-6)


def test_health_never_waits_behind_a_batch(client: httpx.Client, failing: Live) -> None:
    with ThreadPoolExecutor(1) as pool:
        with failing.held() as runs:
            running = pool.submit(client.post, "/embed", json={"inputs": order(HELD)})
            until(runs.exists, what="the blocking request")
            for path in ("/health", "/ping", "/readyz", "/livez", "/info", "/metrics", "/v1/models"):
                response = client.get(path)
                assert response.status_code == 200
        running.result()


def test_while_loading() -> None:
    with live(*STAND_IN, loading=True) as server, server.client() as client:
        # The process that plans responds before, and has less in /info.
        until(lambda: "max_input_length" in getattr(server.try_get("/info"), "text", ""), what="the HTTP process")
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["status"] == "loading"
        assert client.get("/livez").status_code == 200
        assert client.get("/health").status_code == 503
        before = client.get("/info").json()
        assert before["max_input_length"] == 256
        # What is not known yet is null, and no limit of 0.
        limits = ("max_batch_tokens", "max_queue_tokens", "queue_limit_tokens", "max_concurrent_requests")
        assert {name: before[name] for name in limits} == dict.fromkeys(limits)
        assert not [name for name, value in before.items() if value == 0 and value is not False]
        assert client.get("/v1/models").status_code == 200
        for path, body, kind in (
            ("/embed", {"inputs": "a"}, "Unhealthy"),
            ("/v1/embeddings", {"input": "a"}, "server_error"),
            ("/embed_all", {"inputs": "a"}, "Unhealthy"),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"]}}, "Unhealthy"),
        ):
            response = client.post(path, json=body)
            status, type_, message = error_of(response)
            assert (status, type_) == (503, kind)
            assert "loading" in message
            assert int(response.headers["retry-after"]) >= 1
        # What is wrong with a request is said before that it came too early; and tokenizing needs no engine.
        assert client.post("/embed", json={"inputs": []}).status_code == 400
        assert client.post("/tokenize", json={"inputs": "a"}).status_code == 200
        metrics = server.metrics()
        assert metrics['embert_rejected_total{reason="loading"}'] == 4
        assert metrics['embert_engine_up{engine="0"}'] == 0
        server.end_loading()
        server.wait_ready()
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200
        assert server.metrics()['embert_engine_up{engine="0"}'] == 1
        after = client.get("/info").json()
        assert all(after[name] > 0 for name in limits)
