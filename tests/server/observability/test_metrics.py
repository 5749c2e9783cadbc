"""The metrics: all there from the start, at zero, documented, and true afterwards; and durations that add up."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from embert.server.frontend.routes import METRIC_ROUTES, METRIC_TASKS
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.metrics import (
    CANCEL_STAGES,
    GPU_METRICS,
    REJECT_REASONS,
)
from embert.server.observability.scraping import Exposition, Form, Scrapes
from tests.server.live import PATIENT, ROOT, STAND_IN, Live, Samples, live, until
from tests.server.stand_in import FAIL, HELD, SLEEP

DOCUMENT = ROOT / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.+?) \| (.+?) \|$", re.MULTILINE)

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
ASKED = ("/readyz", "/metrics")  # routes that these tests ask a server at rest


@pytest.fixture(scope="module")
def fresh() -> Iterator[Live]:
    """A server that nobody has sent work to."""
    with live(*STAND_IN, env=PATIENT) as running:
        yield running


@pytest.fixture(scope="module")
def families(fresh: Live) -> dict[str, tuple[str, set[str]]]:
    """Name → type and labels, of a server at rest; counters by the name of their samples."""
    found = {}
    for family in text_string_to_metric_families(fresh.get("/metrics").text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels}
        found[name] = (family.type, labels - {"le"})
    return found


@pytest.fixture(scope="module")
def at_rest(fresh: Live, families: dict[str, tuple[str, set[str]]]) -> dict[str, float]:
    return fresh.metrics()


def documented() -> dict[str, tuple[str, set[str]]]:
    rows = ROW.findall(Path(DOCUMENT).read_text())
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}


def test_documented_is_what_is_exported(families: dict[str, tuple[str, set[str]]]) -> None:
    with_gpu = {f"embert_gpu_{name}": ("gauge", {"device"}) for name in GPU_METRICS}
    assert documented() == families | with_gpu


def test_zero_from_the_start(at_rest: dict[str, float]) -> None:
    one = {"build_info", "model_info", "model_ready", "engine_up", "requests_in_flight"}
    alive = {
        "embert_engine_last_success_timestamp_seconds",
        "embert_engine_busy_ratio",
        "embert_engine_hang_limit_seconds",
        "embert_queue_limit_tokens",
        "embert_open_connections",
        "embert_connections_limit",
    }
    alive.add("embert_starting")  # until every process is ready, which this one may not have seen
    asked = ["process_", *(f'route="{route}"' for route in ASKED)]
    for sample, value in at_rest.items():
        name = sample.partition("{")[0]
        if name.removeprefix("embert_") in one:
            assert value == 1, sample
        elif name not in alive and not any(each in sample for each in asked):
            assert value == 0, sample


def test_labels_that_are_known_are_all_there(at_rest: dict[str, float]) -> None:
    for route in METRIC_ROUTES:
        model, priority = (MODEL, "interactive") if route in METRIC_TASKS else ("", "")
        labels = f'model="{model}",outcome="answered",priority="{priority}",route="{route}"'
        assert f'embert_requests_total{{{labels},status="200"}}' in at_rest
        assert (f"embert_request_duration_seconds_count{{{labels}}}" in at_rest) == (route in ASKED)
    for part in ("tokenize", "queue", "inference", "response_encode", "request_other"):
        assert at_rest[f'embert_{part}_duration_seconds_count{{model="{MODEL}",priority="interactive"}}'] == 0
    assert not [sample for sample in at_rest if 'priority="bulk"' in sample]
    for reason in REJECT_REASONS:
        assert at_rest[f'embert_rejected_total{{reason="{reason}"}}'] == 0
    for stage in CANCEL_STAGES:
        assert at_rest[f'embert_cancelled_texts_total{{stage="{stage}"}}'] == 0
    text = DOCUMENT.read_text()
    for label in (*METRIC_ROUTES, *REJECT_REASONS, *CANCEL_STAGES):
        assert f"`{label}`" in text


def test_info_metrics(at_rest: dict[str, float]) -> None:
    (info,) = [sample for sample in at_rest if sample.startswith("embert_model_info")]
    facts = {"model": MODEL, "model_id": MODEL, "dtype": "float32", "backend": "stand-in", "device": "cpu"}
    assert all(f'{name}="{value}"' in info for name, value in facts.items())


def growth(server: Live, before: Samples) -> Samples:
    """The increase of each sample, once every request of before is counted, which follows its response."""
    until(lambda: server.metrics()["embert_requests_in_flight"] == 1, what="the end of all requests")
    after = server.metrics()
    return Samples((sample, value - dict.get(before, sample, 0.0)) for sample, value in after.items())


def test_requests_count(fresh: Live, at_rest: dict[str, float]) -> None:
    before = fresh.metrics()
    fresh.post("/embed", {"inputs": [[101, 5, 102], [101, 5, 6, 7, 102]]})
    fresh.post("/v1/embeddings", {"input": ["a " * 18] * 5})
    fresh.post("/embed_all", {"inputs": [101, 5, 102]})
    fresh.post("/embed", {"inputs": ""})
    fresh.post("/embed", {"inputs": ["a"] * 2049})
    fresh.post("/embed", {"inputs": [7] * 300})
    texts = before["embert_batch_texts_sum"] + 2 + 5 + 1 + 1  # which an engine process shows a moment later
    until(lambda: fresh.metrics()["embert_batch_texts_sum"] == texts, what="their batches")
    grown, after = growth(fresh, before), fresh.metrics()
    assert grown['embert_requests_total{route="/embed",status="200"}'] == 2
    assert grown['embert_requests_total{route="/embed",status="400"}'] == 1
    assert grown['embert_requests_total{route="/embed",status="413"}'] == 1
    assert grown['embert_requests_total{route="/v1/embeddings",status="200"}'] == 1
    assert grown['embert_request_duration_seconds_count{route="/embed"}'] == 4
    assert grown['embert_rejected_total{reason="too_large"}'] == 1
    texts, tokens = 2 + 5 + 1 + 1, 8 + 100 + 3 + 256
    assert grown["embert_texts_total"] == texts
    assert grown["embert_tokens_total"] == tokens
    assert grown["embert_truncated_texts_total"] == 1
    assert grown["embert_request_texts_count"] == 4
    assert grown["embert_request_texts_sum"] == texts
    assert grown["embert_text_tokens_count"] == texts
    assert grown["embert_text_tokens_sum"] == tokens
    # By bucket: 3, 3, 5, five times 20, 256.
    cumulative = {4: 2, 8: 3, 16: 3, 32: 8, 64: 8, 128: 8, 256: 9, 512: 9}
    for bound, count in cumulative.items():
        assert grown[f'embert_text_tokens_bucket{{le="{float(bound)}"}}'] == count
    assert grown["embert_tokenize_duration_seconds_count"] == 4
    assert grown["embert_response_encode_duration_seconds_count"] == 4
    batches = grown['embert_batches_total{engine="0"}']
    assert 1 <= batches <= 4
    for name in ("batch_texts", "batch_tokens", "batch_token_fill_ratio"):
        assert grown[f'embert_{name}_count{{engine="0"}}'] == batches
    assert grown['embert_batch_texts_sum{engine="0"}'] == texts
    assert grown['embert_batch_tokens_sum{engine="0"}'] == tokens
    assert grown['embert_batch_token_fill_ratio_sum{engine="0"}'] == pytest.approx(tokens / 16384)
    assert grown["embert_batch_duration_seconds_count"] == batches
    assert grown["embert_inference_duration_seconds_count"] == 4
    assert grown["embert_queue_duration_seconds_count"] == 4
    assert grown["embert_request_other_duration_seconds_count"] == 6  # with those that were refused
    assert after["embert_padding_tokens_total" + '{engine="0"}'] == 0
    assert after["embert_queue_tokens"] == after["embert_queue_texts"] == 0
    assert after["embert_requests_in_flight"] == 1  # the one that asks


def test_every_request_has_an_outcome(fresh: Live) -> None:
    """Refusals and mistakes of clients are told from failures, and errors have series before they happen."""

    def counted(route: str) -> dict[tuple[str, str], float]:
        """By status and outcome, and that durations say the same by outcome."""
        samples = fresh.metrics()
        wanted = [(sample, value) for sample, value in samples.items() if f'route="{route}"' in sample and value]
        durations = sum(v for s, v in wanted if s.startswith("embert_request_duration_seconds_count"))
        found = {
            (re.findall('status="(.+?)"', sample)[0], re.findall('outcome="(.+?)"', sample)[0]): value
            for sample, value in wanted
            if sample.startswith("embert_requests_total")
        }
        for _, outcome in found:
            at_least = f'embert_request_duration_seconds_count{{route="{route}",outcome="{outcome}"}}'
            assert samples[at_least] == sum(value for (_, other), value in found.items() if other == outcome)
        assert durations == sum(found.values())
        return found

    labels = f'model="{MODEL}",outcome="%s",priority="interactive",route="/similarity",status="%d"'
    fresh.post("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}})
    samples = fresh.metrics()
    for status, outcome in ((424, "failed"), (429, "refused"), (500, "failed"), (503, "failed")):
        assert samples[f"embert_requests_total{{{labels % (outcome, status)}}}"] == 0
    fresh.post("/rerank", {"query": "a", "texts": ["b"]})
    assert counted("/rerank") == {("424", "client_error"): 1}
    fresh.post("/", {"inputs": [101, FAIL, 102]})
    late = fresh.post("/", {"inputs": [101, SLEEP + 40, 102]}, headers={"x-request-timeout": "1.5"})
    assert late.status_code == 503
    fresh.post("/", {"inputs": ""})
    assert counted("/") == {("424", "failed"): 1, ("503", "expired"): 1, ("400", "client_error"): 1}


# --- the parts of requests last as long as the requests ---

INTERACTIVE = 'priority="interactive"'
PARTS = ("tokenize", "queue", "inference", "response_encode", "request_other")


def total(samples: Samples, part: str, of: str, labels: str = "") -> float:
    return samples.get(f"embert_{part}_duration_seconds_{of}{{{labels}}}", 0.0)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_means_of_parts_add_up_to_the_mean_request_under_load(server: Live, priority: str) -> None:
    """The real model, concurrent requests of 1 to 16 texts, all served: each is observed once in every part."""
    bodies = [{"inputs": [f"text {i} of a request of {n} texts"] * n} for i in range(2) for n in (1, 2, 16)]
    before = server.metrics()
    # Four of them fit into the queue at any speed of the machine.
    with ThreadPoolExecutor(4) as pool, server.client(headers={"x-priority": priority}, timeout=120) as client:
        responses = list(pool.map(lambda body: client.post("/embed", json=body), 2 * bodies))
    assert {response.status_code for response in responses} == {200}
    grown = growth(server, before)
    labels = f'priority="{priority}"'
    for part in ("request", *PARTS):
        assert total(grown, part, "count", labels) == len(responses), part
        assert total(grown, part, "sum", labels) > 0, part
    parts_s = sum(total(grown, part, "sum", labels) for part in PARTS)
    assert parts_s == pytest.approx(total(grown, "request", "sum", labels), rel=1e-6)  # sums of doubles are rounded


def test_failures_add_up_too(fresh: Live) -> None:
    """Refused, failed, out of time: the parts that there were, and all else in `other`."""
    before = fresh.metrics()
    with fresh.client(timeout=60) as client:
        assert client.post("/embed", json={"inputs": ""}).status_code == 400
        assert client.post("/embed", json={"inputs": ["a"] * 2049}).status_code == 413
        assert client.post("/embed", json={"inputs": [101, FAIL, 102]}).status_code == 424
        assert client.post("/embed", json={"inputs": "a"}, headers={"x-priority": "low"}).status_code == 422
        with fresh.held():
            late = client.post("/embed", json={"inputs": [101, HELD, 102]}, headers={"x-request-timeout": "3"})
        assert late.status_code == 503
        assert client.post("/tokenize", json={"inputs": "a text"}).status_code == 200
        assert client.get("/").status_code == 200  # the page, which asks nothing of a model
    grown = growth(fresh, before)
    assert total(grown, "request", "count", INTERACTIVE) == total(grown, "request_other", "count", INTERACTIVE) == 6
    assert sum(total(grown, part, "sum") for part in PARTS) == pytest.approx(
        total(grown, "request", "sum", INTERACTIVE), rel=1e-6
    )
    assert grown["embert_queue_duration_seconds_count"] == 2  # the one that failed, the one that was late
    assert grown["embert_queue_duration_seconds_sum"] >= 0.4  # ... which waited until the end
    assert grown["embert_inference_duration_seconds_count"] == 0
    assert total(grown, "response_encode", "count") == 0
    assert total(grown, "tokenize", "count") == 3


# --- scrapes ---


def test_a_scrape_leaves_the_loop_alone_and_is_made_once_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks while one is made shares the next: theirs must tell what happened until they asked."""
    began, go_on = threading.Semaphore(0), threading.Semaphore(0)
    made: list[int] = []
    happened = 0  # as the loop has it
    written = 0  # as a scrape finds it
    shared = MetricMemory.create([])

    def slow_exposition(memory: MetricMemory, form: Form) -> Exposition:
        assert memory is shared
        made.append(written)
        began.release()
        assert go_on.acquire(timeout=30)
        return Exposition(b"%d %d" % (made[-1], form.gzip), ())

    def write() -> None:
        nonlocal written
        written = happened

    async def run() -> None:
        nonlocal happened
        scrapes = Scrapes(shared, write)
        happened = 1
        first = asyncio.ensure_future(scrapes.render(Form()))
        while not began.acquire(blocking=False):  # which it can only be if the loop runs on meanwhile
            await asyncio.sleep(0.001)
        happened = 2
        others = [asyncio.ensure_future(scrapes.render(Form())) for _ in range(10)]
        await asyncio.sleep(0.001)
        others.pop().cancel()  # a client that leaves takes nothing from the others
        another_form = asyncio.ensure_future(scrapes.render(Form(gzip=True)))
        happened = 3
        for _ in range(3):
            go_on.release()
        assert (await first).body == b"1 0"
        assert {scrape.body for scrape in await asyncio.gather(*others)} == {b"3 0"}
        assert (await another_form).body == b"3 1"
        assert made == [1, 3, 3]
        scrapes.close()

    monkeypatch.setattr("embert.server.observability.scraping.exposition", slow_exposition)
    asyncio.run(asyncio.wait_for(run(), 60))
