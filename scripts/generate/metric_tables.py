"""docs/metrics.md, from the metrics themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from embert import __version__
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.metrics import (
    CANCEL_STAGES,
    GPU_METRICS,
    MODEL_FACTS,
    REJECT_REASONS,
    REQUEST_BUCKETS_S,
    EngineMetrics,
    SpanMetrics,
    SupervisorMetrics,
    gpu_gauge,
    use_memory,
)
from embert.server.observability.request_record import PRIORITIES, RequestRecord
from embert.server.observability.scraping import exposition

if TYPE_CHECKING:
    from prometheus_client import Metric

_HEAD = """\
# Metrics

<!-- Written by scripts/document from server/observability/metrics.py; change it there. -->

`GET /metrics` responds in Prometheus' text format, and so does `--metrics-port` where that is set. Any HTTP process
reports all HTTP processes, the engine processes and the supervisor. During a download only the supervisor's are there
(`embert_model_ready`, `embert_starting`). Every metric exists, at zero, once the engine is ready, but the durations and
errors of a route, and all of low-priority requests, appear with the first one. No label holds a text, a user or a
request id. Units are seconds, tokens, texts, bytes and watts. Histograms have `_bucket`, `_sum` and `_count` as usual.
A client that accepts gzip gets that.

`Accept: application/openmetrics-text`, which Prometheus sends, gets OpenMetrics. There, each bucket of
`embert_request_duration_seconds` has an exemplar: the newest request that fell into it, by the `trace_id` of its
`traceparent` header, or else by its `request_id`, which is its `X-Request-Id` if it has one. They are up to a second
old. Prometheus keeps them with `--enable-feature=exemplar-storage`.

**How many series?** A server of one model on one engine has 336 at rest. Each route in use adds 26 for each of its
priorities, its durations and its errors, and for each further outcome 22. The first low-priority request adds 101,
another engine about 100. An unused route has one.

**The result of a request** is its `outcome`. Durations of `refused` requests do not show how long responses take, so
latency is that of `outcome="answered"`; the server's own failures are `outcome="failed"`. From the first request of a
route to a model on, its errors (424, 429, 500, 503) have series, at zero.

**The parts of a request** are tokenize, queue, inference, encode and other. Each is observed once for every request
that reaches it, when the request ends, and together they last as long as the request: the sum of their `_sum`, divided
by the `_count` of `embert_request_duration_seconds{priority!=""}`, is the mean duration. Of a request whose texts ran
in several batches, inference is the time of all these batches, and queue is the wait before and between them. The wait
of a request that got no vectors, because its time ran out or its client left, is in queue.

[operations.md](operations.md) says what to look at and what to do. `docker/grafana` has it as a dashboard,
`docker/prometheus` as alerts.
"""

_MEMORY = MetricMemory.create(["document"])
_TABLE = """
| name | type | labels | meaning |
|---|---|---|---|
"""


def document() -> str:
    use_memory(_MEMORY, "document")
    from embert.server.frontend.routes import METRIC_ROUTES

    makers: dict[str, Callable[[], object]] = {
        "Requests and texts (HTTP processes)": _make_http_metrics,
        "Queue, batches and model (engine processes)": _make_engine_metrics,
        "GPU (engine processes on a GPU, where the driver has NVML)": lambda: [
            gpu_gauge(name, "cuda:0") for name in GPU_METRICS
        ],
        "Traces (HTTP and engine processes)": SpanMetrics,
        "Server (the supervisor)": lambda: SupervisorMetrics(["m"], __version__).add_engines([0]),
    }
    processes = _families()
    known = {family.name for family in processes}
    sections: list[str] = []
    buckets: dict[str, str] = {}
    for title, make in makers.items():
        make()
        new = [family for family in _families() if family.name not in known]
        known |= {family.name for family in new}
        sections.append(f"\n## {title}\n{_TABLE}" + "".join(map(_row, sorted(new, key=lambda family: family.name))))
        buckets |= {family.name: _bounds(family) for family in new if family.type == "histogram"}
    rows = "".join(map(_row, sorted(processes, key=lambda family: family.name)))
    sections.append(f"\n## Processes (all, from /proc)\n{_TABLE}{rows}")
    usual = ", ".join(f"{bound:g}" for bound in REQUEST_BUCKETS_S)
    values = {
        "`route` (below `/models/NAME` that of the route without it)": METRIC_ROUTES,
        "`reason` (with status: `queue_full` 429, `too_large` 413, `unauthorized` 401, others 503)": REJECT_REASONS,
        "`stage`": CANCEL_STAGES,
        "`priority` (empty on routes that ask nothing of a model)": PRIORITIES,
    }
    labels = [
        _bullet(f"{label}: {', '.join(f'`{value}`' for value in examples)}") for label, examples in values.items()
    ]
    bounds = [_bullet(f"`{name}`: {text}") for name, text in sorted(buckets.items()) if text != usual]
    return "".join(
        [
            _HEAD,
            *sections,
            "\n## Values of labels\n\nNothing that clients send becomes a label.\n\n",
            *labels,
            _bullet("`status`: the HTTP status of the response, or 499"),
            _bullet(
                "`outcome`: `answered`; `refused`, because of too much work, too many connections or bodies (429, 503) "
                "or while draining (503); `failed`, by the server (5xx, 424); `expired`, because the time that the "
                "client gave it, less than `--request-timeout`, was over (503); `client_error` (other 4xx, and 424 for "
                "a task that the model does not have); `disconnected` (499)"
            ),
            _bullet(
                "`model`: the name that clients use for it; empty where the request was refused before it was known, "
                "and on routes that ask nothing of a model"
            ),
            _bullet(
                "`process`: `supervisor`, `http-0`, `engine-0`…; of `embert_hung_processes_total`: `http` or `engine`"
            ),
            _bullet(
                "`engine`: the number of the engine process, from 0; `device`: its device, as `--device` writes it"
            ),
            "\n## Buckets\n\n",
            *bounds,
            _bullet(f"those that measure time, by default: {usual}"),
        ]
    )


def _make_http_metrics() -> None:
    from embert.server.observability.http_metrics import HttpMetrics

    metrics = HttpMetrics(["/embed"], tasks=["/embed"], models=["m"], engines=1)
    metrics.observe(RequestRecord("/embed", b"", priority=PRIORITIES[0], model="m", status=200), 0.0)
    metrics.write()


def _make_engine_metrics() -> None:
    metrics = EngineMetrics(0)
    metrics.of("m")
    metrics.describe(dict.fromkeys(MODEL_FACTS, ""))
    metrics.last_success = 1.0  # a timestamp that was never set is not exported
    metrics.write()


def _bullet(text: str) -> str:
    """A list item in lines of at most 120 characters."""
    wrapped = textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
    return f"* {textwrap.indent(wrapped, '  ').strip()}\n"


def _families() -> list[Metric]:
    from prometheus_client.parser import text_string_to_metric_families

    parse: Any = text_string_to_metric_families
    return list(parse(exposition(_MEMORY).body.decode()))


def _row(family: Metric) -> str:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
    shown = ", ".join(f"`{label}`" for label in labels) or "–"  # noqa: RUF001 - the tables' dash
    return f"| `{name}` | {family.type} | {shown} | {family.documentation.removesuffix('.')} |\n"


def _bounds(family: Metric) -> str:
    bounds = {sample.labels["le"]: None for sample in family.samples if "le" in sample.labels}
    return ", ".join(f"{float(bound):g}" for bound in bounds if bound != "+Inf")
