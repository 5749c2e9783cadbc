"""The server's own metrics of the test, printed and added to locust's report."""

from __future__ import annotations

import argparse
import csv
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lib.scrape import Samples

__all__ = ["server_figures", "write"]


def server_figures(growth: Samples) -> dict[str, str]:
    """Return figures by name from the growth of the server's metrics during the test."""
    found = {}
    for name, label in (("requests", "status"), ("rejected", "reason"), ("cancelled_texts", "stage")):
        for value, count in sorted(growth.by(f"embert_{name}_total", label).items()):
            if count:
                found[f"{name} {value}"] = f"{count:,.0f}"
    for name in ("texts", "tokens", "truncated_texts", "batches", "padding_tokens", "engine_restarts"):
        found[name] = f"{growth.total(f'embert_{name}_total'):,.0f}"
    found["tokens a batch, mean"] = f"{growth.mean('embert_batch_tokens'):,.1f}"
    for name in ("tokenize", "queue", "inference", "response_encode"):
        for share in (0.5, 0.99):
            seconds = growth.quantile(f"embert_{name}_duration_seconds", share)
            found[f"{name}, p{share * 100:.0f}"] = f"{seconds * 1e3:,.2f} ms"
    return found


def write(options: argparse.Namespace, server: Mapping[str, str], violations: Sequence[str]) -> None:
    """Print the figures and violations, and add them to the CSV and HTML files of locust."""
    verdict = violations or ["all thresholds were kept"]
    print("\n".join([f"{name:32} {value:>16}" for name, value in server.items()]))
    print("\n".join(f"THRESHOLD {sentence}" for sentence in verdict), flush=True)
    if options.csv_prefix:
        with Path(f"{options.csv_prefix}_server.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "value"])
            writer.writerows([*server.items(), *(("threshold", sentence) for sentence in verdict)])
    if options.html_file and Path(options.html_file).exists():
        page = Path(options.html_file)
        page.write_text(page.read_text().replace("</body>", _section(server, verdict) + "</body>"))


def _section(server: Mapping[str, str], verdict: Sequence[str]) -> str:
    rows = "".join(f"<tr><td>{html.escape(n)}</td><td>{html.escape(v)}</td></tr>" for n, v in server.items())
    lines = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in verdict)
    thresholds, table = f"<h2>Thresholds</h2><ul>{lines}</ul>", f"<h2>Server</h2><table>{rows}</table>"
    return f'<section style="padding: 2em">{thresholds}{table}</section>'
