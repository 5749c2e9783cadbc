"""The CPU encoder next to its rivals, without HTTP: from token ids and from texts.

    python -m benchmarks.encoder.cpu [--dtype float32 bfloat16] [--workloads query passage] [--scale 0.25]

Each encoder has its default settings. They run in interleaved rounds (interleaved.py); figures are medians over the
rounds. A workload with too few rounds in which no other process ran is marked ~. All vectors are compared before
anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.encoder.cpu.interleaved import ask, measure, processes
from benchmarks.encoder.cpu.workloads import WORKLOADS
from benchmarks.lib import record
from benchmarks.rivals.cpu_encoders import ENCODERS, FROM_IDS, FROM_TEXTS, MAX_LENGTH, Floats

# Below it a rival computes something else. sentence-transformers in bfloat16 has 0.997 against its own float32.
COSINE = {"float32": 0.99999, "float16": 0.999, "bfloat16": 0.99}


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
        with processes(ENCODERS, model.folder, dtype, workloads) as pipes:
            for name, texts in workloads.items():
                _compare(pipes, name, COSINE[dtype])
                ms, quiet = measure(pipes, name, options.rounds)
                rows.append(Row(name, dtype, len(texts), tokens[name], ms, quiet))
                print(f"{dtype} {name}: done", flush=True)
            memory[dtype] = {encoder: ask(pipe, None) / 2**20 for encoder, pipe in pipes.items()}
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.cpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a local folder or a hub id; default: the packaged model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=list(COSINE))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--scale", type=float, default=0.25, help="share of each workload's texts; 1 suits a GPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="a second copy of the JSON in results/")
    return parser


def _compare(pipes: dict[str, Connection], workload: str, least: float) -> None:
    """End the program when encoders disagree."""
    vectors: dict[str, Floats] = {name: ask(pipe, workload) for name, pipe in pipes.items()}
    first = next(iter(vectors))
    for name, rows in vectors.items():
        cosine = float((rows * vectors[first]).sum(1).min())
        if cosine < least:
            raise SystemExit(f"{name} and {first} disagree on {workload}: cosine {cosine:.6f}")


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
