"""What the server itself costs: CPU a request, latency it adds when idle, time until ready, memory; with targets.

    python -m benchmarks.server.api_cost [--rounds 3] [--window 3]

CPU is that of the HTTP process, user + system, while an encoder that answers at once (benchmarks.lib.stub_encoders) stands
behind it. The latency is that of one client, one short text after the other, with the real model, against the bare
encoder call on the same token ids. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.lib import record
from benchmarks.lib.load_generator import Load
from benchmarks.lib.load_worker import Plan, Request, post
from benchmarks.lib.running_server import Serving, embert
from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, Text, texts
from benchmarks.server.latency_breakdown import parts_ms
from embert.engine import Engine, load_model, pack

STAND_IN = ("--encoder", "benchmarks.lib.stub_encoders:StubEncoder", "--workers", "1")
STARTS = 3
SEQUENTIAL_TEXTS = 200


@dataclass(frozen=True, slots=True)
class Line:
    """One measured figure and what it was to be at most; None where there is no target."""

    what: str
    value: float
    unit: str
    target: float | None = None
    detail: str = ""

    @property
    def verdict(self) -> str:
        """Return ok or MISSED, and nothing where there is no target."""
        if self.target is None:
            return ""
        return "ok" if self.value <= self.target else "MISSED"


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.server.api_cost", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a local folder or a hub id; default: the packaged model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=3.0, help="seconds that one round measures")
    options = parser.parse_args(argv)
    model = load_model(options.model)
    tokenizer = model.transformer_folder / "tokenizer.json"
    drawn = texts(QUERY_TOKENS, 2048, tokenizer)
    with Load() as load:
        lines = _cpu(load, drawn, tokenizer, model.model_id, options)
        lines += _started(load, drawn, options.model, options.rounds)
    rows = [_cells(line) for line in lines]
    record.print_table(["what", "measured", "target", "verdict", "detail"], rows)
    path = record.write("api_cost", [{**asdict(line), "verdict": line.verdict} for line in lines])
    print(f"\nwritten: {path}")


def _cells(line: Line) -> list[str]:
    target = "" if line.target is None else f"≤ {line.target:g} {line.unit}"
    return [line.what, f"{line.value:,.2f} {line.unit}", target, line.verdict, line.detail]


# -- CPU a request, with the stand-in ----------------------------------------------------------------------------------


def _cpu(load: Load, drawn: Sequence[Text], tokenizer: Path, model_id: str, options: argparse.Namespace) -> list[Line]:
    cases = {
        (size, form): _requests(drawn, size, form, model_id)
        for size in (1, 32)
        for form in ("JSON floats", "base64", "raw")
    }
    targets = {(1, "JSON floats"): 110.0, (32, "JSON floats"): 550.0}
    measured: dict[tuple[int, str], list[tuple[float, float, float, float]]] = {case: [] for case in cases}
    passages = _requests(texts(PASSAGE_TOKENS, 64 * 32, tokenizer, seed=1), 32, "base64", model_id)
    with embert(*STAND_IN, model=options.model) as serving:
        parts = [parts_ms(serving.port, passages) for _ in range(options.rounds)]
        for number in range(options.rounds):
            for case, requests in cases.items():
                measured[case].append(_round(load, serving, requests, options.window))
                print(
                    f"{case[0]} texts, {case[1]}, round {number + 1} of {options.rounds}", file=sys.stderr, flush=True
                )
    lines = []
    for (size, form), figures in measured.items():
        api_us, engine_us, rate, cores = (statistics.median(column) for column in zip(*figures, strict=True))
        detail = f"{rate:,.0f} requests/s, engine process {engine_us:,.0f} µs, client {cores:.2f} cores"
        what = f"CPU of the HTTP process, {size} text{'s'[: size > 1]}, {form}"
        lines.append(Line(what, api_us, "µs", targets.get((size, form)), detail))
    of_each = {name: statistics.median(each[name] for each in parts) for name in parts[0]}
    detail = ", ".join(f"{name} {ms:.2f}" for name, ms in of_each.items())
    lines.append(Line("latency without the encoder, 32 passages, base64, p50", of_each["total"], "ms", detail=detail))
    return lines


def _requests(drawn: Sequence[Text], size: int, form: str, model_id: str) -> tuple[Request, ...]:
    groups = [drawn[i : i + size] for i in range(0, len(drawn), size)]
    requests = []
    for group in groups:
        inputs = [text.text for text in group]
        tokens = sum(text.tokens for text in group)
        if form == "base64":
            body = {"input": inputs, "model": model_id, "encoding_format": "base64"}
            requests.append(post("/v1/embeddings", body, kind=form, texts=size, tokens=tokens))
        else:
            accept = "application/octet-stream" if form == "raw" else "*/*"
            requests.append(post("/embed", {"inputs": inputs}, kind=form, texts=size, tokens=tokens, accept=accept))
    return tuple(requests)


def _round(
    load: Load, serving: Serving, requests: tuple[Request, ...], window_s: float
) -> tuple[float, float, float, float]:
    """Return the HTTP process's and the engine process's µs a request, requests/s, and the client's cores."""
    spent: list[dict[str, float]] = []
    plan = Plan(serving.port, requests, connections=64 if requests[0].texts == 1 else 32, window_s=window_s)
    answers = load.run(plan, at_window=lambda: spent.append(serving.cpu_s()))
    inside = (answers.answered >= answers.opened) & (answers.answered < answers.opened + window_s)
    if (failed := int((answers.status != 200).sum())) > 0:
        raise SystemExit(
            f"{failed} of {len(answers.status)} requests failed, with status {set(answers.status.tolist())}"
        )
    count = int(inside.sum())
    api, engine = ((spent[1][kind] - spent[0][kind]) / count * 1e6 for kind in ("api", "engine"))
    return api, engine, count / window_s, answers.client_cores


# -- the real model: ready, idle, memory -------------------------------------------------------------------------------


def _started(load: Load, drawn: Sequence[Text], model: str | None, rounds: int) -> list[Line]:
    ready = []
    for _ in range(STARTS):
        with embert(model=model) as serving:
            ready.append(serving.ready_s)
    chosen = drawn[:SEQUENTIAL_TEXTS]
    requests = tuple(
        post("/embed", {"inputs": text.text}, kind="query", texts=1, tokens=text.tokens) for text in chosen
    )
    over_http, bare = [], []
    with embert(model=model) as serving, Engine.load(model) as engine:
        memory = serving.rss_mb()
        for _ in range(rounds):
            bare.append(_bare_ms(engine, chosen))
            over_http.append(_sequential_ms(load, serving, requests))
        after = serving.rss_mb()
    added = statistics.median(http - call for http, call in zip(over_http, bare, strict=True))
    detail = f"p50 {statistics.median(over_http):.2f} ms over HTTP, {statistics.median(bare):.2f} ms bare"
    starts = ", ".join(f"{seconds:.1f}" for seconds in ready)
    return [
        Line("latency added by an idle server, p50", added, "ms", 1.5, detail),
        Line("from `embert serve` to ready", statistics.median(ready), "s", 6.0, f"starts: {starts} s"),
        Line("memory of the HTTP process", after["api"], "MB", 150.0, f"{memory['api']:.0f} MB when ready"),
        Line("memory of the engine process", after["engine"], "MB", detail=f"{memory['engine']:.0f} MB when ready"),
        Line("memory of the supervisor", after["supervisor"], "MB"),
    ]


def _bare_ms(engine: Engine, chosen: Sequence[Text]) -> float:
    """Return the p50 of the encoder's own time, tokenising and HTTP left out."""
    took = []
    for text in chosen:
        batch = pack([engine.tokenizer.encode([text.text], truncate=True).ids])
        started = time.perf_counter()
        engine.encoder.encode(batch)
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e3


def _sequential_ms(load: Load, serving: Serving, requests: tuple[Request, ...]) -> float:
    """Return the p50 of one connection's latency."""
    plan = Plan(serving.port, requests, connections=1, settle_s=0.5, window_s=2.0)
    answers = load.run(plan)
    inside = answers.answered >= answers.opened
    return float(np.median((answers.answered - answers.due)[inside])) * 1e3


if __name__ == "__main__":
    main()
