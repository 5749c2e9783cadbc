"""Builds of embert compared with each other: short texts, passages and the HTTP layer alone, in turns, over HTTP.

    python -m benchmarks.server.short_texts [--checkout FOLDER ...] [--shapes minilm base] [--rounds 2] [--seconds 4]
    VLLM=/path/to/vllm TEI=/path/to/text-embeddings-router python -m benchmarks.server.short_texts --rivals vllm tei
    python -m benchmarks.server.short_texts --stub --workers 1 --clients 1 --rows one 404   # without a GPU

Each checkout is a working tree with its extension built, served by its own .venv or by this interpreter. In every
round, each starts once for each shape, and so does each rival (benchmarks/rivals/servers.py). Models have random
weights, responses are base64, connections stay open, and the load comes from the same machine. CPU is user + system
time of all processes of a kind; wake-ups count how often a thread gave up its core to wait. Figures are medians over
the rounds. Compare within one run only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.lib import random_model, record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.running_server import ROOT, RunningServer, embert
from benchmarks.lib.texts import PASSAGE_TOKENS, Lengths, texts
from benchmarks.rivals.servers import SERVERS
from benchmarks.server.measurement import Round, median, run_round
from embert.engine import load_model

STUBS = ("benchmarks/lib/stub_encoders.py", "StubEncoder"), ("benchmarks/stand_in.py", "StandInEncoder")
SHAPES = {"minilm": random_model.MINILM_L6, "base": {}}


@dataclass(frozen=True, slots=True)
class Load:
    """One row of the table."""

    row: str  # the word that --rows takes
    name: str
    connections: int
    texts: int = 1
    passages: bool = False
    model: str | None = None  # a name that is not served gets 404
    other_connections: int = 0  # with requests of 32 passages at the same time


LOADS = (
    *(Load("one", "one text of 16 tokens", connections) for connections in (512, 64, 32, 1)),
    Load("404", "the same for an unknown model: 404", 512, model="none"),
    Load("passage", "one passage", 512, passages=True),
    *(Load("passages", "32 passages", n, 32, passages=True) for n in (16, 32, 64, 128, 256, 512, 1024)),
    Load("mixed", "one text of 16 tokens next to 128 connections of 32 passages", 1, other_connections=128),
)


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    loads = [load for load in LOADS if load.row in options.rows]
    measured: dict[tuple[str, Load, str], list[Round]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="embert-shapes-") as scratch,
        LoadGenerator(options.clients) as generator,
        LoadGenerator() as single,
    ):
        small = load_model(None)
        run = _Run(options, generator, single, small.transformer_folder / "tokenizer.json")
        servers = _servers(options)
        for shape in options.shapes:
            folder = Path(scratch, shape)
            random_model.make(folder, small.transformer_folder, **SHAPES[shape])
            for number in range(options.rounds):
                for name in servers if number % 2 == 0 else list(servers)[::-1]:
                    with servers[name](folder) as server:
                        for load in loads:
                            figures = run.row(server, load)
                            measured.setdefault((shape, load, name), []).append(figures)
                            print(f"{name}, {shape}: {_line(load, figures)}", file=sys.stderr, flush=True)
    rows = [(shape, load, name, median(rounds)) for (shape, load, name), rounds in measured.items()]
    rows.sort(key=lambda row: (options.shapes.index(row[0]), LOADS.index(row[1])))
    head = ["load", "connections", "server", "requests/s", "texts/s", "p50 ms", "p99 ms"]
    head += ["engine µs", "HTTP µs", "all µs", "wake-ups", "failed"]
    record.print_table(head, [_cells(*row) for row in rows])
    figures_ = [{"shape": s, "load": asdict(load), "server": b, "median": asdict(m)} for s, load, b, m in rows]
    print(f"\nwritten: {record.write('short-texts', figures_, options.output)}")


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="benchmarks.server.short_texts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkout", type=Path, action="append", help="folder of a build; default: this one")
    parser.add_argument("--rivals", nargs="+", choices=SERVERS, default=[], help="other servers, in the same turns")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["minilm"])
    parser.add_argument(
        "--rows", nargs="+", choices=list(dict.fromkeys(load.row for load in LOADS)), default=[x.row for x in LOADS]
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="that a row measures")
    parser.add_argument("--workers", type=int, default=0, help="HTTP processes; 0: the default of the server")
    parser.add_argument("--clients", type=int, default=max(1, min(4, cores // 4)), help="processes of the load")
    parser.add_argument("--stub", action="store_true", help="an encoder that returns at once, instead of the GPU's")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder of the JSON")
    return parser


class _Run:
    def __init__(
        self, options: argparse.Namespace, generator: LoadGenerator, single: LoadGenerator, tokenizer: Path
    ) -> None:
        self._options, self._generator, self._single = options, generator, single
        passages = texts(PASSAGE_TOKENS, 64 * 32, tokenizer, seed=1)
        self._texts = {True: passages, False: texts(Lengths(16, 16, 16), 960, tokenizer, seed=3)}

    def row(self, server: RunningServer, load: Load) -> Round:
        """Measure one row; next to others, the figures of rates and CPU are those of both loads together."""
        plan = self._plan(server, load)
        if not load.other_connections:
            return run_round(self._generator, server, plan)
        passages = self._requests(server, Load("", "", 1, 32, passages=True))
        others = replace(plan, requests=passages, connections=load.other_connections)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run_round, self._generator, server, others)
            short = run_round(self._single, server, plan)
            return replace(running.result(), p50_ms=short.p50_ms, p99_ms=short.p99_ms)

    def _plan(self, server: RunningServer, load: Load) -> Plan:
        settle_s, status = max(1.0, load.connections * load.texts / 8192), 404 if load.model else 200
        requests, window_s = self._requests(server, load), self._options.seconds
        return Plan(server.port, requests, load.connections, max(window_s, settle_s), settle_s, status=status)

    def _requests(self, server: RunningServer, load: Load) -> tuple[Request, ...]:
        drawn = self._texts[load.passages]
        requests = []
        for first in range(0, len(drawn), load.texts):
            group = drawn[first : first + load.texts]
            body: dict[str, object] = {"input": [text.text for text in group], "encoding_format": "base64"}
            if load.model or server.name != "embert":
                body["model"] = load.model or "bench"
            tokens = sum(text.tokens for text in group)
            path = "/embeddings" if server.name == "Infinity" else "/v1/embeddings"
            requests.append(post(path, body, kind="text", texts=len(group), tokens=tokens))
        return tuple(requests)


def _servers(options: argparse.Namespace) -> dict[str, Callable[[Path], AbstractContextManager[RunningServer]]]:
    """Commands that start each contender with a model folder, by the name that tables show."""
    servers: dict[str, Callable[[Path], AbstractContextManager[RunningServer]]] = {}
    for checkout in [folder.resolve() for folder in options.checkout or [ROOT]]:
        serve_options = ["--workers", str(options.workers)]
        if options.stub:
            file, name = next(stub for stub in STUBS if (checkout / stub[0]).exists())
            serve_options += ["--encoder", f"{file.removesuffix('.py').replace('/', '.')}:{name}"]
        build = _build(checkout)
        servers[f"{build} in {checkout.name}" if build in servers else build] = partial(
            _embert, serve_options, checkout
        )
    return servers | {name: SERVERS[name] for name in options.rivals}


def _embert(serve_options: Sequence[str], checkout: Path, folder: Path) -> AbstractContextManager[RunningServer]:
    return embert(*serve_options, model=str(folder), checkout=checkout)


def _build(folder: Path) -> str:
    """Return the commit of a checkout, or its name where that is not known."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else folder.name


def _line(load: Load, figures: Round) -> str:
    p50, cpu = figures.p50_ms["text"], sum(figures.cpu_us.values())
    rate = f"{figures.requests_per_s:,.0f} requests/s, p50 {p50:.2f} ms, CPU {cpu:.0f} µs a request"
    return f"{load.name}, {load.connections} connections: {rate}, limit: {figures.limit}"


def _cells(shape: str, load: Load, server: str, figures: Round) -> list[str]:
    numbers = [figures.p50_ms["text"], figures.p99_ms["text"]]
    cpu, wakeups = figures.cpu_us, sum(figures.wakeups.values())
    return [
        f"{shape}: {load.name}",
        str(load.connections),
        server,
        f"{figures.requests_per_s:,.0f}",
        f"{figures.texts_per_s:,.0f}",
        *(f"{number:.2f}" for number in numbers),
        *(f"{cpu.get(kind, 0.0):.0f}" for kind in ("engine", "http")),
        f"{sum(cpu.values()):.0f}",
        f"{wakeups:.2f}",
        str(figures.failed),
    ]


if __name__ == "__main__":
    main()
