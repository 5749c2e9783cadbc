"""The CPU encoder beside its rivals, without HTTP: from token ids and from texts.

    python -m benchmarks.encoder.cpu [--dtype float32 bfloat16] [--workloads query passage] [--scale 0.25] [--plot PNG]

Each encoder has a process of its own for the whole run, with its default settings. They take turns round by round, so
that a change in the machine's speed affects them alike. Figures are medians over the rounds. A round in which other
processes use CPU time is repeated, a few times; a workload with too few quiet rounds is marked ~. All vectors are
compared before anything is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.encoder import cpu_plot
from benchmarks.encoder.cpu_workloads import WORKLOADS
from benchmarks.lib import record
from benchmarks.rivals.cpu_encoders import ENCODERS, FROM_IDS, FROM_TEXTS, MAX_LENGTH, Floats, serve

# Below it a rival computes something else. sentence-transformers in bfloat16 has 0.997 against its own float32.
COSINE = {"float32": 0.99999, "float16": 0.999, "bfloat16": 0.99}

QUIET_CORES = 0.15  # most cores that other processes may use during a turn
PATIENCE = 4  # at most so many times the rounds asked for


@dataclass(frozen=True, slots=True)
class Row:
    """One workload in one dtype: medians in ms, by encoder."""

    workload: str
    dtype: str
    texts: int
    tokens: int  # without padding
    ms: dict[str, float]
    quiet: bool


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    options = _parser().parse_args(argv)
    from embert import engine

    model = engine.load_model(options.model)
    tokenizer = engine.Tokenizer(model)
    workloads = {
        name: WORKLOADS[name].texts(model.transformer_folder / "tokenizer.json", options.scale)
        for name in options.workloads
    }
    tokens = {
        name: sum(min(len(t), MAX_LENGTH) for t in tokenizer.tokenize(texts)) for name, texts in workloads.items()
    }
    rows, memory = [], {}
    for dtype in options.dtype:
        with _processes(model.folder, dtype, workloads) as processes:
            for name, texts in workloads.items():
                _compare(processes, name, COSINE[dtype])
                ms, quiet = _measure(processes, name, options.rounds)
                rows.append(Row(name, dtype, len(texts), tokens[name], ms, quiet))
                print(f"{dtype} {name}: done", flush=True)
            memory[dtype] = {encoder: _ask(pipe, None) / 2**20 for encoder, pipe in processes.items()}
    _print(rows, memory)
    figures = {
        "model": model.model_id,
        "scale": options.scale,
        "rounds": options.rounds,
        "rows": [asdict(row) for row in rows],
        "peak_memory_mib": memory,
    }
    path = record.write("encoder", figures)
    if options.json:
        options.json.write_text(path.read_text())
    print(f"\nwritten: {path}")
    if options.plot:
        cpu_plot.draw(path, options.plot)
        print(f"written: {options.plot}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.cpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a local folder or a hub id; default: the packaged model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=list(COSINE))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--scale", type=float, default=0.25, help="share of each workload's texts; 1 suits a GPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="a second copy of the JSON in results/")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the ratios")
    return parser


@contextmanager
def _processes(folder: Path, dtype: str, workloads: dict[str, Sequence[str]]) -> Iterator[dict[str, Connection]]:
    """Start every encoder, one after the other; end them with the block."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    started = []
    try:
        for name in ENCODERS:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(name, folder, dtype, workloads, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            ours.recv()
            pipes[name] = ours
        yield pipes
    finally:
        for process in started:
            process.terminate()
            process.join()


def _ask(pipe: Connection, workload: str | None) -> Any:
    pipe.send(workload)
    return pipe.recv()


def _compare(processes: dict[str, Connection], workload: str, least: float) -> None:
    """End the program when encoders disagree."""
    vectors: dict[str, Floats] = {name: _ask(pipe, workload) for name, pipe in processes.items()}
    first = next(iter(vectors))
    for name, rows in vectors.items():
        cosine = float((rows * vectors[first]).sum(1).min())
        if cosine < least:
            raise SystemExit(f"{name} and {first} disagree on {workload}: cosine {cosine:.6f}")


def _measure(processes: dict[str, Connection], workload: str, rounds: int) -> tuple[dict[str, float], bool]:
    """Return medians in ms by encoder, and whether enough rounds were quiet."""
    quiet: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    _round(processes, workload)  # a warm-up
    while len(quiet) < rounds and len(quiet) + len(disturbed) < PATIENCE * rounds:
        seconds, others = _round(processes, workload)
        (quiet if others < QUIET_CORES else disturbed).append(seconds)
    enough = len(quiet) >= 3
    chosen = quiet if enough else quiet + disturbed
    return {name: statistics.median(seconds[name] for seconds in chosen) * 1e3 for name in processes}, enough


def _round(processes: dict[str, Connection], workload: str) -> tuple[dict[str, float], float]:
    """Return seconds by encoder, and the cores that other processes used during the worst turn."""
    seconds, others = {}, 0.0
    for name, pipe in processes.items():
        start, busy = time.perf_counter(), _busy_s()
        seconds[name], cpu = _ask(pipe, workload)
        others = max(others, (_busy_s() - busy - cpu) / (time.perf_counter() - start))
    return seconds, others


def _busy_s() -> float:
    """Return the CPU seconds of all processes since the machine started."""
    user, nice, system, _idle, _waiting, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _print(rows: Sequence[Row], memory: dict[str, dict[str, float]]) -> None:
    for title, encoders in (("From texts", list(FROM_TEXTS)), ("From token ids", list(FROM_IDS))):
        ours, *rivals = encoders
        print(f"\n{title}, medians; a ratio above 1 means that embert is faster; ~: other processes ran\n")
        head = ["workload", "dtype", "texts", "tokens", f"{ours} ms", "tokens/s"]
        record.print_table(
            [*head, *(cell for rival in rivals for cell in (f"{rival} ms", "ratio"))],
            [
                [
                    row.workload + ("" if row.quiet else " ~"),
                    row.dtype,
                    str(row.texts),
                    f"{row.tokens:,}",
                    f"{row.ms[ours]:.2f}",
                    f"{row.tokens / row.ms[ours] * 1e3:,.0f}",
                    *(cell for rival in rivals for cell in (f"{row.ms[rival]:.2f}", f"{_ratio(row, ours, rival):.2f}")),
                ]
                for row in rows
            ],
        )
    print("\nPeak memory of each process, MiB\n")
    record.print_table(
        ["dtype", *ENCODERS], [[dtype, *(f"{mib[name]:.0f}" for name in ENCODERS)] for dtype, mib in memory.items()]
    )


def _ratio(row: Row, ours: str, rival: str) -> float:
    return row.ms[rival] / row.ms[ours]


if __name__ == "__main__":
    main()
