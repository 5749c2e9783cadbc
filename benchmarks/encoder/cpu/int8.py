"""The CPU encoder in int8 next to its own float32, and ONNX Runtime's fused graph in float32 and in dynamic int8.

    python -m benchmarks.encoder.cpu.int8 [--workloads query passage 1x16] [--scale 0.25] [--rounds 9]

From token ids, on a BERT model with its real weights. All sides have a thread for each core that this process may use
(`taskset` limits them). Rivals have their default settings otherwise and run in interleaved rounds (interleaved.py);
figures are medians over the rounds. ~: too few rounds in which no other process ran. What int8 costs is measured
first, against embert's float32, over English sentences: the worst cosine, the median, and nearest neighbors kept.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.encoder.cpu.interleaved import ask, measure, processes
from benchmarks.encoder.cpu.workloads import WORKLOADS, Workload
from benchmarks.lib import record
from benchmarks.lib.texts import Lengths, english
from benchmarks.rivals.int8_encoders import RIVALS

ENGLISH = "english"
SAME = 0.99999  # of two float32 encoders; below it one computes something else


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.cpu.int8", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a local folder or a hub id; default: the packaged model")
    named = ["query", "passage", "8x128", "1x16", "1x128", "1x512"]
    parser.add_argument("--workloads", nargs="+", default=named, choices=[*WORKLOADS, "8x128"])
    parser.add_argument("--scale", type=float, default=0.25, help="share of each workload's texts")
    parser.add_argument("--texts", type=int, default=1000, help="English sentences to compare vectors on")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    from embert import engine
    from embert.engine.host import usable_cpus
    from embert.engine.quantization.accuracy import accuracy_of_rows

    model = engine.load_model(options.model)
    known = {**WORKLOADS, "8x128": Workload("8x128", 8, Lengths(128, 128, 128))}
    workloads: dict[str, Sequence[str]] = {
        name: known[name].texts(model.transformer_folder / "tokenizer.json", 1 if name == "8x128" else options.scale)
        for name in options.workloads
    }
    rows: list[dict[str, Any]] = []
    costs = {}
    load = os.getloadavg()
    with processes(RIVALS, model.folder, "float32", {ENGLISH: english(options.texts), **workloads}) as pipes:
        vectors = {name: ask(pipe, ENGLISH) for name, pipe in pipes.items()}
        for name, each in vectors.items():
            costs[name] = accuracy = accuracy_of_rows(each, vectors["embert float32"], dtype="float32")
            if "float32" in name and accuracy.worst < SAME:
                raise SystemExit(f"{name} and embert disagree: cosine {accuracy.worst:.6f}")
        for name in workloads:
            for pipe in pipes.values():
                ask(pipe, name)
            ms, quiet = measure(pipes, name, options.rounds)
            rows.append({"workload": name, "texts": len(workloads[name]), "ms": ms, "quiet": quiet})
            print(f"{name}: done", flush=True)
    print(f"\n{usable_cpus()} threads each; {options.texts} English sentences against embert's float32\n")
    record.print_table(
        ["", "worst cosine", "median", "ten nearest kept"],
        [[name, f"{a.worst:.5f}", f"{a.median:.5f}", f"{a.neighbors or 0:.1%}"] for name, a in costs.items()],
    )
    ours, *rivals = RIVALS
    print("\nms from token ids, medians; a ratio above 1 means that embert in int8 is faster; ~: other processes ran\n")
    record.print_table(
        ["workload", "texts", ours, *(cell for rival in rivals for cell in (rival, "ratio"))],
        [
            [
                row["workload"] + ("" if row["quiet"] else " ~"),
                str(row["texts"]),
                f"{row['ms'][ours]:.2f}",
                *(
                    cell
                    for rival in rivals
                    for cell in (f"{row['ms'][rival]:.2f}", f"{row['ms'][rival] / row['ms'][ours]:.2f}")
                ),
            ]
            for row in rows
        ],
    )
    figures = {
        "model": model.model_id,
        "rounds": options.rounds,
        "threads": usable_cpus(),
        "load_before": load,
        "load_after": os.getloadavg(),
        "costs": {name: asdict(each) for name, each in costs.items()},
        "rows": rows,
    }
    print(f"\nload {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after\nwritten: {record.write('int8-cpu', figures)}")


if __name__ == "__main__":
    main()
