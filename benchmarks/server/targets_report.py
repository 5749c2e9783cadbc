"""What benchmarks.server.targets reports: figures beside their targets, and every load as a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.lib import record
from benchmarks.lib.scrape import Samples
from benchmarks.server.measurement import Round

__all__ = ["Figure", "Row", "batch_figures", "print_figures", "print_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """One load against one server."""

    load: str
    server: str
    connections: int
    rate: float | None  # requests/s that were due; None for a closed loop
    median: Round
    batches: dict[str, float] = field(default_factory=dict)  # embert's own metrics; see batch_figures


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure beside its target."""

    what: str
    value: float
    unit: str
    target: str
    met: bool
    detail: str


def batch_figures(growth: Samples) -> dict[str, float]:
    """Return quantiles in ms of batches and a request's stages, and a batch's mean size, from embert's /metrics."""
    stages = {"batch": "", "queue": "queue_", "tokenize": "tokenize_", "response_encode": "encode_"}
    times = {
        f"{prefix}p{percent}_ms": growth.quantile(f"embert_{stage}_duration_seconds", percent / 100) * 1e3
        for stage, prefix in stages.items()
        for percent in (50, 99)
    }
    return {**times, "tokens": growth.mean("embert_batch_tokens"), "texts": growth.mean("embert_batch_texts")}


def print_figures(figures: Sequence[Figure]) -> None:
    """Print the figures beside their targets."""
    rows = [[f.what, f"{f.value:,.2f} {f.unit}", f.target, "ok" if f.met else "MISSED", f.detail] for f in figures]
    record.print_table(["target", "measured", "wanted", "", "detail"], rows)


def print_rows(rows: Sequence[Row]) -> None:
    """Print every load."""
    head = ["load", "server", "req/s", "texts/s", "tokens/s", "p50 ms", "p99 ms", "failed", "cores", "client", "limit"]
    record.print_table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    m = row.median
    return [
        row.load if row.rate is None else f"{row.load} = {row.rate:,.0f}/s",
        row.server,
        f"{m.requests_per_s:,.1f}",
        f"{m.texts_per_s:,.0f}",
        f"{m.tokens_per_s:,.0f}",
        f"{m.p50_ms['text']:,.2f}",
        f"{m.p99_ms['text']:,.2f}",
        str(m.failed),
        ", ".join(f"{kind} {cores:.1f}" for kind, cores in m.cores.items()),
        f"{m.client_cores:.1f}",
        m.limit,
    ]
