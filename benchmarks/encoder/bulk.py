"""`embert embed` beside the encoder alone, on the same short texts, and what the host's part costs a text.

    python -m benchmarks.encoder.bulk [--texts 1000000] [--outputs npy parquet jsonl] [--rounds 3]
        [--host-only | --runs-only]

The encoder alone gets ids that were made beforehand, in the batches that `embert embed` forms, two in flight. A rate is
that of all texts but the first block's: the time of a run of all, less that of a run of one block, so that start and
loading do not count. Encoder and runs take turns; figures are medians. Where the CPU encodes, the share in CPU time is
the one to read: there it says the same as that of the rates, and other processes do not disturb it.

The host's part is timed step by step, in one process and in CPU time, with an encoder that costs nothing; then as whole
runs. From the steps follows what a machine of 16 cores and one GPU can feed: text processes share the work, while
reading has a thread, encoding two, and the system lets one process at a time write to a file.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.lib import record
from benchmarks.lib.stub_encoders import StubEncoder
from benchmarks.lib.texts import QUERY_TOKENS, texts
from embert.engine import Encoder, Model, Tokenizer, load_encoder, load_model
from embert.engine.batch import PackedBatch, cumulative
from embert.engine.encode_batches import by_length, gathered, packed, spans
from embert.engine.engine import batch_budget
from embert.server.bulk.engine_stage import Answer, EngineStage
from embert.server.bulk.input.line_blocks import LineBlocks
from embert.server.bulk.input.read_rows import schema_of
from embert.server.bulk.input.table_blocks import TableBlocks
from embert.server.bulk.job import Job
from embert.server.bulk.output.place import Place, write_bytes
from embert.server.bulk.slots import Block, Slots
from embert.server.bulk.text_stage import TextStage

OUTPUTS = {"npy": "vectors.npy", "jsonl": "vectors.jsonl", "parquet": "shards/"}
BLOCK = Job().block_texts
CORES = 16
DIFFERENT_TEXTS = 200_000  # then they come again: a corpus has more texts than words


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    options = _parser().parse_args(argv)
    model = load_model(options.model)
    tokenizer = model.transformer_folder / "tokenizer.json"
    different = [each.text for each in texts(QUERY_TOKENS, min(options.texts, DIFFERENT_TEXTS), tokenizer)]
    lines = [different[number % len(different)] for number in range(options.texts)]
    figures: dict[str, Any] = {"texts": options.texts, "model": model.model_id}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if not options.runs_only:
            figures["host_us"] = host = _host(model, lines[: options.host_texts], Path(folder))
            figures["host_texts_per_s"] = _host_rates(host)
            figures["host_whole_us"] = _whole_runs(model, lines[: options.host_texts], Path(folder), options.outputs)
        if not options.host_only:
            figures["runs"] = _runs(model, lines, Path(folder), options)
    _print(figures)
    print(record.write(options.name, figures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.encoder.bulk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; default: the packaged all-MiniLM-L6-v2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--host-texts", type=int, default=100_000, help="texts that the host's steps are timed with")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--host-only", action="store_true", help="no encoder and no runs")
    only.add_argument("--runs-only", action="store_true", help="no steps of the host; arrays need no pyarrow then")
    parser.add_argument("--outputs", nargs="+", choices=OUTPUTS, default=["npy", "parquet", "jsonl"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where inputs and outputs lie for a while; default: the system's")
    parser.add_argument("--name", default="bulk", help="of the record")
    return parser


# --- the host's part, step by step ---


def _host(model: Model, lines: list[str], folder: Path) -> dict[str, float]:
    """Microseconds of CPU time a text of each step, the least of three passes: other processes do not count."""
    import pyarrow
    import pyarrow.parquet

    text, table = folder / "host.txt", folder / "host.parquet"
    text.write_text("".join(f"{line}\n" for line in lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), table)
    job = Job()
    parquet = replace(job, output_format="parquet", schema=schema_of(job, None).serialize().to_pybytes())
    encoder = StubEncoder(model, device="cpu", dtype="auto", max_batch_tokens=None)
    slots = Slots.create(1)
    stage, engine = TextStage(job, model), EngineStage(job, model, encoder, slots, lambda _: None)
    group_stage = TextStage(parquet, model)
    out = os.open(folder / "host.out", os.O_RDWR | os.O_CREAT)
    answers: list[Answer] = []
    steps: dict[str, Callable[[Block], object]] = {
        "tokenize": lambda block: stage.prepare(block, slots),
        "form batches": lambda block: answers.extend(_encoded(engine, block)),
        "copy vectors into the slot": lambda _: [engine.land(answer) for answer in answers],
        "order and write an array": lambda block: stage.write(block, slots, place()),
        "write an array": lambda block: write_bytes(place(), slots.data(block, "values")),
        "format JSON lines": lambda block: stage.finish(block, slots),
        "write JSON lines": lambda block: stage.write(block, slots, place()),
        "format Parquet": lambda block: group_stage.finish(block, slots),
        "write Parquet": lambda block: group_stage.write(block, slots, place()),
    }

    def place() -> Place:
        """The end of the file, where the next block goes."""
        return Place(out, os.fstat(out).st_size, folder)

    passes: list[dict[str, float]] = []
    for _ in range(3):
        spent = dict.fromkeys(steps, 0.0)
        with _source(text, job) as source:
            spent["read lines"] = _timed(_blocks(source, slots, spent, steps, answers))
        spent["read lines"] -= sum(spent[name] for name in steps)
        with TableBlocks([str(table)], replace(job, input_format="parquet")) as rows:
            spent["read Parquet"] = _timed(_all(rows))
        spent["tokenize by the library"] = _library(model, lines)
        passes.append({name: seconds / len(lines) * 1e6 for name, seconds in spent.items()})
        os.ftruncate(out, 0)
    os.close(out)
    slots.close()
    return {name: min(each[name] for each in passes) for name in passes[0]}


def _source(path: Path, job: Job) -> LineBlocks:
    assert job.input_format == "text"
    return LineBlocks([str(path)])


def _blocks(
    source: LineBlocks,
    slots: Slots,
    spent: dict[str, float],
    steps: dict[str, Callable[[Block], object]],
    answers: list[Answer],
) -> Iterator[None]:
    """Send each block through all steps, and add up the seconds of each."""
    while (piece := source.take(BLOCK)) is not None:
        answers.clear()
        block = Block(0, piece.rows, piece.parts, slot=0)
        slots.put(block, "payload", piece.payload)
        for name, step in steps.items():
            began = time.process_time()
            step(block)
            spent[name] += time.process_time() - began
        yield


def _encoded(engine: EngineStage, block: Block) -> Iterator[Answer]:
    yield from engine.feed(block)
    while engine.is_busy:
        yield engine.finish_one()


def _all(source: TableBlocks) -> Iterator[None]:
    while source.take(BLOCK) is not None:
        yield


def _timed(work: Iterator[None]) -> float:
    began = time.process_time()
    for _ in work:
        pass
    return time.process_time() - began


def _library(model: Model, lines: list[str]) -> float:
    """CPU seconds of tokenizing without the cache of words, as other tokenizers than BERT's do: on one thread."""
    tokenizer = Tokenizer(model)
    began = time.process_time()
    for first in range(0, len(lines), BLOCK):
        tokenizer._backend.library_ids(lines[first : first + BLOCK])
    return time.process_time() - began


def _host_rates(us: dict[str, float]) -> dict[str, float]:
    """Texts a second that 16 cores and one GPU could feed at these costs: the slowest part's.

    Text processes share formatting and writing, but the system lets one at a time write to a file.
    """
    processes = min(CORES - 2, 12)  # beside an engine and the command's own process
    rates = {}
    for name, format_us, order_us, write_us in (
        ("npy", 0.0, us["order and write an array"] - us["write an array"], us["write an array"]),
        ("parquet", us["format Parquet"], 0.0, us["write Parquet"]),
        ("jsonl", us["format JSON lines"], 0.0, us["write JSON lines"]),
    ):
        for tokenize in ("tokenize", "tokenize by the library"):
            alone = us["read lines"], us["form batches"], us["copy vectors into the slot"], write_us
            slowest = max(*alone, (us[tokenize] + format_us + order_us + write_us) / processes)
            rates[f"{name}, {tokenize}"] = 1e6 / slowest
    return rates


# --- whole runs beside the encoder alone ---


def _runs(model: Model, lines: list[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    inputs = {"all": folder / "all.txt", "block": folder / "block.txt"}
    inputs["all"].write_text("".join(f"{line}\n" for line in lines))
    inputs["block"].write_text("".join(f"{line}\n" for line in lines[:BLOCK]))
    rates: dict[str, list[float]] = {"encoder": [], **{name: [] for name in options.outputs}}
    cpu_us: dict[str, list[float]] = {name: [] for name in rates}
    encoder: dict[str, Any] = {}
    count = len(lines) - BLOCK
    for _ in range(options.rounds):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            encoder = pool.submit(_encoder_alone, model, options.device, lines[BLOCK:]).result()
        seconds, cpu_s = encoder.pop("seconds")
        rates["encoder"].append(count / seconds)
        cpu_us["encoder"].append(cpu_s / count * 1e6)
        for name in options.outputs:
            (all_s, all_cpu_s), (block_s, block_cpu_s) = (
                _run(model, folder, inputs[size], name, "--device", options.device) for size in ("all", "block")
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


def _whole_runs(model: Model, lines: list[str], folder: Path, outputs: Sequence[str]) -> dict[str, float]:
    """Microseconds of CPU time a text of runs whose encoder costs nothing, all processes together."""
    inputs = folder / "whole.txt", folder / "one.txt"
    for path, some in zip(inputs, (lines, lines[:BLOCK]), strict=True):
        path.write_text("".join(f"{line}\n" for line in some))
    stub = "--encoder", "benchmarks.lib.stub_encoders:StubEncoder"
    found = {}
    for name in outputs:
        (_, whole), (_, one) = (_run(model, folder, path, name, *stub) for path in inputs)
        found[name] = (whole - one) / (len(lines) - BLOCK) * 1e6
    return found


def _encoder_alone(model: Model, device: str, lines: list[str]) -> dict[str, Any]:
    """In a process of its own, because an encoder keeps its memory."""
    encoder = load_encoder(model, device=device)
    tokenizer = Tokenizer(model)
    batches: list[PackedBatch] = []
    for first in range(0, len(lines), BLOCK):
        encoded = tokenizer.encode(lines[first : first + BLOCK], truncate=True)
        order, starts = by_length(encoded.lengths), cumulative(encoded.lengths)
        batches += [
            packed(gathered(encoded, order[span], starts), dimensions=0, normalize=True)
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
    if "host_us" in figures:
        record.print_table(
            ("step", "µs of CPU a text"), [(name, f"{us:.2f}") for name, us in figures["host_us"].items()]
        )
        rates = figures["host_texts_per_s"].items()
        record.print_table((f"{CORES} cores feed", "texts/s"), [(name, f"{rate:,.0f}") for name, rate in rates])
        whole = figures["host_whole_us"].items()
        record.print_table(
            ("whole run, encoder of no cost", "µs of CPU a text"), [(name, f"{us:.2f}") for name, us in whole]
        )
    if "runs" in figures:
        runs = figures["runs"]
        rows = [
            (name, f"{rate:,.0f}", f"{runs['share'][name]:.1%}", f"{runs['cpu_us'][name]:.1f}", f"{share:.1%}")
            for (name, rate), share in zip(runs["texts_per_s"].items(), runs["cpu_share"].values(), strict=True)
        ]
        record.print_table(("", "texts/s", "of the encoder's", "µs of CPU a text", "the encoder's part"), rows)
        print(json.dumps(runs["encoder"]))


if __name__ == "__main__":
    main()
