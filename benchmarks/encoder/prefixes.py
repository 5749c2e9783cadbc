"""An encoder on texts with a prefix in common, next to the same texts unshared.

    python -m benchmarks.encoder.prefixes [--layers 2] [--device auto] [--rounds 5]

Qwen3-Embedding-0.6B's shape with random weights and token ids, in the batches that
`Engine` forms. Both ways alternate; figures are the shortest times: of a CPU its own, which other processes disturb
least. Vectors must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.lib import record
from benchmarks.lib.random_model import make_shape
from embert import engine
from embert.engine.encode_batches import encode_batches
from embert.engine.engine import batch_budget
from embert.engine.prefixes import common_prefix
from embert.engine.tasks import NO_SHARING, Task
from embert.engine.tokenization.encoded import Encoded

# Texts, tokens of their prefix, and least and most tokens after it.
WORKLOADS = {
    "100 documents after a query": (100, 60, 100, 100),
    "100 documents of mixed lengths": (100, 60, 40, 200),
    "20 questions about a state": (20, 800, 40, 40),
    "nothing in common": (100, 0, 100, 100),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.prefixes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_shape(Path(scratch), engine.load_model().folder, "qwen3-0.6b", options.layers)
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2048}))
        model = engine.load_model(str(folder), pooling="last-token")
        encoder = engine.load_encoder(model, device=options.device)
    random, rules = np.random.default_rng(0), encoder.sharing
    clock = time.process_time if encoder.device == "cpu" else time.perf_counter
    figures: list[dict[str, str | int | float]] = []
    rows: list[list[str]] = []
    for name, (texts, prefix, low, high) in WORKLOADS.items():
        head = random.integers(0, 32_000, prefix)
        lengths = (prefix + random.integers(low, high + 1, texts)).astype(np.int32)
        ids = np.concatenate([np.append(head, random.integers(0, 32_000, length - prefix)) for length in lengths])
        encoded = Encoded(ids.astype(np.int32), lengths, 0)
        encoder.sharing = rules
        shared = common_prefix(encoded.ids, lengths, Task.EMBED, encoder.sharing)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        vectors: dict[bool, npt.NDArray[np.float32]] = {}
        for _ in range(options.rounds):
            for sharing, lasted_s in seconds.items():
                encoder.sharing = rules if sharing else NO_SHARING
                began = clock()
                batches = encode_batches(encoder, encoded, Task.EMBED, budget=batch_budget(model, encoder))
                numbers, outputs = zip(*batches, strict=True)
                lasted_s.append(clock() - began)
                values = np.concatenate([output[Task.EMBED].values for output in outputs])
                vectors[sharing] = values[np.argsort(np.concatenate(numbers))]
        if not np.array_equal(vectors[True], vectors[False]):
            raise SystemExit(f"{name}: the vectors differ")
        shared_s, unshared_s = (min(lasted_s) for lasted_s in seconds.values())
        figures.append(
            {"texts": name, "tokens": len(ids), "prefix": shared, "shared_s": shared_s, "unshared_s": unshared_s}
        )
        times = f"{shared_s * 1e3:,.1f}", f"{unshared_s * 1e3:,.1f}", f"{unshared_s / shared_s:.2f}"
        rows.append([name, f"{len(ids):,}", str(shared), *times])
    record.print_table(["texts", "tokens", "prefix", "shared, ms", "unshared, ms", "ratio"], rows)
    print(f"\nwritten: {record.write('prefixes', {**vars(options), 'rows': figures})}")


if __name__ == "__main__":
    main()
