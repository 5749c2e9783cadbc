"""Responses to a scrape: OpenMetrics and its exemplars, gzip, and metrics of each process from /proc."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Exemplar

from embert.server.http.request_head import scrape_form
from embert.server.observability.scraping import ExemplarOf, Form
from tests.server.connections import one_to_each
from tests.server.live import STAND_IN, Live, live, until

parse_openmetrics: Any = openmetrics.text_string_to_metric_families
OPENMETRICS = "application/openmetrics-text"
PROMETHEUS = (  # what Prometheus 3.5 sends
    b"application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    b"application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    b"text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def two() -> Iterator[Live]:
    """Two HTTP processes, whose exemplars are scraped from either."""
    options = ("--workers", "2", "--max-connections", "100", "--metrics-port", "0")
    with live(*STAND_IN, *options, clean_log=False) as running:
        yield running


def scraped(server: Live, **headers: str) -> httpx.Response:
    with server.client(headers={"accept-encoding": "identity", **headers}) as client:
        return client.get("/metrics")


def exemplars(server: Live) -> dict[str, Exemplar]:
    """Exemplars of the request duration, by the id in them."""
    found = {}
    for family in parse_openmetrics(scraped(server, accept=OPENMETRICS).text):
        for sample in family.samples:
            if sample.exemplar is not None:
                assert family.name == "embert_request_duration_seconds"
                assert sample.exemplar.value <= float(sample.labels["le"])
                found["".join(sample.exemplar.labels.values())] = sample.exemplar
    return found


@pytest.mark.parametrize(
    ("headers", "form"),
    [
        ([], Form()),
        ([(b"accept", b"*/*")], Form()),
        ([(b"accept", b"text/html"), (b"accept-encoding", b"br")], Form()),
        ([(b"accept", b"application/openmetrics-text;q=0.1, text/plain")], Form()),
        ([(b"accept", b"text/plain")], Form()),
        ([(b"accept", b"text/plain;version=0.0.4;q=0.5,*/*;q=0.1")], Form()),
        ([(b"accept", b"application/vnd.google.protobuf;q=0.7,text/plain;version=0.0.4;q=0.3")], Form()),
        ([(b"accept", b"text/plain;version=9, application/openmetrics-text;version=9")], Form()),
        ([(b"accept", b'text/plain; version="1.0.0"')], Form()),
        ([(b"accept", b"application/openmetrics-text")], Form(openmetrics=True)),
        ([(b"accept", b"application/openmetrics-text; version=0.0.1,*/*;q=0.1")], Form(openmetrics=True)),
        ([(b"accept", PROMETHEUS), (b"accept-encoding", b"gzip")], Form(openmetrics=True, gzip=True)),
        ([(b"accept-encoding", b"deflate, gzip;q=0.5, br")], Form(gzip=True)),
        ([(b"accept-encoding", b"gzip;q=0")], Form()),
        ([(b"accept-encoding", b"identity, gzip;q=0.5")], Form()),
    ],
)
def test_what_a_client_asks_for(headers: list[tuple[bytes, bytes]], form: Form) -> None:
    assert scrape_form(headers) == form


def test_openmetrics_says_the_same(two: Live) -> None:
    plain, open_ = scraped(two), scraped(two, accept=OPENMETRICS)
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert open_.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert open_.text.endswith("# EOF\n")
    names = {family.name for family in parse_text(plain.text)}
    assert {family.name for family in parse_openmetrics(open_.text)} == names


@pytest.mark.parametrize("port", [0, 1], ids=["http", "metrics-port"])
def test_gzip_where_it_is_asked_for(two: Live, port: int) -> None:
    url = (two.url, two.metrics_url)[port]
    with httpx.Client(headers={"accept-encoding": "gzip"}) as client, client.stream("GET", f"{url}/metrics") as scrape:
        raw = b"".join(scrape.iter_raw())
    assert scrape.headers["content-encoding"] == "gzip"
    assert scrape.headers["vary"] == "accept, accept-encoding"
    assert int(scrape.headers["content-length"]) == len(raw)
    text = gzip.decompress(raw)
    assert b"\nembert_requests_total{" in text
    assert len(raw) < len(text) / 5
    assert "content-encoding" not in scraped(two).headers


def test_exemplars_are_of_all_processes_and_name_the_request_or_its_trace(two: Live) -> None:
    traced = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-request-id": "unseen"}
    with one_to_each(two) as connections:
        (first, second) = connections.values()
        for connection, headers in ((first, traced), (second, {"x-request-id": "mine"})):
            # Different routes, or one could be newer than the other in the same bucket.
            path = "/embed" if connection is first else "/embed_all"
            connection.request("POST", path, json.dumps({"inputs": [101, 7, 102]}), headers)
            assert connection.getresponse().read()
        until(lambda: {TRACE, "mine"} <= set(exemplars(two)), what="exemplars of both")
        for connection in (first, second):  # whichever of them is asked
            connection.request("GET", "/metrics", headers={"accept": OPENMETRICS})
            text = connection.getresponse().read().decode()
            assert f'# {{trace_id="{TRACE}"}} ' in text
            assert '# {request_id="mine"} ' in text
            assert "unseen" not in text
    assert TRACE not in scraped(two).text  # the old format has no exemplars, and no label has an id


def test_an_id_that_is_too_long_for_a_scrape_is_left_out() -> None:
    fits = [ExemplarOf({"le": "1.0"}, "request_id", "x" * length, 0.5, 0.0).fits for length in (118, 119)]
    assert fits == [True, False]


def test_each_process_says_what_it_takes(two: Live) -> None:
    pids = {
        "supervisor": two.process.pid,
        **{f"http-{index}": pid for index, pid in enumerate(sorted(two.http_pids))},
        "engine-0": two.engine_pids[0],
    }
    metrics = two.metrics()
    for process, pid in pids.items():
        label = f'{{process="{process}"}}'
        actual = psutil.Process(pid)
        assert metrics[f"process_resident_memory_bytes{label}"] > 10e6
        assert metrics[f"process_cpu_seconds_total{label}"] > 0
        assert 3 < metrics[f"process_open_fds{label}"] < metrics[f"process_max_fds{label}"]
        if not process.startswith("http"):  # which of the two is which, nobody says
            assert metrics[f"process_start_time_seconds{label}"] == pytest.approx(actual.create_time(), abs=1.5)
    samples = [sample for sample in metrics if sample.startswith("process_resident")]
    assert len(samples) == len(pids)


def test_connections_are_counted(two: Live) -> None:
    """A scrape's own included."""
    assert two.metrics()["embert_connections_limit"] == 2 * 100
    until(lambda: two.metrics()["embert_open_connections"] == 1, what="the end of earlier connections")
    with two.client() as client:
        client.get("/livez")
        until(lambda: two.metrics()["embert_open_connections"] == 2, what="the open connection")
    until(lambda: two.metrics()["embert_open_connections"] == 1, what="its end")
