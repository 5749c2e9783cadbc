"""Collectors that hang, refuse or come back: requests notice none of it."""

from __future__ import annotations

from tests.server.live import STAND_IN, Live, live, until
from tests.server.observability.tracing.traced import AT_ONCE, OtlpReceiver


def dropped(server: Live) -> int:
    return int(server.metrics()["embert_spans_dropped_total"])


def test_a_collector_that_hangs_costs_spans_and_nothing_else() -> None:
    env = AT_ONCE | {"OTEL_BSP_MAX_QUEUE_SIZE": "60", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "60"}
    with OtlpReceiver() as receiver, live(*STAND_IN, "--otlp-endpoint", receiver.url, env=env) as server:
        receiver.answers.clear()
        with server.client() as client:
            for _ in range(40):  # three spans each in the HTTP process, two and a batch in the engine's
                assert client.post("/embed", json={"inputs": [[101, 102]]}).status_code == 200
        until(lambda: dropped(server) > 40, what="spans to be dropped")
        server.signal()
        assert server.wait() == 0  # though the exporter would wait ten seconds for this collector
        assert "did not accept the last spans" in server.log
