"""Thresholds and the server's own metrics of the test, printed and added to locust's report."""

from __future__ import annotations

import argparse
import csv
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.lib.scrape import Samples
from loadtests.verdict import Check, Verdict, sentence

RESULTS = {True: "kept", False: "EXCEEDED", None: "not checked"}
COLUMNS = ("result", "of", "what", "limit", "measured")


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
    for name in ("tokenize", "queue", "inference", "response_encode", "request_other"):
        for share in (0.5, 0.99):
            seconds = growth.quantile(f"embert_{name}_duration_seconds", share)
            found[f"{name}, p{share * 100:.0f}"] = f"{seconds * 1e3:,.2f} ms"
    return found


def write(options: argparse.Namespace, server: Mapping[str, str], made: Sequence[Check], of: Verdict) -> None:
    """Print figures, checks and verdict, and add them to the CSV and HTML files of locust."""
    print("\n".join([f"{name:32} {value:>16}" for name, value in server.items()]))
    print("\n".join(f"{RESULTS[c.kept]:11} {c.name}: {c.what} {c.measured}, limit {c.limit}" for c in made))
    print(f"THRESHOLDS {sentence(of)} (exit status {int(of)})", flush=True)
    if options.csv_prefix:
        _table(f"{options.csv_prefix}_server.csv", ("name", "value"), server.items())
        rows = [(RESULTS[c.kept], c.name, c.what, c.limit, c.measured) for c in made]
        _table(f"{options.csv_prefix}_thresholds.csv", COLUMNS, rows)
    if options.html_file and Path(options.html_file).exists():
        page = Path(options.html_file)
        top, below = _thresholds(made, of), _section("Server", _rows(("name", "value"), server.items()))
        page.write_text(_around_body(page.read_text(), top, below))


def _table(path: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _around_body(page: str, top: str, below: str) -> str:
    """Add to the beginning and end of the page's body; its scripts, which come before, have such tags in strings."""
    head, start, rest = page.rpartition("<body>")
    body, end, tail = rest.rpartition("</body>")
    return head + start + top + body + below + end + tail


def _thresholds(made: Sequence[Check], of: Verdict) -> str:
    """The verdict, above all that locust shows."""
    rows = [(RESULTS[c.kept], c.name, c.what, c.limit, c.measured) for c in made]
    color = {Verdict.KEPT: "#1a7f37", Verdict.EXCEEDED: "#cf222e", Verdict.INCONCLUSIVE: "#9a6700"}[of]
    words = f'<p style="color: {color}; font-weight: bold">{html.escape(sentence(of))}</p>'
    return _section("Thresholds", words + _rows(COLUMNS, rows))


def _section(title: str, content: str) -> str:
    style = "padding: 2em; background: white; color: black; font-family: sans-serif"
    return f'<section style="{style}"><h2>{title}</h2>{content}</section>'


def _rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th style="text-align: left">{name}</th>' for name in columns)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f'<table cellpadding="4"><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'
