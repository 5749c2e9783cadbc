"""Entities next to transformers' token classification pipeline: how many texts differ, and by how much scores do.

    python -m benchmarks.encoder.cpu.entities [--texts 500]

BERT with random weights, an uncased and a cased vocabulary; texts of ASCII, accents, CJK, emoji, right-to-left script
and mixtures, from one word to several sequences of the model. Every strategy, with and without a stride. Ends with
status 1 where entities differ, or scores by more than 1e-4.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from benchmarks.lib import record
from embert.engine import Engine
from embert.engine.entities import STRATEGIES, Aggregation
from tests.oracles.pipelines import LABELS, random_texts, write

STRIDE = 7  # tokens, of sequences of 48
BATCH = 32  # sequences that the pipeline computes at once
TOLERANCE = 1e-4


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.cpu.entities", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=int, default=500)
    options = parser.parse_args(argv)
    texts, rows = random_texts(options.texts), []
    for vocabulary in ("uncased", "cased"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = write(Path(scratch), vocabulary, "bert", "ForTokenClassification", LABELS)
            pipeline: Any = transformers.pipeline("token-classification", str(folder), device="cpu")
            with Engine.load(str(folder), device="cpu") as engine:
                for strategy in STRATEGIES:
                    for stride in (None,) if strategy == "none" else (None, STRIDE):
                        figures = compared(engine, pipeline, texts, strategy, stride)
                        rows.append({"vocabulary": vocabulary, "strategy": strategy, "stride": stride, **figures})
    head = ["vocabulary", "strategy", "stride", "entities", "texts that differ", "largest difference of scores"]
    record.print_table(
        head,
        [
            [
                row["vocabulary"],
                row["strategy"],
                str(row["stride"]),
                str(row["entities"]),
                str(row["differ"]),
                f"{row['scores']:.1e}",
            ]
            for row in rows
        ],
    )
    facts = {"texts": len(texts), "transformers": transformers.__version__, "rows": rows}
    print(f"\nwritten: {record.write('entities', facts)}")
    return int(any(row["differ"] or row["scores"] > TOLERANCE for row in rows))


def compared(
    engine: Engine, pipeline: Any, texts: Sequence[str], strategy: Aggregation, stride: int | None
) -> dict[str, Any]:
    """The number of entities, that of texts with others than the pipeline's, and the largest difference of scores."""
    entities = differ = 0
    largest = 0.0
    responses = engine.entities(texts, aggregation_strategy=strategy, stride=stride)
    oracle = pipeline(list(texts), batch_size=BATCH, aggregation_strategy=strategy, stride=stride)
    for response, expected in zip(responses, oracle, strict=True):
        entities += len(expected)
        ours = [(each.label, each.word, each.start, each.end, each.index) for each in response]
        theirs = [
            (each.get("entity", each.get("entity_group")), each["word"], each["start"], each["end"], each.get("index"))
            for each in expected
        ]
        if ours != theirs:
            differ += 1
            continue
        apart = np.subtract([each.score for each in response], [each["score"] for each in expected])
        largest = max(largest, float(np.abs(apart).max(initial=0)))
    return {"entities": entities, "differ": differ, "scores": largest}


if __name__ == "__main__":
    raise SystemExit(main())
