"""README's picture from benchmarks/results, and its alt.

Bars start at 0, longer is better, and each panel has its own scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from scripts.generate.result_tables import newest, spaced

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
    "Over HTTP on the H100, embert has 96 requests in flight and the others 16; on the EPYC all have the same.",
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One comparison; the first bar is embert's."""

    machine: str
    what: str
    unit: str
    bars: dict[str, float]


def panels() -> list[Panel]:
    """Return the panels, every figure read from the JSON of its run; rivals may be of an earlier run."""
    encoder = newest("encoder-gpu", model="base", workload="passage")[1]
    tokens, ms = encoder["tokens"], encoder["ms"]

    def gpu(server: str) -> float:
        row = newest("server-targets", load="32 passages, JSON floats", server=server)[1]
        return float(row["median"]["texts_per_s"])

    def cpu(workload: str, connections: int) -> dict[str, float]:
        fields: dict[str, object] = {"workload": workload, "connections": connections, "rate": None}
        return {
            server: newest("server", "amd-epyc-2-cores", server=server, **fields)[1]["median"]["texts_per_s"]
            for server in ("embert", FASTAPI)
        }

    epyc = "2 cores of an EPYC, float32"
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
            {"embert": gpu("embert"), "Infinity 0.0.78": gpu("Infinity"), FASTAPI: gpu(FASTAPI)},
        ),
        Panel(epyc, "over HTTP: MiniLM-L6, 64 queries in flight", "texts/s", cpu("query", 64)),
        Panel(epyc, "over HTTP: MiniLM-L6, 32 passages at a time", "texts/s", cpu("passages", 1)),
    ]


def _number(value: float) -> str:
    """Format with at most three digits: 3.38, 85, 652, 28 100."""
    if value < 10:
        return f"{value:.2f}"
    return spaced(value, 3)


def _panel(panel: Panel, left: int, top: int, colors: dict[str, str]) -> Iterator[str]:
    scale = (COLUMN - LABEL - VALUE) / max(panel.bars.values())
    yield f'<text x="{left}" y="{top + 14}" font-weight="600" fill="{colors["ink"]}">{escape(panel.machine)}</text>'
    yield (
        f'<text x="{left + COLUMN}" y="{top + 14}" font-size="12.5" text-anchor="end" fill="{colors["faint"]}">'
        f"{panel.unit}</text>"
    )
    yield f'<text x="{left}" y="{top + 34}" font-size="13" fill="{colors["faint"]}">{escape(panel.what)}</text>'
    for number, (name, value) in enumerate(panel.bars.items()):
        y, ours = top + HEAD + number * PITCH, name == "embert"
        length = max(2.0, value * scale)
        weight = ' font-weight="600"' if ours else ""
        yield (
            f'<text x="{left}" y="{y + 14}" font-size="13.5"{weight} '
            f'fill="{colors["ink" if ours else "faint"]}">{escape(name)}</text>'
        )
        yield (
            f'<rect x="{left + LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" '
            f'fill="{colors["ours" if ours else "theirs"]}"/>'
        )
        yield (
            f'<text x="{left + LABEL + length + 7:.1f}" y="{y + 14}" font-size="13.5"{weight} '
            f'fill="{colors["ink"]}">{_number(value)}</text>'
        )


def svg(scheme: str) -> str:
    """Return the picture in one of SCHEMES, on a transparent background."""
    colors = SCHEMES[scheme]
    shown = panels()
    body: list[str] = []
    top = 6
    for row in (shown[:2], shown[2:]):
        for column, panel in enumerate(row):
            body += _panel(panel, MARGIN + column * (COLUMN + GUTTER), top, colors)
        top += HEAD + PITCH * max(len(panel.bars) for panel in row) + BELOW
    y = top - BELOW + 8
    body.append(f'<path d="M{MARGIN} {y}H{WIDTH - MARGIN}" stroke="{colors["line"]}"/>')
    for note in NOTES:
        y += 20
        body.append(f'<text x="{MARGIN}" y="{y}" font-size="12" fill="{colors["faint"]}">{note}</text>')
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


def alt() -> str:
    """Return the picture in words: how many times the rivals' figures embert's are."""
    times = []
    for panel in panels():
        embert, rival, *_ = panel.bars.values()
        times.append(f"{embert / rival:.2g}")
    packed, infinity, queries, passages = times
    return (
        f"{packed} times packed, compiled torch on an H100; {infinity} times Infinity over HTTP; "
        f"{queries} and {passages} times plain FastAPI on two CPU cores"
    )
