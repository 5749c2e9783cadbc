"""Tables of figures with their builds in README.md, docs/benchmarks.md and docs/encoder.md, from benchmarks/results.

A row is of the newest run on that machine that has it, and names the build of that run. So a run of a few rows replaces
these rows only, if the file of the run before has its build in its name: short-texts-94e054b-nvidia-….json.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
H100 = "nvidia-h100-80gb-hbm3"
HOPPER = "nvidia-h?00*"  # an H100 or an H200
OLD = "c5bdc7b"  # the build that others alternate with in benchmarks.server.short_texts

SHAPES = {"minilm": "MiniLM-L6", "base": "BERT-base"}
MODELS = ("base", "minilm", "large")
DECODERS = {"qwen3-0.6b": "Qwen3-0.6B", "embeddinggemma": "EmbeddingGemma"}
WORKLOADS = (
    "passage", "query", "uniform512", "128x128", "32x512", "1x32", "1x128", "1x512", "8x32", "32x32", "16x4096",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """The record of one run of a benchmark."""

    path: Path
    date: str
    build: str  # seven digits of the commit
    figures: Any

    @property
    def link(self) -> str:
        """The build, with a link to the record from README."""
        return f"[{self.build}]({self.path.relative_to(ROOT)})"


def runs(name: str, device: str = H100) -> list[Run]:
    """Return the runs of `name` on `device`, the newest first: NAME-DEVICE.json and NAME-…-DEVICE.json.

    `device` may have wildcards.
    """
    records = []
    for path in (*RESULTS.glob(f"{name}-{device}.json"), *RESULTS.glob(f"{name}-*-{device}.json")):
        document = json.loads(path.read_text())
        records.append(Run(path, document["date"], document["commit"][:7], document["figures"]))
    return sorted(records, key=lambda run: run.date, reverse=True)


def newest(name: str, device: str = H100, **fields: object) -> tuple[Run, dict[str, Any]]:
    """Return the newest row whose fields have these values, and its run."""
    for run in runs(name, device):
        for row in run.figures["rows"] if isinstance(run.figures, dict) else run.figures:
            if all(row[key] == value for key, value in fields.items()):
                return run, row
    raise LookupError(f"no run of {name} on {device} has a row with {fields}")


def spaced(value: float, digits: int | None = None) -> str:
    """Format a whole number with spaces: 28 072, and 28 100 with three digits."""
    rounded = value if digits is None else float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}".replace(",", " ")


# --- README ---


def readme() -> Iterator[tuple[str, ...]]:
    yield "load", "embert", "best rival measured", "build", "command"
    run, row = newest("encoder-gpu", model="base", workload="passage")
    yield (
        "BERT-base, 256 passages, H100",
        f"{row['ms']['embert']:.1f} ms",
        f"packed torch, compiled: {row['ms']['packed compiled']:.1f} ms",
        run.link,
        "`python -m benchmarks.encoder.gpu --compile base:passage`",
    )
    load = "32 passages, JSON floats"
    run, row = newest("server-targets", HOPPER, server="embert", load=load)
    _, infinity = newest("server-targets", HOPPER, server="Infinity", load=load)
    yield (
        "the same over HTTP, 32 passages a request, H200",
        f"{spaced(row['median']['texts_per_s'], 3)} texts/s",
        f"Infinity 0.0.78: {spaced(infinity['median']['texts_per_s'], 3)} ‡",
        run.link,
        "`python -m benchmarks.server.targets --random-base`",
    )
    run, row = newest("encoder-gpu", model="qwen3-0.6b", workload="passage")
    yield (
        "Qwen3-0.6B's shape, 256 passages, H100",
        f"{row['ms']['embert']:.1f} ms",
        f"packed torch: {row['ms']['packed']:.1f} ms",
        run.link,
        "`python -m benchmarks.encoder.gpu --models qwen3-0.6b`",
    )
    yield (  # by hand, with TEI in the same call: docs/comparison.md
        "MiniLM-L6's shape over HTTP, one text of 16 tokens a request, 512 connections, `--workers 8`",
        "53 200 and 55 200 requests/s",
        "TEI 1.9.3 in the same call: 29 000 and 31 500 †",
        "[0c3e841](docs/comparison.md#tei)",
        "`python -m benchmarks.server.short_texts --rivals tei`",
    )
    run, row = newest("short-texts-defaults", HOPPER, shape="minilm")
    yield (
        "the same with the server's defaults, H200",
        f"{spaced(row['median']['requests_per_s'], 3)} requests/s",
        "TEI 1.9.3 on an H100: 29 000 and 31 500 †",
        run.link,
        "`python -m benchmarks.server.short_texts`",
    )
    cpu: dict[str, object] = {"workload": "query", "connections": 64, "rate": None}
    run, row = newest("server", "amd-epyc-2-cores", server="embert", **cpu)
    _, fastapi = newest("server", "amd-epyc-2-cores", server="plain FastAPI", **cpu)
    yield (
        "MiniLM-L6 over HTTP, 64 queries in flight, two EPYC cores",
        f"{spaced(row['median']['texts_per_s'], 3)} texts/s",
        f"plain FastAPI: {spaced(fastapi['median']['texts_per_s'], 3)}",
        run.link,
        "`python -m benchmarks.server.compare`",
    )


# --- docs/benchmarks.md: the encoder ---


def encoder_rows(models: Iterable[str] = MODELS) -> Iterator[tuple[Run, dict[str, Any]]]:
    """The rows of these models with every workload that was measured."""
    for model in models:
        for workload in WORKLOADS:
            try:
                yield newest("encoder-gpu", model=model, workload=workload)
            except LookupError:
                continue


def _rivals(ms: dict[str, float]) -> tuple[str, ...]:
    """Transformers, the better of padded and sorted, packed torch, and the same compiled."""
    transformers = min(ms["transformers"], ms.get("sorted by 32", ms["transformers"]))
    compiled = ms.get("packed compiled")
    return f"{transformers:.2f}", f"{ms['packed']:.3f}", "" if compiled is None else f"{compiled:.3f}"


def encoder() -> Iterator[tuple[str, ...]]:
    """Rows of all workloads in bursts."""
    yield (
        "model", "workload", "tokens", "embert ms", "tokens/s", "useful TFLOP/s", "% of peak", "transformers ms",
        "packed graph ms", "compiled ms", "ratio to the best", "build",
    )  # fmt: skip
    for run, row in encoder_rows():
        ms = row["ms"]
        yield (
            row["model"],
            row["workload"],
            f"{row['tokens']:,}",
            f"{ms['embert']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['useful_tflops']:.0f}",
            f"{100 * row['share_of_peak']:.0f}",
            *_rivals(ms),
            f"{row['ratio']:.2f}",
            run.build,
        )


def encoder_under_load() -> Iterator[tuple[str, ...]]:
    """Rows of workloads that were also timed without a pause."""
    yield (
        "model", "workload", "embert ms", "tokens/s", "useful TFLOP/s", "transformers ms", "packed graph ms",
        "compiled ms", "ratio to the best", "build",
    )  # fmt: skip
    for run, row in encoder_rows():
        if not (ms := row["sustained_ms"]):
            continue
        best = min(value for name, value in ms.items() if name != "embert")
        yield (
            row["model"],
            row["workload"],
            f"{ms['embert']:.3f}",
            f"{row['tokens'] / ms['embert'] * 1e3:,.0f}",
            f"{row['useful_tflops'] * row['ms']['embert'] / ms['embert']:.0f}",
            *_rivals(ms),
            f"{best / ms['embert']:.2f}",
            run.build,
        )


def decoders() -> Iterator[tuple[str, ...]]:
    yield (
        "model", "dtype", "workload", "tokens", "embert ms", "tokens/s", "useful TFLOP/s", "transformers ms",
        "packed graph ms", "ratio to the best", "build",
    )  # fmt: skip
    for run, row in encoder_rows(DECODERS):
        transformers, packed, _ = _rivals(row["ms"])
        yield (
            DECODERS[row["model"]],
            row["dtype"],
            row["workload"],
            f"{row['tokens']:,}",
            f"{row['ms']['embert']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['useful_tflops']:.0f}",
            transformers,
            packed,
            f"{row['ratio']:.2f}",
            run.build,
        )


# --- docs/benchmarks.md: the server ---


def targets() -> Iterator[tuple[str, ...]]:
    """The server compared with plain FastAPI and Infinity."""
    yield "load", "embert", "build", "plain FastAPI + transformers", "Infinity ‡"
    for what, load, unit, workload in (  # workload: of the encoder by itself
        ("BERT-base, 32 passages a request, JSON floats", "32 passages, JSON floats", "texts/s", "passages"),
        ("BERT-base, 64 texts of 50 tokens a request, base64", "64 texts of 50 tokens, base64", "tokens/s", "fifty"),
        ("BERT-base, one text of 32 tokens, idle", "one text of 32 tokens, idle", "p50 ms", ""),
        ("MiniLM-L6's shape, one text of 16 tokens a request", "one text of 16 tokens", "requests/s", ""),
        ("the same, 10 500 requests/s at random", "one text of 16 tokens, 70 % of 15,000/s", "p50, p99 ms", ""),
        ("BERT-base, 32 passages, 80 % of capacity, evenly", "32 passages, base64, 80 %, evenly", "p50, p99 ms", ""),
    ):
        run, row = newest("server-targets", HOPPER, server="embert", load=load)
        figure = _figure(row["median"], unit)
        if workload:
            per_s = unit.replace("/", "_per_")
            bare = run.figures["encoder"]["base"][per_s][workload]
            figure += f" ({100 * row['median'][per_s] / bare:.0f} % of the bare encoder)"
        rivals = []
        for server in ("plain FastAPI", "Infinity"):
            try:
                rivals.append(_figure(newest("server-targets", HOPPER, server=server, load=load)[1]["median"], unit))
            except LookupError:
                rivals.append("")
        yield what, figure, run.build, *rivals


def _figure(median: dict[str, Any], unit: str) -> str:
    p50, p99 = median["p50_ms"]["text"], median["p99_ms"]["text"]
    if unit == "p50 ms":
        return f"p50 {p50:.{2 if p50 < 10 else 1}f} ms"
    if unit == "p50, p99 ms":
        return f"p50 {p50:.2f}, p99 {p99:.1f} ms"
    value = median[unit.replace("/", "_per_")]
    return f"{value / 1e6:.2f} M {unit}" if value > 1e6 else f"{spaced(value, 3)} {unit}"


def pairs(shape: str, *kinds: str) -> Iterator[tuple[Run, dict[str, Any], dict[str, Any]]]:
    """Return for each load of a shape the newest run with both builds, the old build's row and the other's."""
    seen = set()
    matches: list[tuple[Run, dict[str, Any], dict[str, Any]]] = []
    for run in runs("short-texts", HOPPER):
        for old in run.figures:
            load = old["load"]
            key = (load["row"], load["connections"])
            if old["server"] != OLD or old["shape"] != shape or key in seen or (kinds and load["row"] not in kinds):
                continue
            new = next(
                row
                for row in run.figures
                if (row["shape"], row["load"]) == (shape, load) and row["server"].startswith(run.build)
            )
            seen.add(key)
            matches.append((run, old, new))
    order = ("one", "404", "passage", "passages", "mixed")

    def place(pair: tuple[Run, dict[str, Any], dict[str, Any]]) -> tuple[int, int]:
        load = pair[1]["load"]
        return order.index(load["row"]), load["connections"] if load["row"] == "passages" else -load["connections"]

    yield from sorted(matches, key=place)


def short_texts_by_default() -> Iterator[tuple[str, ...]]:
    """Return the rows of one build with the server's defaults."""
    yield "load", "connections", "embert", "p50, p99 ms", "CPU µs a request of all processes", "build"
    run = runs("short-texts-defaults", HOPPER)[0]
    for row in run.figures:
        load, median = row["load"], row["median"]
        unit = "texts/s" if load["texts"] > 1 or load["other_connections"] else "requests/s"
        yield (
            f"{SHAPES[row['shape']]}, {load['name']}",
            spaced(load["connections"]),
            f"{spaced(median[unit.replace('/', '_per_')], 3)} {unit}",
            f"{median['p50_ms']['text']:.2f}, {median['p99_ms']['text']:.2f}",
            spaced(sum(median["cpu_us"].values())),
            run.build,
        )


def short_texts() -> Iterator[tuple[str, ...]]:
    """Two builds in turns."""
    yield "load", "connections", OLD, "later build", "build", "ratio", "CPU µs a request of all processes"
    for shape, name in SHAPES.items():
        for run, *rows in pairs(shape):
            load, medians = rows[0]["load"], [row["median"] for row in rows]
            if load["connections"] == 1:
                unit = "p50, p99 ms"
                figures = [median["p50_ms"]["text"] for median in reversed(medians)]
                cells = [f"{median['p50_ms']['text']:.2f}, {median['p99_ms']['text']:.2f}" for median in medians]
            else:
                unit = "texts/s" if load["texts"] > 1 else "requests/s"
                figures = [median[unit.replace("/", "_per_")] for median in medians]
                refused = [" §" if median["failed"] else "" for median in medians]
                cells = [spaced(rate) + mark for rate, mark in zip(figures, refused, strict=True)]
            others = load["other_connections"]
            connections = f"{load['connections']} + {others}" if others else str(load["connections"])
            cpu = " → ".join(spaced(sum(median["cpu_us"].values())) for median in medians)
            ratio = f"{figures[1] / figures[0]:.2f}"
            yield f"{name}, {load['name']}, {unit}", connections, *cells, run.build, ratio, cpu


def cpu_by_process() -> Iterator[tuple[str, ...]]:
    """CPU time of a short request in each kind of process."""
    yield "model", "connections", "engine process, CPU µs a request", "HTTP processes", "build"
    for shape, name in SHAPES.items():
        for run, _, row in pairs(shape, "one"):
            cpu = row["median"]["cpu_us"]
            yield name, str(row["load"]["connections"]), f"{cpu['engine']:.0f}", f"{cpu['http']:.0f}", run.build


def builds() -> Iterator[tuple[str, ...]]:
    yield "result", "build", "date"
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        link = f"[{path.stem}](../benchmarks/results/{path.name})"
        yield link, record["commit"], record["date"][:10]


BENCHMARKS = (
    *(encoder, encoder_under_load, decoders),
    *(targets, short_texts_by_default, short_texts, cpu_by_process),
    builds,
)


# --- docs/encoder.md ---


def exactness() -> Iterator[tuple[str, ...]]:
    """Errors over those of transformers by length, of means and of last tokens."""
    records = sorted(
        runs("exactness-lengths", HOPPER), key=lambda run: ("encoders" not in run.path.name, run.path.name)
    )
    yield "model", "stored in", "computed in", *map(spaced, records[0].figures["lengths"]), "build"
    types = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
    for run in records:
        for row in run.figures["rows"]:
            ratios = (
                [ours / theirs for ours, theirs in zip(row[each]["embert"], row[each]["transformers"], strict=True)]
                for each in ("mean", "last-token")
            )
            cells = (f"{mean:.2f}, {last:.2f}" for mean, last in zip(*ratios, strict=True))
            yield row["model"], types[row["stored"]], types[row["dtype"]], *cells, run.build


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return a table's lines; text is aligned to the left, figures to the right."""
    header, *body = rows
    text = {"load", "model", "dtype", "stored in", "computed in", "workload", "build", "command", "result", "date"}
    rule = "|" + "|".join("---" if cell in text else "--:" for cell in header) + "|"
    lines = ("| " + " | ".join(cells) + " |" for cells in (header, *body))
    first, *rest = (re.sub(r"(?<=\|)  (?=\|)", " ", line) for line in lines)
    return [first, rule, *rest]


def replaced(text: str, *tables: Callable[[], Iterator[tuple[str, ...]]]) -> str:
    """Replace tables in a page's text; ValueError if a table's header is not there."""
    for rows in tables:
        lines = _table(rows())
        before, header, after = text.partition(f"\n{lines[0]}\n")
        if not header:
            raise ValueError(f"the page has no table that begins with {lines[0]}")
        rest = itertools.dropwhile(lambda line: line.startswith("|"), after.split("\n"))
        text = "\n".join((before, *lines, *rest))
    return text
