"""The server on one GPU machine against what it is to reach there, rivals beside, in one command.

    python -m benchmarks.server.targets --random-base [--model FOLDER] [--seconds 4] [--rounds 3] [--scale 1]

`--model` is a MiniLM-L6, for single queries; the other model has BERT-base's shape: `--base FOLDER`, or random weights
with `--random-base`. The encoder by itself is measured on the same texts, before its server starts and after it ended;
the better of the two counts. Every server runs alone, in 16 bits where there is a GPU, and the load comes from the
same machine. `--scale 0.1` makes everything small, for a try on a CPU. Figures are medians over the rounds; quantiles
of batches come from the server's own histograms.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.lib import random_model, record
from benchmarks.lib.load_generator import Load
from benchmarks.lib.load_worker import Plan, Request, post
from benchmarks.lib.running_server import Missing, Serving, embert, infinity, plain_fastapi
from benchmarks.lib.scrape import Samples, scrape
from benchmarks.lib.texts import PASSAGE_TOKENS, Lengths, Text, texts
from benchmarks.server import encoder_baseline
from benchmarks.server.latency_breakdown import parts_ms
from benchmarks.server.measurement import Round, median, run_round
from embert.engine import load_model

# Bucket bounds of the server's histograms, 8 % apart: quantiles of batch times are read from them.
BUCKETS = ",".join(f"{0.0001 * 1.08**step:.6f}" for step in range(120))
_EXACTLY = {tokens: Lengths(tokens, tokens, tokens) for tokens in (16, 32, 50)}

Start = Callable[[], AbstractContextManager[Serving]]


@dataclass(frozen=True, slots=True)
class Row:
    """One load against one server."""

    load: str
    server: str
    connections: int
    rate: float | None  # requests/s that were due; None for a closed loop
    median: Round
    batches: dict[str, float] = field(default_factory=dict)  # embert's own account of them


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the figures that are to be reached."""

    what: str
    value: float
    unit: str
    target: str
    met: bool
    detail: str


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="embert-base-") as scratch, Load(options.clients) as load:
        small = load_model(options.model)
        base = options.base
        if base is None:
            print("making a model of BERT-base's shape", file=sys.stderr, flush=True)
            layers = max(1, round(12 * options.scale))
            base = str(random_model.make(Path(scratch), small.transformer_folder, layers))
        run = _Run(options, load, Path(base), small.folder, small.transformer_folder / "tokenizer.json")
        run.base_model()
        if not options.base_only:
            run.small_model()
            run.rivals()
    run.print()
    print(f"\nwritten: {run.write()}")


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="benchmarks.server.targets", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder or hub id of a MiniLM-L6; default: the packaged one")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--base", help="folder of a BERT-base")
    which.add_argument("--random-base", action="store_true", help="BERT-base's shape with random weights")
    parser.add_argument("--seconds", type=float, default=4.0, help="that one round measures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="layers, connections and processes, for a small try")
    parser.add_argument("--clients", type=int, default=max(1, min(4, cores // 4)), help="processes that make the load")
    parser.add_argument("--workers", type=int, default=min(8, max(1, cores // 2)), help="HTTP processes for BERT-base")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--serve-options", default="", help="more options for `embert serve`, as one string")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--base-only", action="store_true", help="neither single queries nor rivals")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder of the JSON")
    return parser


class _Run:
    """All measurements, in their order."""

    def __init__(self, options: argparse.Namespace, load: Load, base: Path, small: Path, tokenizer: Path) -> None:
        self.options, self.load, self.base, self.small = options, load, base, small
        passages = texts(PASSAGE_TOKENS, 64 * 32, tokenizer, seed=1)
        self.passages = [passages[i : i + 32] for i in range(0, len(passages), 32)]
        fifty = texts(_EXACTLY[50], 64 * 64, tokenizer, seed=2)
        self.fifty = [fifty[i : i + 64] for i in range(0, len(fifty), 64)]
        self.queries = [[text] for text in texts(_EXACTLY[16], 960, tokenizer, seed=3)]
        self.single = [[text] for text in texts(_EXACTLY[32], 64, tokenizer, seed=4)]
        self.bare: dict[str, encoder_baseline.Bare] = {}
        self.rows: list[Row] = []
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self.parts_ms: dict[str, float] = {}

    # --- ours ---

    def base_model(self) -> None:
        """Throughput, the idle server, and the p99 under load."""
        workloads = {"passages": self.passages, "fifty": self.fifty}
        self._bare("base", self.base, workloads, self.single)
        with self._embert(self.base, self.options.workers) as serving:
            base64 = self._closed(serving, "32 passages, base64", self.passages, _base64, 96)
            floats = self._closed(serving, "32 passages, JSON floats", self.passages, _floats, 96)
            fifty = self._closed(serving, "64 texts of 50 tokens, base64", self.fifty, _base64, 96)
            idle = self._closed(serving, "one text of 32 tokens, idle", self.single, _base64, 1)
            self.parts_ms = parts_ms(serving.port, [_base64(group) for group in self.single])
            rate = 0.8 * _rate(base64)
            even = self._open(serving, "32 passages, base64, 80 %, evenly", self.passages, _base64, rate, even=True)
            loaded = self._open(serving, "32 passages, base64, 80 %", self.passages, _base64, rate)
        bare = self._bare("base", self.base, workloads, self.single)
        of = f"of the encoder's {bare.texts_per_s['passages']:,.0f} texts/s"
        for row, least in ((base64, 0.85), (floats, 0.60)):
            share = row.median.texts_per_s / bare.texts_per_s["passages"]
            self._figure(row.load, 100 * share, "%", f"≥ {least:.0%} {of}", share >= least, row)
        tokens = fifty.median.tokens_per_s
        target = f"≥ 1.5 M tokens/s; the encoder by itself {bare.tokens_per_s['fifty'] / 1e6:.2f} M"
        self._figure(fifty.load, tokens / 1e6, "M tokens/s", target, tokens >= 1.5e6, fifty)
        p50 = idle.median.p50_ms["text"]
        target = f"≤ encoder {bare.one_text_ms:.2f} ms + 0.7 ms"
        self._figure(f"{idle.load}, p50", p50, "ms", target, p50 <= bare.one_text_ms + 0.7, idle)
        for row in (even, loaded):
            p99, batch = row.median.p99_ms["text"], row.batches["p50_ms"]
            target = f"≤ 3 times the median batch time, {batch:.1f} ms"
            self._figure(f"{row.load}, p99", p99, "ms", target, p99 <= 3 * batch, row)

    def small_model(self) -> None:
        """Single queries with 8 HTTP processes."""
        self._bare("small", self.small, {"queries": self.queries}, self.queries)
        with self._embert(self.small, self._scaled(8)) as serving:
            closed = self._closed(serving, "one text of 16 tokens", self.queries, _base64, 512)
            wanted = self._open(serving, "one text of 16 tokens, 70 % of 15,000/s", self.queries, _base64, 10_500)
            loaded = self._open(serving, "one text of 16 tokens, 70 %", self.queries, _base64, 0.7 * _rate(closed))
        self._figure(closed.load, _rate(closed), "requests/s", "≥ 15,000 requests/s", _rate(closed) >= 15_000, closed)
        for row in (wanted, loaded):
            p99 = row.median.p99_ms["text"]
            self._figure(f"{row.load}, p99", p99, "ms", "≤ 15 ms", p99 <= 15, row)

    # --- rivals ---

    def rivals(self) -> None:
        """The same loads, in each rival's own best form."""
        if self.options.no_rivals:
            return
        for start, floats in ((plain_fastapi, _floats), (infinity, _infinity)):
            self._rival(start, self.base, floats, [("32 passages, JSON floats", self.passages, 16)])
            self._rival(start, self.base, floats, [("one text of 32 tokens, idle", self.single, 1)], quiet=True)
            self._rival(start, self.small, floats, [("one text of 16 tokens", self.queries, 64)], quiet=True)

    def _rival(
        self,
        start: Callable[[Path], AbstractContextManager[Serving]],
        model: Path,
        form: Callable[[Sequence[Text]], Request],
        loads: Sequence[tuple[str, Sequence[Sequence[Text]], int]],
        *,
        quiet: bool = False,
    ) -> None:
        try:
            with start(model) as serving:
                for name, groups, connections in loads:
                    self._closed(serving, name, groups, form, connections)
        except Missing as missing:
            if not quiet:
                self._note(str(missing))
        except SystemExit as failed:
            self._note(f"left out: {str(failed)[:300]}")

    # --- measuring ---

    def _bare(
        self,
        name: str,
        model: Path,
        groups: Mapping[str, Sequence[Sequence[Text]]],
        one: Sequence[Sequence[Text]],
    ) -> encoder_baseline.Bare:
        flat = {kind: [text.text for group in of for text in group] for kind, of in groups.items()}
        singles = [group[0].text for group in one]
        again = encoder_baseline.measure(model, self.options.device, flat, singles, self.options.seconds)
        self.bare[name] = again.best(self.bare.get(name, again))
        for kind, rate in self.bare[name].tokens_per_s.items():
            self._say(f"encoder alone, {name}, {kind}: {rate:,.0f} tokens/s")
        return self.bare[name]

    def _embert(self, model: Path, workers: int) -> AbstractContextManager[Serving]:
        options = ["--workers", str(workers), "--device", self.options.device, "--latency-buckets", BUCKETS]
        return embert(*options, *shlex.split(self.options.serve_options), model=str(model))

    def _closed(
        self,
        serving: Serving,
        name: str,
        groups: Sequence[Sequence[Text]],
        form: Callable[[Sequence[Text]], Request],
        connections: int,
    ) -> Row:
        """Warm up, see how long a request waits, then measure windows that hold many such times."""
        requests, connections = tuple(map(form, groups)), self._scaled(connections)
        warm = self.load.run(Plan(serving.port, requests, connections, self.options.seconds))
        wait_s = connections * float(warm.answered.max() - warm.due.min()) / max(1, int((warm.status == 200).sum()))
        window_s = max(self.options.seconds, 4 * wait_s)
        return self._row(serving, name, Plan(serving.port, requests, connections, window_s, max(1.0, wait_s)))

    def _open(
        self,
        serving: Serving,
        name: str,
        groups: Sequence[Sequence[Text]],
        form: Callable[[Sequence[Text]], Request],
        rate: float,
        *,
        even: bool = False,
    ) -> Row:
        requests, window_s = tuple(map(form, groups)), max(self.options.seconds, 50 / rate)
        return self._row(serving, name, Plan(serving.port, requests, self._scaled(512), window_s, rate=rate, even=even))

    def _row(self, serving: Serving, name: str, plan: Plan) -> Row:
        url = f"http://127.0.0.1:{serving.port}/metrics" if serving.name == "embert" else None
        before = scrape(url) if url else None
        figures = median([run_round(self.load, serving, plan) for _ in range(self.options.rounds)])
        batches = {} if url is None or before is None else _batches(scrape(url) - before)
        row = Row(name, serving.name, plan.connections, plan.rate, figures, batches)
        self.rows.append(row)
        self._say(
            f"{serving.name}: {name}: {figures.requests_per_s:,.1f} requests/s, p50 {figures.p50_ms['text']:.2f}, "
            f"p99 {figures.p99_ms['text']:.2f} ms, limit: {figures.limit}"
        )
        self.write()  # each time: a run that is cut short leaves what it has
        return row

    def _scaled(self, number: int) -> int:
        scale: float = self.options.scale
        return max(1, round(number * scale))

    def _figure(self, what: str, value: float, unit: str, target: str, met: bool, row: Row) -> None:
        limit, failed = row.median.limit, row.median.failed
        detail = f"limit: {limit}" + (f"; {failed} failed" if failed else "")
        self.figures.append(Figure(what, value, unit, target, met and not failed, detail))

    def _note(self, note: str) -> None:
        self.notes.append(note)
        self._say(note)

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    # --- telling ---

    def print(self) -> None:
        """The targets, then all the rows."""
        head = ["target", "measured", "wanted", "", "detail"]
        rows = [
            [f.what, f"{f.value:,.2f} {f.unit}", f.target, "ok" if f.met else "MISSED", f.detail] for f in self.figures
        ]
        record.print_table(head, rows)
        print()
        head = [
            "load",
            "server",
            "req/s",
            "texts/s",
            "tokens/s",
            "p50 ms",
            "p99 ms",
            "failed",
            "cores",
            "client",
            "limit",
        ]
        record.print_table(head, [_cells(row) for row in self.rows])
        print("\nidle request, p50 ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in self.parts_ms.items()))
        for note in self.notes:
            print(note)

    def write(self) -> Path:
        """Leave what there is so far."""
        document = {
            "options": {name: str(value) for name, value in vars(self.options).items()},
            "encoder": {name: asdict(bare) for name, bare in self.bare.items()},
            "targets": [asdict(figure) for figure in self.figures],
            "rows": [asdict(row) for row in self.rows],
            "idle_parts_ms": self.parts_ms,
            "notes": self.notes,
        }
        return record.write("server-targets", document, self.options.output)


def _batches(grown: Samples) -> dict[str, float]:
    """embert's own account: quantiles in ms of the parts of a request, means of what a batch holds."""
    parts = {"inference": "", "queue": "queue_", "tokenize": "tokenize_", "response_encode": "encode_"}
    times = {
        f"{prefix}p{percent}_ms": grown.quantile(f"embert_{part}_duration_seconds", percent / 100) * 1e3
        for part, prefix in parts.items()
        for percent in (50, 99)
    }
    return {**times, "tokens": grown.mean("embert_batch_tokens"), "texts": grown.mean("embert_batch_texts")}


def _base64(group: Sequence[Text]) -> Request:
    return _post("/v1/embeddings", {"input": _inputs(group), "encoding_format": "base64"}, group)


def _floats(group: Sequence[Text]) -> Request:
    return _post("/embed", {"inputs": _inputs(group)}, group)


def _infinity(group: Sequence[Text]) -> Request:
    return _post("/embeddings", {"model": "bench", "input": _inputs(group)}, group)


def _inputs(group: Sequence[Text]) -> list[str]:
    return [text.text for text in group]


def _post(path: str, body: object, group: Sequence[Text]) -> Request:
    return post(path, body, kind="text", texts=len(group), tokens=sum(text.tokens for text in group))


def _rate(row: Row) -> float:
    return row.median.requests_per_s


def _cells(row: Row) -> list[str]:
    m = row.median
    return [
        row.load if row.rate is None else f"{row.load} = {row.rate:,.0f}/s",
        row.server,
        f"{m.requests_per_s:,.1f}",
        f"{m.texts_per_s:,.0f}",
        f"{m.tokens_per_s:,.0f}",
        f"{m.p50_ms['text']:,.2f}",
        f"{m.p99_ms['text']:,.2f}",
        str(m.failed),
        ", ".join(f"{kind} {cores:.1f}" for kind, cores in m.cores.items()),
        f"{m.client_cores:.1f}",
        m.limit,
    ]


if __name__ == "__main__":
    main()
