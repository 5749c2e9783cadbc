"""The chart of benchmarks.server.compare's JSON: texts/s of the closed loops and p99 of the open loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["draw"]

WIDTH = 0.42  # of a bar; groups are 1 apart


def draw(results: Path) -> Path:
    """Write the chart as a PNG beside the results and return its path."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    document = json.loads(results.read_text())
    rows: list[dict[str, Any]] = document["figures"]["rows"]
    servers = list(dict.fromkeys(row["server"] for row in rows))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4), layout="constrained", gridspec_kw={"width_ratios": (7, 4)}
    )
    for axes, chosen, field, title in (
        (left, [r for r in rows if r["rate"] is None], "texts_per_s", "closed loops: texts a second"),
        (right, [r for r in rows if r["rate"] is not None], "p99_ms", "open loops: p99 in ms, from the moment due"),
    ):
        places = list(dict.fromkeys(_place(row) for row in chosen))
        for number, server in enumerate(servers):
            figures = {places.index(_place(r)): _first(r["median"][field]) for r in chosen if r["server"] == server}
            offset = (number - (len(servers) - 1) / 2) * WIDTH
            bars = axes.bar([at + offset for at in figures], list(figures.values()), WIDTH * 0.95, label=server)
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=9, padding=2)
            for at in set(range(len(places))) - set(figures):  # a rate above its capacity is not measured
                axes.text(
                    at + offset,
                    0,
                    " over its capacity",
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=9,
                    color="gray",
                )
        axes.set_xticks(range(len(places)), places, fontsize=9)
        axes.set_xlim(-0.6, len(places) - 0.4)
        axes.tick_params(bottom=False)
        axes.set_yticks([])  # bars start at 0 and carry their figures
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.set_title(title, loc="left", fontsize=11)
    left.legend(frameon=False)
    machine = document["machine"]
    figure.suptitle(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {document['date'][:10]}", fontsize=9
    )
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=150)
    return path


def _first(figure: float | dict[str, float]) -> float:
    """Return the figure; of several kinds of request, that of the first: the queries."""
    return next(iter(figure.values())) if isinstance(figure, dict) else figure


def _place(row: dict[str, Any]) -> str:
    if row["rate"] is None:
        return f"{row['workload']}\n{row['connections']} in flight"
    return f"{row['workload']}\n{row['rate']:,.0f} requests/s"
