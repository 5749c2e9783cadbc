"""Builds of the CUDA encoder side by side on one GPU: do their vectors agree to the bit, and how long does each take?

    python -m benchmarks.encoder.builds before=OLD.so after=NEW.so [--models base minilm=FOLDER] [--workloads passage]

For work on csrc/. Machines differ by more than most changes gain, and so does one machine from minute to minute, so the
rounds of the builds are interleaved, each in its own process. Times are those of benchmarks.encoder.gpu: bursts
after a rest, and sustained load for the workloads of --sustained. Figures are medians; ratios are to the first build.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.encoder.cuda_process import CudaProcess
from benchmarks.encoder.gpu_workloads import lengths_of, model_folder, random_batch
from benchmarks.lib import record


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    builds = dict(options.builds)
    if len(builds) < len(options.builds):
        raise SystemExit("two builds have the same name")
    rows: list[dict[str, Any]] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(name, Path(scratch))
            encoders = {build: CudaProcess(folder, "mean", path) for build, path in builds.items()}
            for workload in options.workloads:
                rows.append({"model": name.partition("=")[0], **compared(encoders, workload, options)})
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            for encoder in encoders.values():
                encoder.close()
    print()
    record.print_table(["model", "workload", "tokens", "state", "build", "ms", "ratio", "bits"], _lines(rows))
    print(f"\nwritten: {record.write('builds', {'builds': builds, 'rounds': options.rounds, 'rows': rows})}")


def compared(encoders: dict[str, CudaProcess], workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one workload: ms by build in bursts and under load, and how each build's vectors differ from the first's."""
    lengths = lengths_of(workload)
    batch = random_batch(lengths)
    vectors = {build: encoder.ask("vectors", batch) for build, encoder in encoders.items()}
    first = next(iter(vectors.values()))
    times: dict[str, dict[str, list[float]]] = {}
    for state in ("burst", "sustained") if workload in options.sustained else ("burst",):
        times[state] = {build: [] for build in encoders}
        for _ in range(options.rounds if state == "burst" else 2):
            for build, encoder in encoders.items():
                times[state][build].append(encoder.ask(state, batch))
    return {
        "workload": workload,
        "tokens": int(lengths.sum()),
        "ms": {
            state: {build: statistics.median(each) for build, each in by_build.items()}
            for state, by_build in times.items()
        },
        "differences": {build: differences(each, first) for build, each in vectors.items()},
    }


def differences(ours: npt.NDArray[np.float32], first: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Count the elements with other bits; `largest` is the largest difference, or None where that is not finite."""
    largest = float(np.abs(ours - first).max(initial=0))
    return {
        "elements": int((ours.view(np.uint32) != first.view(np.uint32)).sum()),
        "of": first.size,
        "largest": largest if math.isfinite(largest) else None,
    }


def _lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    lines = []
    for row in rows:
        for state, ms in row["ms"].items():
            first = next(iter(ms.values()))
            for build, each in ms.items():
                other = row["differences"][build]
                largest = "not finite" if other["largest"] is None else f"{other['largest']:.1e}"
                bits = f"{other['elements']:,} of {other['of']:,} differ, by up to {largest}"
                bits = bits if other["elements"] else "the same"
                lines.append([
                    row["model"], row["workload"], f"{row['tokens']:,}", state, build, f"{each:.3f}",
                    f"{each / first:.3f}", bits,
                ])  # fmt: skip
    return lines


def _build(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE, or the file does not exist")
    return name, path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.builds", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("builds", nargs="+", type=_build, metavar="NAME=FILE", help="the extension of each build")
    parser.add_argument("--models", nargs="+", default=["base", "large", "narrow"], help="as benchmarks.encoder.gpu")
    parser.add_argument("--workloads", nargs="+", default=["passage"])
    parser.add_argument("--sustained", nargs="*", default=[], help="workloads to time under sustained load too")
    parser.add_argument("--rounds", type=int, default=9)
    return parser


if __name__ == "__main__":
    main()
