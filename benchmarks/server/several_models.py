"""Two embedders and a reranker in one server next to servers of one model each.

    python -m benchmarks.server.several_models [--layers 12] [--window 20] [--rounds 3]

`small` is the packaged all-MiniLM-L6-v2, `large` has BERT-base's shape with `--layers` layers, `rerank` is a
cross-encoder of MiniLM-L6's shape; the last two have random weights. Clients send one request after the other, so that
a queue always waits. In turns, as medians:

* each embedder alone in its own server, then next to the other two while these are idle, then both under load at
  once: their rates as shares of what each does alone, and the device's time that each model got;
* the reranker, a request now and then, alone and next to `large` under bulk load: the time that 99 % of its requests
  take, and two batches of `large` plus its own time, the bound.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, Responses, post
from benchmarks.lib.random_model import make, make_reranker
from benchmarks.lib.running_server import RunningServer, embert
from benchmarks.lib.scrape import Samples, scrape
from benchmarks.lib.texts import PASSAGE_TOKENS, texts
from embert.engine import load_model

EMBEDDERS = ("small", "large")
TEXTS, REQUESTS = 32, 24
DOCUMENTS = 4


@dataclass
class Bench:
    """The models, their requests, and what is measured."""

    folders: dict[str, str]
    options: argparse.Namespace
    requests: dict[str, tuple[Request, ...]] = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = load_model(None).transformer_folder / "tokenizer.json"
        passages = texts(PASSAGE_TOKENS, TEXTS * REQUESTS, tokenizer)
        self.requests = {}
        for name in EMBEDDERS:
            requests = []
            for start in range(0, len(passages), TEXTS):
                some = passages[start : start + TEXTS]
                body = {"model": name, "input": [each.text for each in some], "encoding_format": "base64"}
                tokens = sum(each.tokens for each in some)
                requests.append(post("/v1/embeddings", body, kind=name, texts=TEXTS, tokens=tokens))
            self.requests[name] = tuple(requests)
        reranks = []
        for start in range(0, REQUESTS * DOCUMENTS, DOCUMENTS):
            some = passages[start : start + DOCUMENTS]
            body = {"model": "rerank", "query": "what is it", "documents": [each.text for each in some]}
            tokens = sum(each.tokens for each in some)
            reranks.append(post("/v1/rerank", body, kind="rerank", texts=DOCUMENTS, tokens=tokens))
        self.requests["rerank"] = tuple(reranks)

    def serving(self, *names: str, low_priority: bool = False) -> Any:
        """A server of these models; with `low_priority`, `large` gives way to others."""
        arguments = [f"{name}={self.folders[name]}" for name in names]
        if low_priority:
            file = Path(self.folders["large"]).with_name("models.toml")
            tables = [
                f'[[models]]\nname = "{name}"\nmodel = "{self.folders[name]}"\n'
                + ("low_priority = true\n" if name == "large" else "")
                for name in names
            ]
            file.write_text("\n".join(tables))
            arguments = ["--config", str(file)]
        # Queues are as long as the clients make them: a time limit would refuse some of what waits twice as long.
        options = ["--workers", str(self.options.workers), "--device", self.options.device, "--max-queue-seconds", "0"]
        options += ["--request-timeout", "600"]
        if self.options.encoder is not None:
            options += ["--encoder", self.options.encoder]
        return embert(*arguments, *options)

    def plan(self, server: RunningServer, name: str, **how: Any) -> Plan:
        """Requests for one model, one after the other on each connection."""
        flood = {"connections": self.options.connections, **how}
        return Plan(server.port, self.requests[name], window_s=self.options.window, settle_s=3.0, **flood)

    def one_round(self, loads: list[LoadGenerator]) -> dict[str, float]:
        figures: dict[str, float] = {}
        for name in EMBEDDERS:
            with self.serving(name) as server:
                grown = self._run(server, [self.plan(server, name)], loads).grown
            figures[f"{name} alone"] = _tokens_per_s(grown, name)
        with self.serving(*self.folders) as server:
            for name in EMBEDDERS:
                grown = self._run(server, [self.plan(server, name)], loads).grown
                figures[f"{name} next to idle"] = _tokens_per_s(grown, name)
            grown = self._run(server, [self.plan(server, name) for name in EMBEDDERS], loads).grown
            for name in EMBEDDERS:
                figures[f"{name} next to busy"] = _tokens_per_s(grown, name)
                figures[f"{name} seconds"] = grown.samples.total("embert_engine_busy_seconds_total", model=name)
        with self.serving(*self.folders, low_priority=True) as server:
            rerank = self.plan(server, "rerank", connections=8, rate=self.options.rerank_rate)
            run = self._run(server, [rerank], loads)
            figures["rerank alone p99"] = _p99(run.responses[0])
            run = self._run(server, [self.plan(server, "large"), rerank], loads)
            figures["rerank p99"] = _p99(run.responses[1])
            values = run.grown.samples.values.items()
            batches = Samples({key: value for key, value in values if ("model", "large") in key[1]})
            figures["batch p99"] = batches.quantile("embert_batch_duration_seconds", 0.99)
        return figures

    def _run(self, server: RunningServer, plans: list[Plan], loads: list[LoadGenerator]) -> Run:
        """Run the plans at once. Raises SystemExit for a failed request."""
        seen: list[tuple[float, Samples]] = []

        def look() -> None:
            seen.append((time.monotonic(), scrape(f"http://127.0.0.1:{server.port}/metrics")))

        watch: list[Callable[[], None] | None] = [look, *[None] * (len(plans) - 1)]
        with ThreadPoolExecutor(len(plans)) as pool:
            running = [pool.submit(load.run, plan, at) for load, plan, at in zip(loads, plans, watch, strict=False)]
            responses = [each.result() for each in running]
        for each in responses:
            if (each.status != 200).any():
                raise SystemExit(f"requests failed, with status {set(each.status.tolist())}")
        (opened, first), (closed, last) = seen
        return Run(responses, Growth(last - first, closed - opened))


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of the server's metrics in the first plan's window."""

    samples: Samples
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """Results of plans that ran at once."""

    responses: list[Responses]
    grown: Growth


def _tokens_per_s(grown: Growth, name: str) -> float:
    """Rate of the batches that ended in the window: requests that share batches end at the same time, in bursts."""
    return grown.samples.total("embert_batch_tokens_sum", model=name) / grown.seconds


def _p99(responses: Responses) -> float:
    inside = responses.due >= responses.opened
    return float(np.quantile((responses.ended - responses.due)[inside], 0.99))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.server.several_models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=12, help="of the large model")
    parser.add_argument("--connections", type=int, default=16, help="of the clients of each embedder")
    parser.add_argument("--rerank-rate", type=float, default=2.0, help="requests/s of the interactive reranker")
    parser.add_argument("--window", type=float, default=20.0, help="seconds that one run measures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="HTTP processes: as many as it takes to fill the device")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--encoder", help="package.module:factory of a stand-in, for the server's own part")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder of the JSON")
    options = parser.parse_args(argv)
    tokenizer = load_model(None).transformer_folder
    with tempfile.TemporaryDirectory() as scratch, LoadGenerator() as first, LoadGenerator() as second:
        folder = Path(scratch)
        folders = {
            "small": str(load_model(None).folder),
            "large": str(make(folder / "large", tokenizer, options.layers)),
            "rerank": str(make_reranker(folder / "rerank", tokenizer)),
        }
        bench = Bench(folders, options)
        rounds = [bench.one_round([first, second]) for _ in range(options.rounds)]
    figures = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    rows = []
    for name in EMBEDDERS:
        alone = figures[f"{name} alone"]
        seconds = sum(figures[f"{each} seconds"] for each in EMBEDDERS)
        rows.append(
            [
                name,
                f"{alone:,.0f}",
                f"{figures[f'{name} next to idle'] / alone:.3f}",
                f"{figures[f'{name} next to busy'] / alone:.3f}",
                f"{figures[f'{name} seconds'] / seconds:.3f}",
            ]
        )
    record.print_table(
        ["model", "tokens/s alone", "next to idle models", "both busy", "share of the device's time"], rows
    )
    together = sum(figures[f"{name} next to busy"] / figures[f"{name} alone"] for name in EMBEDDERS)
    print(f"\ntogether: {together:.3f} of one alone, target ≥ 0.95")
    bound = 2 * figures["batch p99"] + figures["rerank alone p99"]
    print(f"reranker next to bulk: p99 {figures['rerank p99']:.3f} s; two batches and its own: {bound:.3f} s")
    written = {"options": {**vars(options), "output": None}, "medians": figures, "together": together, "rounds": rounds}
    print(f"\nwritten: {record.write('several-models', written, options.output)}")


if __name__ == "__main__":
    main()
