"""The server's own cost: CPU a request, latency added when idle, time until ready, memory.

    python -m benchmarks.server.api_cost [--rounds 3] [--window 3]

CPU is user + system time of the HTTP process, in front of an encoder that returns at once (StubEncoder). Latency is
that of one client that sends one short text after the other to the real model, less the time of the encoder's call on
the same token ids. Figures are medians over the rounds.
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
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.running_server import RunningServer, embert
from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, Text, texts
from benchmarks.server.measurement import latency_breakdown_ms
from embert.engine import Engine, load_model, pack

STUB = ("--encoder", "benchmarks.lib.stub_encoders:StubEncoder", "--workers", "1")
STARTS = 3
SEQUENTIAL_TEXTS = 200


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure."""

    what: str
    value: float
    unit: str
    detail: str = ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.server.api_cost", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a local folder or a hub id; default: the packaged model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=3.0, help="seconds that one round measures")
    options = parser.parse_args(argv)
    model = load_model(options.model)
    tokenizer = model.transformer_folder / "tokenizer.json"
    drawn = texts(QUERY_TOKENS, 2048, tokenizer)
    with LoadGenerator() as load:
        figures = _cpu(load, drawn, tokenizer, model.model_id, options)
        figures += _started(load, drawn, options.model, options.rounds)
    rows = [[figure.what, f"{figure.value:,.2f} {figure.unit}", figure.detail] for figure in figures]
    record.print_table(["what", "measured", "detail"], rows)
    print(f"\nwritten: {record.write('api_cost', [asdict(figure) for figure in figures])}")


# -- CPU a request, with the stub encoder ------------------------------------------------------------------------------


def _cpu(
    load: LoadGenerator, drawn: Sequence[Text], tokenizer: Path, model_id: str, options: argparse.Namespace
) -> list[Figure]:
    cases = {
        (size, form): _requests(drawn, size, form, model_id)
        for size in (1, 32)
        for form in ("JSON floats", "base64", "raw")
    }
    measured: dict[tuple[int, str], list[tuple[float, float, float, float]]] = {case: [] for case in cases}
    passages = _requests(texts(PASSAGE_TOKENS, 64 * 32, tokenizer, seed=1), 32, "base64", model_id)
    with embert(*STUB, model=options.model) as server:
        breakdowns = [latency_breakdown_ms(server.port, passages) for _ in range(options.rounds)]
        for number in range(options.rounds):
            for case, requests in cases.items():
                measured[case].append(_round(load, server, requests, options.window))
                progress = f"{case[0]} texts, {case[1]}, round {number + 1} of {options.rounds}"
                print(progress, file=sys.stderr, flush=True)
    figures = [_access_log(load, cases[1, "raw"], options)]
    for (size, form), rounds in measured.items():
        http_us, engine_us, rate, cores = (statistics.median(column) for column in zip(*rounds, strict=True))
        detail = f"{rate:,.0f} requests/s, engine process {engine_us:,.0f} µs, client {cores:.2f} cores"
        what = f"CPU of the HTTP process, {size} text{'s'[: size > 1]}, {form}"
        figures.append(Figure(what, http_us, "µs", detail))
    stages = {name: statistics.median(each[name] for each in breakdowns) for name in breakdowns[0]}
    detail = ", ".join(f"{name} {ms:.2f}" for name, ms in stages.items())
    what = "latency without the encoder, 32 passages, base64, p50"
    figures.append(Figure(what, stages["total"], "ms", detail))
    return figures


def _access_log(load: LoadGenerator, requests: tuple[Request, ...], options: argparse.Namespace) -> Figure:
    """Return what --access-log adds, from two servers alternately, so that both see the same neighbors."""
    added = []
    with embert(*STUB, model=options.model) as off, embert(*STUB, "--access-log", "json", model=options.model) as on:
        for _ in range(options.rounds):
            without, with_ = (_round(load, server, requests, options.window)[0] for server in (off, on))
            added.append(with_ - without)
    return Figure("CPU added by --access-log json, 1 text, raw", statistics.median(added), "µs")


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
    load: LoadGenerator, server: RunningServer, requests: tuple[Request, ...], window_s: float
) -> tuple[float, float, float, float]:
    """Return CPU µs a request of the HTTP process and of the engine process, requests/s, and the client's cores."""
    spent: list[dict[str, float]] = []
    plan = Plan(server.port, requests, connections=64 if requests[0].texts == 1 else 32, window_s=window_s)
    responses = load.run(plan, at_window=lambda: spent.append(server.cpu_s()))
    inside = (responses.ended >= responses.opened) & (responses.ended < responses.opened + window_s)
    if (failed := int((responses.status != 200).sum())) > 0:
        raise SystemExit(
            f"{failed} of {len(responses.status)} requests failed, with status {set(responses.status.tolist())}"
        )
    count = int(inside.sum())
    http, engine = ((spent[1][kind] - spent[0][kind]) / count * 1e6 for kind in ("http", "engine"))
    return http, engine, count / window_s, responses.client_cores


# -- the real model: ready, idle, memory -------------------------------------------------------------------------------


def _started(load: LoadGenerator, drawn: Sequence[Text], model: str | None, rounds: int) -> list[Figure]:
    ready = []
    for _ in range(STARTS):
        with embert(model=model) as server:
            ready.append(server.ready_s)
    chosen = drawn[:SEQUENTIAL_TEXTS]
    requests = tuple(
        post("/embed", {"inputs": text.text}, kind="query", texts=1, tokens=text.tokens) for text in chosen
    )
    over_http, bare = [], []
    with embert(model=model) as server, Engine.load(model) as engine:
        memory = server.rss_mb()
        for _ in range(rounds):
            bare.append(_bare_ms(engine, chosen))
            over_http.append(_sequential_ms(load, server, requests))
        after = server.rss_mb()
    added = statistics.median(http - call for http, call in zip(over_http, bare, strict=True))
    detail = f"p50 {statistics.median(over_http):.2f} ms over HTTP, {statistics.median(bare):.2f} ms bare"
    starts = ", ".join(f"{seconds:.1f}" for seconds in ready)
    return [
        Figure("latency added by an idle server, p50", added, "ms", detail),
        Figure("from `embert serve` to ready", statistics.median(ready), "s", f"starts: {starts} s"),
        Figure("memory of the HTTP process", after["http"], "MB", f"{memory['api']:.0f} MB when ready"),
        Figure("memory of the engine process", after["engine"], "MB", f"{memory['engine']:.0f} MB when ready"),
        Figure("memory of the supervisor", after["supervisor"], "MB"),
    ]


def _bare_ms(engine: Engine, chosen: Sequence[Text]) -> float:
    """Return the p50 of the encoder's call, without tokenizing and HTTP."""
    took = []
    for text in chosen:
        batch = pack([engine.tokenizer.encode([text.text]).ids])
        started = time.perf_counter()
        engine.encoder.encode(batch)
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1e3


def _sequential_ms(load: LoadGenerator, server: RunningServer, requests: tuple[Request, ...]) -> float:
    """Return the p50 latency of one connection."""
    plan = Plan(server.port, requests, connections=1, settle_s=0.5, window_s=2.0)
    responses = load.run(plan)
    inside = responses.ended >= responses.opened
    return float(np.median((responses.ended - responses.due)[inside])) * 1e3


if __name__ == "__main__":
    main()
