"""The chart of benchmarks.encoder.cpu's JSON: tokens a second, embert beside sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.rivals.cpu_encoders import FROM_TEXTS

__all__ = ["draw"]


def draw(results: Path, path: Path) -> None:
    """Write the chart of `results` as a PNG to `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figures = json.loads(results.read_text())["figures"]
    dtypes = sorted({row["dtype"] for row in figures["rows"]}, reverse=True)
    figure, axes = plt.subplots(1, len(dtypes), figsize=(6.5 * len(dtypes), 4), squeeze=False, sharey=True)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        rows = [row for row in figures["rows"] if row["dtype"] == dtype]
        at = np.arange(len(rows))
        for i, encoder in enumerate(FROM_TEXTS):
            speed = [row["tokens"] / row["ms"][encoder] for row in rows]
            axis.bar(at + (i - 0.5) * 0.4, speed, 0.4, label=encoder)
        axis.set_xticks(at, [row["workload"] for row in rows], rotation=30)
        axis.set_title(f"{figures['model']}, {dtype}", fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("thousand tokens a second, from texts")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
