"""The server on one GPU machine next to its encoder and its rivals.

    python -m benchmarks.server.targets --random-base [--model FOLDER] [--seconds 4] [--rounds 3] [--scale 1]

Single queries go to `--model`, a MiniLM-L6. Passages go to a model of BERT-base's shape: `--base FOLDER`, or random
weights with `--random-base`. The baseline is the encoder without a server on the same texts, measured before the server
starts and after it ends; the better of the two counts. Servers run one at a time, in 16 bits on a GPU, and the load
comes from the same machine. `--scale 0.1` makes everything small, to try it on a CPU. Figures are medians over the
rounds; quantiles of batches come from the server's own histograms.
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
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.running_server import ROOT, RunningServer, embert
from benchmarks.lib.scrape import Samples, scrape
from benchmarks.lib.texts import PASSAGE_TOKENS, Lengths, Text, texts
from benchmarks.rivals.servers import Missing, infinity, plain_fastapi
from benchmarks.server import encoder_baseline
from benchmarks.server.measurement import Round, latency_breakdown_ms, median, run_round
from embert.engine import load_model


@dataclass(frozen=True, slots=True)
class Row:
    """One load against one server."""

    load: str
    server: str
    connections: int
    rate: float | None  # requests/s that were due; None for a closed loop
    median: Round
    batches: dict[str, float] = field(default_factory=dict)  # embert's own metrics; see batch_figures


def batch_figures(growth: Samples) -> dict[str, float]:
    """Return quantiles in ms of batches and a request's stages, and a batch's mean size, from embert's /metrics."""
    stages = {"batch": "", "queue": "queue_", "tokenize": "tokenize_", "response_encode": "encode_"}
    times = {
        f"{prefix}p{percent}_ms": growth.quantile(f"embert_{stage}_duration_seconds", percent / 100) * 1e3
        for stage, prefix in stages.items()
        for percent in (50, 99)
    }
    return {**times, "tokens": growth.mean("embert_batch_tokens"), "texts": growth.mean("embert_batch_texts")}


def print_rows(rows: Sequence[Row]) -> None:
    head = ["load", "server", "req/s", "texts/s", "tokens/s", "p50 ms", "p99 ms", "failed", "cores", "client", "limit"]
    record.print_table(head, [_cells(row) for row in rows])


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


# Its sitecustomize.py gives the server histogram buckets that are fine enough to read quantiles of batch times from.
_FINE_BUCKETS = ROOT / "benchmarks" / "lib" / "fine_buckets"
_PATH = filter(None, (str(_FINE_BUCKETS), str(ROOT), os.environ.get("PYTHONPATH")))
FINE_BUCKETS = {"PYTHONPATH": os.pathsep.join(_PATH)}
_EXACTLY = {tokens: Lengths(tokens, tokens, tokens) for tokens in (16, 32, 50)}

Groups = Sequence[Sequence[Text]]  # of texts that share a request
Form = Callable[[Sequence[Text]], Request]


def in_base64(group: Sequence[Text]) -> Request:
    """Ask for base64 on OpenAI's route."""
    return _post("/v1/embeddings", {"input": _inputs(group), "encoding_format": "base64"}, group)


def in_floats(group: Sequence[Text]) -> Request:
    """Ask for JSON floats on TEI's route, which plain FastAPI has too."""
    return _post("/embed", {"inputs": _inputs(group)}, group)


def for_infinity(group: Sequence[Text]) -> Request:
    """Ask Infinity for JSON floats."""
    return _post("/embeddings", {"model": "bench", "input": _inputs(group)}, group)


def _inputs(group: Sequence[Text]) -> list[str]:
    return [text.text for text in group]


def _post(path: str, body: object, group: Sequence[Text]) -> Request:
    return post(path, body, kind="text", texts=len(group), tokens=sum(text.tokens for text in group))


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="embert-base-") as scratch, LoadGenerator(options.clients) as load:
        small = load_model(options.model)
        base = options.base
        if base is None:
            print("writing a random model of BERT-base's shape", file=sys.stderr, flush=True)
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
    parser.add_argument("--seconds", type=float, default=4.0, help="that a round measures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of layers, connections and processes")
    parser.add_argument(
        "--clients", type=int, default=max(1, min(4, cores // 4)), help="processes of the load generator"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--serve-options", default="", help="more options for `embert serve`, as one string")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--base-only", action="store_true", help="neither single queries nor rivals")
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder of the JSON")
    return parser


class _Run:
    """The measurements in their order, and what they found."""

    def __init__(
        self, options: argparse.Namespace, load: LoadGenerator, base: Path, small: Path, tokenizer: Path
    ) -> None:
        self.options, self.load, self.base, self.small = options, load, base, small
        passages = texts(PASSAGE_TOKENS, 64 * 32, tokenizer, seed=1)
        self.passages = [passages[i : i + 32] for i in range(0, len(passages), 32)]
        fifty = texts(_EXACTLY[50], 64 * 64, tokenizer, seed=2)
        self.fifty = [fifty[i : i + 64] for i in range(0, len(fifty), 64)]
        self.queries = [[text] for text in texts(_EXACTLY[16], 960, tokenizer, seed=3)]
        self.single = [[text] for text in texts(_EXACTLY[32], 64, tokenizer, seed=4)]
        self.baselines: dict[str, encoder_baseline.Baseline] = {}
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.latency_breakdown: dict[str, float] = {}

    # --- embert ---

    def base_model(self) -> None:
        """Measure throughput, the idle server, and the p99 under load."""
        workloads = {"passages": self.passages, "fifty": self.fifty}
        self._baseline("base", self.base, workloads, self.single)
        with self._embert(self.base) as server:
            base64 = self._closed(server, "32 passages, base64", self.passages, in_base64, 96)
            self._closed(server, "32 passages, JSON floats", self.passages, in_floats, 96)
            self._closed(server, "64 texts of 50 tokens, base64", self.fifty, in_base64, 96)
            self._closed(server, "one text of 32 tokens, idle", self.single, in_base64, 1)
            singles = [in_base64(group) for group in self.single]
            self.latency_breakdown = latency_breakdown_ms(server.port, singles)
            rate = 0.8 * _rate(base64)
            name = "32 passages, base64, 80 %"
            self._open(server, f"{name}, evenly", self.passages, rate, even=True)
            self._open(server, name, self.passages, rate)
        self._baseline("base", self.base, workloads, self.single)

    def small_model(self) -> None:
        """Measure single queries."""
        self._baseline("small", self.small, {"queries": self.queries}, self.queries)
        with self._embert(self.small) as server:
            closed = self._closed(server, "one text of 16 tokens", self.queries, in_base64, 512)
            self._open(server, "one text of 16 tokens, 70 % of 15,000/s", self.queries, 10_500)
            self._open(server, "one text of 16 tokens, 70 %", self.queries, 0.7 * _rate(closed))

    # --- rivals ---

    def rivals(self) -> None:
        """Measure the same loads against each rival, in the form that suits it best."""
        if self.options.no_rivals:
            return
        for start, form in ((plain_fastapi, in_floats), (infinity, for_infinity)):
            self._rival(start, self.base, form, [("32 passages, JSON floats", self.passages, 16)])
            self._rival(start, self.base, form, [("one text of 32 tokens, idle", self.single, 1)], quiet=True)
            self._rival(start, self.small, form, [("one text of 16 tokens", self.queries, 64)], quiet=True)

    def _rival(
        self,
        start: Callable[[Path], AbstractContextManager[RunningServer]],
        model: Path,
        form: Form,
        loads: Sequence[tuple[str, Groups, int]],
        *,
        quiet: bool = False,
    ) -> None:
        try:
            with start(model) as server:
                for name, groups, connections in loads:
                    self._closed(server, name, groups, form, connections)
        except Missing as missing:
            if not quiet:
                self._note(str(missing))
        except SystemExit as failed:
            self._note(f"skipped: {str(failed)[:300]}")

    # --- measuring ---

    def _baseline(self, name: str, model: Path, groups: Mapping[str, Groups], one: Groups) -> encoder_baseline.Baseline:
        flat = {kind: [text.text for group in of for text in group] for kind, of in groups.items()}
        singles = [group[0].text for group in one]
        again = encoder_baseline.measure(model, self.options.device, flat, singles, self.options.seconds)
        self.baselines[name] = again.best(self.baselines.get(name, again))
        for kind, rate in self.baselines[name].tokens_per_s.items():
            self._say(f"encoder alone, {name}, {kind}: {rate:,.0f} tokens/s")
        return self.baselines[name]

    def _embert(self, model: Path) -> AbstractContextManager[RunningServer]:
        return embert(
            "--device",
            self.options.device,
            *shlex.split(self.options.serve_options),
            model=str(model),
            environment=FINE_BUCKETS,
        )

    def _closed(self, server: RunningServer, name: str, groups: Groups, form: Form, connections: int) -> Row:
        """Warm up, estimate how long a request waits, then measure windows several times as long."""
        requests, connections = tuple(map(form, groups)), self._scaled(connections)
        warm = self.load.run(Plan(server.port, requests, connections, self.options.seconds))
        wait_s = connections * float(warm.ended.max() - warm.due.min()) / max(1, int((warm.status == 200).sum()))
        window_s = max(self.options.seconds, 4 * wait_s)
        return self._row(server, name, Plan(server.port, requests, connections, window_s, max(1.0, wait_s)))

    def _open(self, server: RunningServer, name: str, groups: Groups, rate: float, *, even: bool = False) -> Row:
        requests, window_s = tuple(map(in_base64, groups)), max(self.options.seconds, 50 / rate)
        return self._row(server, name, Plan(server.port, requests, self._scaled(512), window_s, rate=rate, even=even))

    def _row(self, server: RunningServer, name: str, plan: Plan) -> Row:
        url = f"http://127.0.0.1:{server.port}/metrics" if server.name == "embert" else None
        before = scrape(url) if url else None
        figures = median([run_round(self.load, server, plan) for _ in range(self.options.rounds)])
        batches = {} if url is None or before is None else batch_figures(scrape(url) - before)
        row = Row(name, server.name, plan.connections, plan.rate, figures, batches)
        self.rows.append(row)
        self._say(
            f"{server.name}: {name}: {figures.requests_per_s:,.1f} requests/s, p50 {figures.p50_ms['text']:.2f}, "
            f"p99 {figures.p99_ms['text']:.2f} ms, limit: {figures.limit}"
        )
        self.write()  # after each row, so that an interrupted run leaves its results
        return row

    def _scaled(self, number: int) -> int:
        scale: float = self.options.scale
        return max(1, round(number * scale))

    def _note(self, note: str) -> None:
        self.notes.append(note)
        self._say(note)

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    # --- reporting ---

    def print(self) -> None:
        print_rows(self.rows)
        stages = ", ".join(f"{name} {ms:.3f}" for name, ms in self.latency_breakdown.items())
        print(f"\nidle request, p50 ms: {stages}")
        for note in self.notes:
            print(note)

    def write(self) -> Path:
        """Write the results so far."""
        document = {
            "options": {name: str(value) for name, value in vars(self.options).items()},
            "encoder": {name: asdict(baseline) for name, baseline in self.baselines.items()},
            "rows": [asdict(row) for row in self.rows],
            "idle_parts_ms": self.latency_breakdown,
            "notes": self.notes,
        }
        return record.write("server-targets", document, self.options.output)


def _rate(row: Row) -> float:
    return row.median.requests_per_s


if __name__ == "__main__":
    main()
