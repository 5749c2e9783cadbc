"""The picture of a server benchmark's JSON: requests/s of the closed loops, and p99 of the open loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(results: Path) -> Path:
    """Draw the results as a PNG beside them and return its path."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    document = json.loads(results.read_text())
    rows: list[dict[str, Any]] = document["figures"]["rows"]
    servers = list(dict.fromkeys(row["server"] for row in rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axes, chosen, field, title in (
        (left, [r for r in rows if r["rate"] is None], "texts_per_s", "closed loop: texts/s"),
        (right, [r for r in rows if r["rate"] is not None], "p99_ms", "open loop: p99 ms from the moment due"),
    ):
        places = list(dict.fromkeys(_place(row) for row in chosen))
        for number, server in enumerate(servers):
            own = [row for row in chosen if row["server"] == server]
            x = [places.index(_place(row)) + (number - (len(servers) - 1) / 2) * 0.4 for row in own]
            bars = axes.bar(x, [_first(row["median"][field]) for row in own], 0.38, label=server)
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=7)
        axes.set_xticks(range(len(places)), places, fontsize=8)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.legend()
    machine = document["machine"]
    figure.suptitle(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {document['date'][:10]}", fontsize=9
    )
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=150)
    return path


def _first(figure: float | dict[str, float]) -> float:
    """Return the figure, or that of the first kind of request: the queries, where there are several."""
    return next(iter(figure.values())) if isinstance(figure, dict) else figure


def _place(row: dict[str, Any]) -> str:
    if row["rate"] is None:
        return f"{row['workload']}\n{row['connections']} in flight"
    return f"{row['workload']}\n{row['rate']:,.0f} requests/s"
