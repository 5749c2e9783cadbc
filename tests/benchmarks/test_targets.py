"""Parts of the server's benchmarks: the encoder's baseline, and who was the limit."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.load_plan import Plan, Responses, post
from benchmarks.server import encoder_baseline
from benchmarks.server.measurement import NO_LIMIT, Round, _figures
from embert.engine import load_model


def test_encoder_without_a_server() -> None:
    baseline = encoder_baseline.measure(
        load_model().folder, "cpu", {"some": ["a text of words"] * 40}, ["one"], seconds=0.05
    )
    assert baseline.texts_per_s["some"] > 0
    assert baseline.tokens_per_s["some"] == pytest.approx(6 * baseline.texts_per_s["some"])
    assert baseline.one_text_ms > 0
    assert baseline.best(baseline) == baseline


REQUESTS = (post("/embed", {}, kind="text", texts=2, tokens=8),)


def figures(rate: float | None, busiest_client: float, late_s: float, http_cores: float) -> Round:
    """A second with 100 responses after 10 ms each."""
    due = np.linspace(0, 0.98, 100)
    responses = Responses(
        request=np.zeros(100, np.int32),
        status=np.full(100, 200, np.int32),
        due=due,
        ended=due + 0.01,
        late_s=np.full(100, late_s),
        opened=0.0,
        client_cores=busiest_client,
        busiest_client=busiest_client,
    )
    plan = Plan(1, REQUESTS, connections=1, window_s=1.0, rate=rate)
    return _figures(
        plan, responses, ({"http": 1.0}, {"http": 1.0 + http_cores, "engine": 0.5}), {"http": 2, "engine": 1}
    )


@pytest.mark.parametrize(
    ("rate", "busiest_client", "late_s", "http_cores", "limit"),
    [
        (None, 0.95, 0.0, 2.0, "client"),
        (None, 0.5, 0.0, 1.9, "HTTP processes"),
        (None, 0.5, 0.0, 1.0, "engine"),
        (100.0, 0.5, 0.0, 1.9, NO_LIMIT),
        (100.0, 0.5, 0.1, 1.9, "client"),
    ],
)
def test_who_was_the_limit(rate: float, busiest_client: float, late_s: float, http_cores: float, limit: str) -> None:
    measured = figures(rate, busiest_client, late_s, http_cores)
    assert measured.limit == limit
    assert (measured.requests_per_s, measured.texts_per_s, measured.tokens_per_s) == (100, 200, 800)
    assert measured.p50_ms == {"text": pytest.approx(10)}
    assert measured.cores == {"http": pytest.approx(http_cores), "engine": 0.5}
