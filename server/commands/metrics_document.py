"""docs/metrics.md, written from the metrics themselves; `scripts/document` keeps it current, a test sees that it is."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embert import __version__
from embert.server.config import LATENCY_BUCKETS_S
from embert.server.observability.metrics import (
    CANCEL_STAGES,
    REJECT_REASONS,
    ApiMetrics,
    EngineMetrics,
    GpuMetrics,
    SupervisorMetrics,
    exposition,
    use_folder,
)

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["main"]

_HEAD = """\
# Metrics

<!-- Written by scripts/document from server/observability/metrics.py; change it there. -->

`GET /metrics`, in Prometheus' text format, and on `--metrics-port` too when that is set. Any HTTP process answers for
all of them, for the engine processes and for the supervisor. Every metric is there from the moment the engine is
ready, at zero. No label ever holds a text, a user or a request id; units are seconds, tokens, texts, bytes and watts.
Histograms have `_bucket`, `_sum` and `_count` as usual; the buckets of those that measure time are the ones of
`--latency-buckets`.

What to look at, and what to do then, is in [operations.md](operations.md); `docker/grafana` and `docker/prometheus`
have it as a dashboard and as alerts.
"""

_TABLE = """
| name | type | labels | meaning |
|---|---|---|---|
"""


def document() -> str:
    """The whole page. Needs a process of its own: metrics are written where prometheus_client first found them."""
    with tempfile.TemporaryDirectory() as folder:
        use_folder(Path(folder), "document")
        from embert.server.api.routes import METRIC_ROUTES

        facts = dict.fromkeys(("model", "dtype", "backend", "device"), "")
        makers: dict[str, Callable[[], object]] = {
            "Requests and texts (HTTP processes)": lambda: ApiMetrics(METRIC_ROUTES, LATENCY_BUCKETS_S),
            "Queue, batches and model (engine processes)": lambda: EngineMetrics(
                0, LATENCY_BUCKETS_S, facts
            ).last_success.set(1),  # a time that was never set is not written
            "GPU (engine processes on one, where the driver's NVML tells it)": lambda: GpuMetrics(
                "cuda:0", list(GpuMetrics.NAMES)
            ),
            "Server (the supervisor)": lambda: SupervisorMetrics.create([0], __version__),
        }
        known: set[str] = set()
        sections: list[str] = []
        buckets: dict[str, str] = {}
        for title, make in makers.items():
            make()
            new = [family for family in _families() if family.name not in known]
            known |= {family.name for family in new}
            sections.append(f"\n## {title}\n{_TABLE}" + "".join(map(_row, sorted(new, key=lambda each: each.name))))
            buckets |= {family.name: _bounds(family) for family in new if family.type == "histogram"}
    usual = ", ".join(f"{bound:g}" for bound in LATENCY_BUCKETS_S)
    values = {
        "`route`": METRIC_ROUTES,
        "`reason` (`queue_full` is answered with 429, `too_large` with 413, the others with 503)": REJECT_REASONS,
        "`stage`": CANCEL_STAGES,
    }
    labels = [f"* {label}: {', '.join(f'`{value}`' for value in each)}\n" for label, each in values.items()]
    bounds = [f"* `{name}`: {each}\n" for name, each in sorted(buckets.items()) if each != usual]
    return "".join(
        [
            _HEAD,
            *sections,
            "\n## Values of labels\n\nWhat clients send makes no labels.\n\n",
            *labels,
            "* `status`: the HTTP status of the answer, or 499\n",
            "* `engine`: the number of the engine process, from 0; `device`: its device, as `--device` writes it\n",
            "\n## Buckets\n\n",
            *bounds,
            f"* those that measure time, by default: {usual}\n",
        ]
    )


def _families() -> list[Metric]:
    from prometheus_client.parser import text_string_to_metric_families

    parse: Any = text_string_to_metric_families
    return list(parse(exposition()[0].decode()))


def _row(family: Metric) -> str:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
    shown = ", ".join(f"`{label}`" for label in labels) or "–"  # noqa: RUF001 - the tables' dash
    return f"| `{name}` | {family.type} | {shown} | {family.documentation.removesuffix('.')} |\n"


def _bounds(family: Metric) -> str:
    found = {sample.labels["le"]: None for sample in family.samples if "le" in sample.labels}
    return ", ".join(f"{float(bound):g}" for bound in found if bound != "+Inf")


def main() -> None:
    """`python -m embert.server.commands.metrics_document` writes the page to standard output."""
    sys.stdout.write(document())


if __name__ == "__main__":
    main()
