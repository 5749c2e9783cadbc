"""Reranking on the CPU next to sentence-transformers' CrossEncoder, from texts, without HTTP.

    python -m benchmarks.encoder.cpu.rerank [--dtype float32 bfloat16] [--rounds 15]

The model has ms-marco-MiniLM-L6's shape and random weights. A query has about 11 tokens; it is scored with 32 passages,
so that pairs have about 100 tokens, either of mixed lengths or all of nearly the same. Rivals have their default
settings and run in interleaved rounds (interleaved.py); figures are medians over the rounds. ~: too few rounds in which
no other process ran. Scores are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.encoder.cpu.interleaved import ask, measure, processes
from benchmarks.lib import record
from benchmarks.lib.random_model import make_reranker
from benchmarks.lib.texts import Lengths, texts
from benchmarks.rivals.cpu_encoders import Floats
from benchmarks.rivals.cpu_rerankers import RERANKERS

PASSAGES = 32
QUERY = Lengths(11, 11, 11)
WORKLOADS = {"mixed": Lengths(mean=90, low=16, high=256), "equal": Lengths(90, 90, 90)}
# Above it a rival computes something else.
DIFFERENCE = {"float32": 1e-5, "bfloat16": 0.05}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.cpu.rerank", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=list(DIFFERENCE))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    from embert import engine

    default = engine.load_model().folder
    (query,) = texts(QUERY, 1, default / "tokenizer.json", seed=2)
    passages = {name: texts(lengths, PASSAGES, default / "tokenizer.json") for name, lengths in WORKLOADS.items()}
    pairs = {name: [(query.text, passage.text) for passage in of] for name, of in passages.items()}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_reranker(Path(scratch), default)
        counted = engine.Tokenizer(engine.load_model(str(folder)))
        for dtype in options.dtype:
            with processes(RERANKERS, folder, dtype, pairs) as pipes:
                for name, named_pairs in pairs.items():
                    firsts, seconds = zip(*named_pairs, strict=True)
                    tokens = counted.encode_pairs(firsts, seconds).tokens
                    _compare(pipes, name, DIFFERENCE[dtype])
                    ms, quiet = measure(pipes, name, options.rounds)
                    rows.append({"pairs": name, "dtype": dtype, "tokens": tokens, "ms": ms, "quiet": quiet})
    ours, rival = RERANKERS
    record.print_table(
        [f"{PASSAGES} pairs", "dtype", "tokens", f"{ours} ms", f"{rival} ms", "ratio"],
        [
            [
                row["pairs"] + ("" if row["quiet"] else " ~"),
                row["dtype"],
                f"{row['tokens']:,}",
                f"{row['ms'][ours]:.1f}",
                f"{row['ms'][rival]:.1f}",
                f"{row['ms'][rival] / row['ms'][ours]:.2f}",
            ]
            for row in rows
        ],
    )
    print(f"\nwritten: {record.write('rerank', {'rounds': options.rounds, 'rows': rows})}")


def _compare(pipes: dict[str, Connection], workload: str, most: float) -> None:
    """End the program when rivals disagree."""
    scores: dict[str, Floats] = {name: ask(pipe, workload) for name, pipe in pipes.items()}
    first, *others = scores
    for name in others:
        difference = float(np.abs(scores[name] - scores[first]).max())
        if difference > most:
            raise SystemExit(f"{name} and {first} disagree on {workload}: a score differs by {difference:.2g}")
    print(f"{workload}: scores from {scores[first].min():.3f} to {scores[first].max():.3f}", flush=True)


if __name__ == "__main__":
    main()
