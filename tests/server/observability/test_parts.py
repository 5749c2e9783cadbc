"""Where the time goes adds up: the parts of requests last as long as the requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.live import PATIENT, STAND_IN, Live, Samples, live, until
from tests.server.stand_in import FAIL, HELD

INTERACTIVE = 'priority="interactive"'
PARTS = ("tokenize", "queue", "inference", "response_encode", "request_other")


def total(samples: Samples, part: str, of: str, labels: str = "") -> float:
    return samples.get(f"embert_{part}_duration_seconds_{of}{{{labels}}}", 0.0)


def growth(server: Live, before: Samples) -> Samples:
    """Once every request of before is counted, which a server does when it has answered."""
    until(lambda: server.metrics()["embert_requests_in_flight"] == 1, what="the end of all requests")
    after = server.metrics()
    return Samples((sample, value - dict.get(before, sample, 0.0)) for sample, value in after.items())


@pytest.fixture(scope="module")
def paced() -> Iterator[Live]:
    """Two engines whose forwards take 20 ms and run up to 256 tokens."""
    options = ("--device", "cuda:0,1", "--max-batch-tokens", "256", "--request-timeout", "20")
    env = PATIENT | {"STAND_IN_S": "0.02", "STAND_IN_DEVICE": "cuda"}
    with live(*STAND_IN, *options, env=env, clean_log=False) as running:
        yield running


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_means_of_parts_add_up_to_the_mean_request_under_load(server: Live, priority: str) -> None:
    """The real model, requests of 1 to 16 texts side by side, all answered: each is observed once in every part."""
    bodies = [{"inputs": [f"text {i} of a request of {n} texts"] * n} for i in range(2) for n in (1, 2, 16)]
    before = server.metrics()
    # Four of them fit into the queue at any speed of the machine.
    with ThreadPoolExecutor(4) as pool, server.client(headers={"x-priority": priority}, timeout=120) as client:
        answers = list(pool.map(lambda body: client.post("/embed", json=body), 2 * bodies))
    assert {answer.status_code for answer in answers} == {200}
    grown = growth(server, before)
    labels = f'priority="{priority}"'
    assert total(grown, "request", "count", labels) == len(answers)
    means = {}
    for part in PARTS:
        assert total(grown, part, "count", labels) == len(answers), part
        means[part] = total(grown, part, "sum", labels) / len(answers)
        assert means[part] > 0, part
    mean = total(grown, "request", "sum", labels) / len(answers)
    assert sum(means.values()) == pytest.approx(mean, rel=1e-6)  # the rounding of sums of doubles


def test_failures_add_up_too(paced: Live) -> None:
    """Refused, failed, out of time: the parts that there were, and all else in `other`."""
    before = paced.metrics()
    with paced.client(timeout=60) as client:
        assert client.post("/embed", json={"inputs": ""}).status_code == 400
        assert client.post("/embed", json={"inputs": ["a"] * 2049}).status_code == 413
        assert client.post("/embed", json={"inputs": [101, FAIL, 102]}).status_code == 424
        assert client.post("/embed", json={"inputs": "a"}, headers={"x-priority": "low"}).status_code == 422
        with paced.held():
            late = client.post("/embed", json={"inputs": [101, HELD, 102]}, headers={"x-request-timeout": "3"})
        assert late.status_code == 503
        assert client.post("/tokenize", json={"inputs": "a text"}).status_code == 200
        assert client.get("/").status_code == 200  # the page, which asks nothing of a model
    grown = growth(paced, before)
    assert total(grown, "request", "count", INTERACTIVE) == total(grown, "request_other", "count", INTERACTIVE) == 6
    assert sum(total(grown, part, "sum") for part in PARTS) == pytest.approx(
        total(grown, "request", "sum", INTERACTIVE), rel=1e-6
    )
    assert grown["embert_queue_duration_seconds_count"] == 2  # the one that failed, the one that was late
    assert grown["embert_queue_duration_seconds_sum"] >= 0.4  # ... which waited for an answer until the end
    assert grown["embert_inference_duration_seconds_count"] == 0
    assert total(grown, "response_encode", "count") == 0
    assert total(grown, "tokenize", "count") == 3
