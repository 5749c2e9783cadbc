"""`embert embed` next to the encoder alone, on the same short texts.

    python -m benchmarks.encoder.bulk [--texts 1000000] [--outputs npy parquet jsonl] [--rounds 3] [--no-cost]

The encoder alone gets ids that were made beforehand, in the batches that `embert embed` forms, two in flight. A rate is
that of all texts but the first block's: the time of a run of all, less that of a run of one block, so that start and
loading do not count. Encoder and runs alternate; figures are medians. Where the CPU encodes, the share in CPU time is
the one to read: there it says the same as that of the rates, and other processes do not disturb it.

With --no-cost the encoder is one that costs nothing: what remains is the cost of reading, tokenizing and writing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.lib import record
from benchmarks.lib.texts import QUERY_TOKENS, texts
from embert.engine import Encoder, Model, Tokenizer, load_encoder, load_model
from embert.engine.batch import PackedBatch, cumulative
from embert.engine.encode_batches import by_length, form_batch, gather, spans
from embert.engine.engine import batch_budget
from embert.server.bulk.job import Job

STUB = "benchmarks.lib.stub_encoders:StubEncoder"
OUTPUTS = {"npy": "vectors.npy", "jsonl": "vectors.jsonl", "parquet": "shards/"}
BLOCK = Job().block_texts
DIFFERENT_TEXTS = 200_000  # then they come again: a corpus has more texts than words


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    model = load_model(options.model)
    tokenizer = model.transformer_folder / "tokenizer.json"
    different = [each.text for each in texts(QUERY_TOKENS, min(options.texts, DIFFERENT_TEXTS), tokenizer)]
    lines = [different[number % len(different)] for number in range(options.texts)]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = {"texts": options.texts, "model": model.model_id} | _runs(model, lines, Path(folder), options)
    _print(figures)
    print(record.write(options.name, figures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.encoder.bulk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; default: the packaged all-MiniLM-L6-v2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--no-cost", action="store_true", help="an encoder that costs nothing")
    parser.add_argument("--outputs", nargs="+", choices=OUTPUTS, default=["npy", "parquet", "jsonl"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where inputs and outputs lie for a while; default: the system's")
    parser.add_argument("--name", default="bulk", help="of the record")
    return parser


def _runs(model: Model, lines: list[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    inputs = {"all": folder / "all.txt", "block": folder / "block.txt"}
    inputs["all"].write_text("".join(f"{line}\n" for line in lines))
    inputs["block"].write_text("".join(f"{line}\n" for line in lines[:BLOCK]))
    rates: dict[str, list[float]] = {"encoder": [], **{name: [] for name in options.outputs}}
    cpu_us: dict[str, list[float]] = {name: [] for name in rates}
    encoder: dict[str, Any] = {}
    count = len(lines) - BLOCK
    choice = STUB if options.no_cost else "auto"
    for _ in range(options.rounds):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            encoder = pool.submit(_encoder_alone, model, options.device, choice, lines[BLOCK:]).result()
        seconds, cpu_s = encoder.pop("seconds")
        rates["encoder"].append(count / seconds)
        cpu_us["encoder"].append(cpu_s / count * 1e6)
        for name in options.outputs:
            (all_s, all_cpu_s), (block_s, block_cpu_s) = (
                _run(model, folder, inputs[size], name, "--device", options.device, "--encoder", choice)
                for size in ("all", "block")
            )
            rates[name].append(count / (all_s - block_s))
            cpu_us[name].append((all_cpu_s - block_cpu_s) / count * 1e6)
    median = {name: statistics.median(each) for name, each in rates.items()}
    cpu = {name: statistics.median(each) for name, each in cpu_us.items()}
    return {
        "encoder": encoder,
        "texts_per_s": median,
        "cpu_us": cpu,
        "share": {name: rate / median["encoder"] for name, rate in median.items()},
        "cpu_share": {name: cpu["encoder"] / each for name, each in cpu.items()},
        "rounds": {"texts_per_s": rates, "cpu_us": cpu_us},
    }


def _encoder_alone(model: Model, device: str, choice: str, lines: list[str]) -> dict[str, Any]:
    """Runs in its own process, because an encoder keeps its memory."""
    encoder = load_encoder(model, device=device, encoder=choice)
    tokenizer = Tokenizer(model)
    batches: list[PackedBatch] = []
    for first in range(0, len(lines), BLOCK):
        encoded = tokenizer.encode(lines[first : first + BLOCK])
        order, starts = by_length(encoded.lengths), cumulative(encoded.lengths)
        batches += [
            form_batch(gather(encoded, order[span], starts), dimensions=0, normalize=True)
            for span in spans(encoded.lengths[order], batch_budget(model, encoder))
        ]
    _forward(encoder, batches[:4])
    began = time.perf_counter(), time.process_time()
    _forward(encoder, batches)
    seconds = time.perf_counter() - began[0], time.process_time() - began[1]
    tokens = sum(batch.tokens for batch in batches)
    return {
        "seconds": seconds,  # of the clock, of CPU time
        "name": encoder.name,
        "device": encoder.device_name,
        "dtype": encoder.dtype,
        "tokens_a_text": tokens / len(lines),
    }


def _forward(encoder: Encoder, batches: Sequence[PackedBatch]) -> None:
    before: Any = None
    for batch in batches:
        ticket = encoder.submit(batch)
        if before is not None:
            encoder.wait(before)
        before = ticket
    encoder.wait(before)


def _run(model: Model, folder: Path, source: Path, output: str, *options: str) -> tuple[float, float]:
    """Seconds of one run: of the clock, and of CPU time of all its processes."""
    target = f"{folder}/{OUTPUTS[output]}"
    command = [sys.executable, "-m", "embert.server.cli.main", "embed", "-q", "-m", str(model.folder)]
    with _removed(Path(target)):
        began = time.perf_counter()
        with subprocess.Popen([*command, "-f", str(source), "-o", target, *options]) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"a run failed: {command}")
    return seconds, usage.ru_utime + usage.ru_stime


@contextmanager
def _removed(path: Path) -> Iterator[None]:
    """A place for an output that nobody reads."""
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)
        path.with_name(path.name).unlink(missing_ok=True)


def _print(figures: dict[str, Any]) -> None:
    rows = [
        (name, f"{rate:,.0f}", f"{figures['share'][name]:.1%}", f"{figures['cpu_us'][name]:.1f}", f"{share:.1%}")
        for (name, rate), share in zip(figures["texts_per_s"].items(), figures["cpu_share"].values(), strict=True)
    ]
    record.print_table(("", "texts/s", "of the encoder's", "µs of CPU a text", "the encoder's part"), rows)
    print(json.dumps(figures["encoder"]))


if __name__ == "__main__":
    main()
