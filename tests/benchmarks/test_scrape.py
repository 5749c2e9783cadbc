"""Figures read from a server's /metrics."""

from __future__ import annotations

import math

import httpx

from benchmarks.lib.scrape import scrape
from tests.server.live import Live


def test_what_happened_between_two_scrapes(server: Live, http: httpx.Client) -> None:
    before = scrape(f"{server.url}/metrics")
    for _ in range(5):
        http.post("/embed", json={"inputs": ["a", "b"]})
    http.post("/embed", json={"inputs": ""})
    grown = scrape(f"{server.url}/metrics") - before
    assert grown.total("embert_requests_total", route="/embed") == 6
    assert grown.by("embert_requests_total", "status")["200"] >= 5
    assert grown.by("embert_requests_total", "status")["400"] == 1
    assert grown.mean("embert_request_texts") == 2
    assert 1 < grown.quantile("embert_request_texts", 0.5) <= 2
    assert 2 < grown.quantile("embert_text_tokens", 0.99) <= 4
    assert math.isnan(grown.quantile("embert_no_such_thing", 0.5))
    assert math.isnan(grown.mean("embert_no_such_thing"))
