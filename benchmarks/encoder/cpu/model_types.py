"""Newer models on the CPU next to transformers' own classes, from token ids; and what windows cost in long texts.

    python -m benchmarks.encoder.cpu.model_types [--shapes nomic-v1.5 modernbert] [--layers 6] [--rounds 9]

Models have the widths of those that people deploy, fewer layers and random weights. Passages are of mixed lengths.
Rivals have their default settings and run in interleaved rounds (interleaved.py); figures are medians over the rounds.
~: too few rounds in which no other process ran. Vectors are compared before anything is timed. Windows: a model whose
layers all have a window of 64 tokens on each side; one text of 8 192 tokens and texts of 512 tokens, as many in all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.encoder.cpu.interleaved import ask, measure, processes
from benchmarks.encoder.cpu.workloads import WORKLOADS
from benchmarks.lib import record
from benchmarks.lib.random_model import SHAPES, make_shape
from benchmarks.rivals.cpu_encoders import FROM_IDS, Floats

WINDOWED = "windowed"
COSINE = {"float32": 0.99999, "bfloat16": 0.99}
LONG, SHORT = 8192, 512  # tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.encoder.cpu.model_types", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", nargs="+", default=[name for name in SHAPES if name != WINDOWED], choices=SHAPES)
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=list(COSINE))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--scale", type=float, default=0.25, help="share of the workload's texts")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    from embert import engine

    default = engine.load_model().folder
    workloads = {"passage": WORKLOADS["passage"].texts(default / "tokenizer.json", options.scale)}
    rows = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_shape(Path(scratch), default, shape, options.layers)
            for dtype in options.dtype:
                with processes(FROM_IDS, folder, dtype, workloads) as pipes:
                    _compare(pipes, shape, COSINE[dtype])
                    ms, quiet = measure(pipes, "passage", options.rounds)
                    rows.append({"shape": shape, "dtype": dtype, "ms": ms, "quiet": quiet})
    ours, rival = FROM_IDS
    record.print_table(
        ["passages", "dtype", f"{ours} ms", f"{rival} ms", "ratio"],
        [
            [
                row["shape"] + ("" if row["quiet"] else " ~"),
                row["dtype"],
                f"{row['ms'][ours]:.1f}",
                f"{row['ms'][rival]:.1f}",
                f"{row['ms'][rival] / row['ms'][ours]:.2f}",
            ]
            for row in rows
        ],
    )
    windows = _windows(default, options.layers, max(3, options.rounds // 3))
    print(f"\nwindows of 64 tokens: a token of {LONG:,} costs {windows['ratio']:.2f} times one of {SHORT}")
    figures = {"layers": options.layers, "rounds": options.rounds, "rows": rows, "windows": windows}
    print(f"\nwritten: {record.write('families', figures)}")


def _windows(default: Path, layers: int, rounds: int) -> dict[str, float]:
    """Seconds of one long text and of as many tokens in short ones, interleaved, and their ratio."""
    from embert import engine

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_shape(Path(scratch), default, WINDOWED, layers)
        encoder = engine.Engine.load(engine.load_model(str(folder)), device="cpu", max_batch_tokens=LONG).encoder
        ids = np.random.default_rng(0).integers(1000, 20000, LONG).astype(np.int32)
        batches = {name: engine.pack(np.split(ids, LONG // each)) for name, each in (("long", LONG), ("short", SHORT))}
        taken: dict[str, list[float]] = {name: [] for name in batches}
        for number in range(rounds + 1):  # the first round makes kernels
            for name, batch in batches.items():
                started = time.perf_counter()
                encoder.encode(batch)
                if number:
                    taken[name].append(time.perf_counter() - started)
    medians = {f"{name}_s": statistics.median(each) for name, each in taken.items()}
    ratios = [a / b for a, b in zip(taken["long"], taken["short"], strict=True)]
    return {**medians, "ratio": statistics.median(ratios)}


def _compare(pipes: dict[str, Connection], shape: str, least: float) -> None:
    """End the program when rivals disagree."""
    vectors: dict[str, Floats] = {name: ask(pipe, "passage") for name, pipe in pipes.items()}
    first, *others = vectors
    for name in others:
        cosine = float((vectors[name] * vectors[first]).sum(1).min())
        if cosine < least:
            raise SystemExit(f"{name} and {first} disagree on {shape}: cosine {cosine:.6f}")


if __name__ == "__main__":
    main()
