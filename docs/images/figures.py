"""Draws README's picture from benchmarks/results: figures-light.svg and figures-dark.svg beside this file.

    python docs/images/figures.py

Bars start at 0, longer is better, and each panel has its own scale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["SCHEMES", "svg"]

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"

WIDTH, MARGIN, GUTTER = 800, 8, 48
COLUMN = (WIDTH - 2 * MARGIN - GUTTER) // 2
LABEL = 122  # pixels left of the bars
VALUE = 58  # pixels right of the longest bar
BAR, PITCH = 18, 28  # a bar's height, and from one bar to the next
HEAD, BELOW = 52, 22  # above a panel's first bar, and below its last

SCHEMES = {
    "light": {"ink": "#1c2024", "faint": "#59636e", "ours": "#0b6e69", "theirs": "#b9c1c8", "line": "#dfe2e4"},
    "dark": {"ink": "#e8eaec", "faint": "#9aa5af", "ours": "#5cc9c1", "theirs": "#4a545e", "line": "#343a40"},
}
FASTAPI = "plain FastAPI"
NOTES = (
    "Longer is better. * through torch.compile. Plain FastAPI: a service around sentence-transformers.",
    "Over HTTP on the H100, embert has 96 requests in flight and the others 16; on the Xeon all have the same.",
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One comparison; the first bar is embert's."""

    machine: str
    what: str
    unit: str
    bars: dict[str, float]


def _figures(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return figures


def panels() -> list[Panel]:
    """Return the panels, every figure read from the JSON of its run."""
    encoder = next(
        row
        for row in _figures("encoder-gpu-nvidia-h100-80gb-hbm3")["rows"]
        if (row["model"], row["workload"]) == ("base", "passage")
    )
    tokens, ms = encoder["tokens"], encoder["ms"]
    # Infinity ran beside an earlier build.
    gpu = _figures("server-targets-277fc48-nvidia-h100-80gb-hbm3")["rows"]
    gpu += _figures("server-targets-nvidia-h100-80gb-hbm3")["rows"]
    passages = {row["server"]: row["median"]["texts_per_s"] for row in gpu if row["load"] == "32 passages, JSON floats"}
    rows = _figures("server-intel-xeon-2-cores")["rows"]

    def cpu(workload: str, connections: int) -> dict[str, float]:
        figures = {
            row["server"]: row["median"]["texts_per_s"]
            for row in rows
            if (row["workload"], row["connections"], row["rate"]) == (workload, connections, None)
        }
        return {"embert": figures["embert"], FASTAPI: figures["plain FastAPI"]}

    xeon = "2 cores of a Xeon, float32"
    return [
        Panel(
            "NVIDIA H100, FP16",
            "encoder: BERT-base, 256 passages",
            "M tokens/s",
            {
                "embert": tokens / ms["embert"] / 1e3,
                "packed torch *": tokens / ms["packed compiled"] / 1e3,
                "transformers *": tokens / ms["transformers compiled"] / 1e3,
            },
        ),
        Panel(
            "NVIDIA H100, 16 bits",
            "over HTTP: BERT-base, 32 passages a request",
            "texts/s",
            {"embert": passages["embert"], "Infinity 0.0.78": passages["Infinity"], FASTAPI: passages["plain FastAPI"]},
        ),
        Panel(xeon, "over HTTP: MiniLM-L6, 64 queries in flight", "texts/s", cpu("query", 64)),
        Panel(xeon, "over HTTP: MiniLM-L6, 32 passages at a time", "texts/s", cpu("passages", 1)),
    ]


def _number(value: float) -> str:
    """Format with at most three digits: 3.38, 85, 652, 28 100."""
    if value < 10:
        return f"{value:.2f}"
    return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")


def _panel(panel: Panel, left: int, top: int, colours: dict[str, str]) -> Iterator[str]:
    scale = (COLUMN - LABEL - VALUE) / max(panel.bars.values())
    yield f'<text x="{left}" y="{top + 14}" font-weight="600" fill="{colours["ink"]}">{escape(panel.machine)}</text>'
    yield (
        f'<text x="{left + COLUMN}" y="{top + 14}" font-size="12.5" text-anchor="end" fill="{colours["faint"]}">'
        f"{panel.unit}</text>"
    )
    yield f'<text x="{left}" y="{top + 34}" font-size="13" fill="{colours["faint"]}">{escape(panel.what)}</text>'
    for number, (name, value) in enumerate(panel.bars.items()):
        y, ours = top + HEAD + number * PITCH, name == "embert"
        length = max(2.0, value * scale)
        weight = ' font-weight="600"' if ours else ""
        yield (
            f'<text x="{left}" y="{y + 14}" font-size="13.5"{weight} '
            f'fill="{colours["ink" if ours else "faint"]}">{escape(name)}</text>'
        )
        yield (
            f'<rect x="{left + LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" '
            f'fill="{colours["ours" if ours else "theirs"]}"/>'
        )
        yield (
            f'<text x="{left + LABEL + length + 7:.1f}" y="{y + 14}" font-size="13.5"{weight} '
            f'fill="{colours["ink"]}">{_number(value)}</text>'
        )


def svg(scheme: str) -> str:
    """Return the picture in one of SCHEMES, on a transparent background."""
    colours = SCHEMES[scheme]
    shown = panels()
    body: list[str] = []
    top = 6
    for row in (shown[:2], shown[2:]):
        for column, panel in enumerate(row):
            body += _panel(panel, MARGIN + column * (COLUMN + GUTTER), top, colours)
        top += HEAD + PITCH * max(len(panel.bars) for panel in row) + BELOW
    y = top - BELOW + 8
    body.append(f'<path d="M{MARGIN} {y}H{WIDTH - MARGIN}" stroke="{colours["line"]}"/>')
    for note in NOTES:
        y += 20
        body.append(f'<text x="{MARGIN}" y="{y}" font-size="12" fill="{colours["faint"]}">{note}</text>')
    said = "; ".join(
        f"{panel.machine}, {panel.what}, {panel.unit}: "
        + ", ".join(f"{name} {_number(value)}" for name, value in panel.bars.items())
        for panel in shown
    )
    lines = "\n".join(f"  {line}" for line in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" width="{WIDTH}" height="{y + 10}" '
        'role="img" font-family="system-ui, -apple-system, \'Segoe UI\', Helvetica, Arial, sans-serif" '
        f'font-size="15">\n  <title>{escape(said)}</title>\n{lines}\n</svg>\n'
    )


if __name__ == "__main__":
    for name in SCHEMES:
        (HERE / f"figures-{name}.svg").write_text(svg(name))
