"""Does Ray Data on one machine embed as fast as `embert embed`?

    python -m benchmarks.ray [--texts 40000] [--lengths query] [--turns 5] [--device cpu] [--actors 1]

Both embed the same texts in turns, each from files to files, with all cores or the GPU. Each runs one text first: the
difference of the two times is the rate, and the first time is the start, which is reported apart. Ray has a cluster of
this machine alone, which is up before the clock starts. The last line has the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lib import record
from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, texts
from embert import load_model

LENGTHS = {"query": QUERY_TOKENS, "passage": PASSAGE_TOKENS}
FILES = 8  # of Ray's input
TARGET = 0.95
NO_NEWS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds for one text, and the rate of the others."""

    start_s: float
    texts_per_s: float


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="benchmarks.ray", description=__doc__)
    parser.add_argument("--texts", type=int, default=40_000)
    parser.add_argument("--lengths", choices=sorted(LENGTHS), default="query")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--actors", type=int, default=1, help="of Ray, which share the GPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embert-ray-") as name:
        folder = Path(name)
        tokenizer = load_model().transformer_folder / "tokenizer.json"
        made = texts(LENGTHS[arguments.lengths], arguments.texts, tokenizer)
        write(folder, [each.text for each in made])
        turns = []
        for turn in range(arguments.turns):
            # The one that begins alternates, so that what drifts is nobody's.
            order = (embert_embed, ray_data) if turn % 2 == 0 else (ray_data, embert_embed)
            done = {run.__name__: run(folder, arguments) for run in order}
            turns.append(done)
            ratio = done["ray_data"].texts_per_s / done["embert_embed"].texts_per_s
            record.print_table(
                (f"turn {turn + 1}, ratio {ratio:.3f}", "texts/s", "one text, s"),
                [(kind, f"{run.texts_per_s:.0f}", f"{run.start_s:.1f}") for kind, run in sorted(done.items())],
            )
    ratios = [turn["ray_data"].texts_per_s / turn["embert_embed"].texts_per_s for turn in turns]
    ratio = statistics.median(ratios)
    kept = "kept" if ratio >= TARGET else "not kept"
    print(f"Ray Data has {ratio:.1%} of the rate of `embert embed` (median of {len(ratios)}); {TARGET:.0%} is {kept}")
    figures = {
        "lengths": arguments.lengths,
        "texts": arguments.texts,
        "mean_tokens": round(statistics.mean(each.tokens for each in made), 1),
        "ratio": ratio,
        "ratios": ratios,
        "turns": [{kind: asdict(run) for kind, run in turn.items()} for turn in turns],
    }
    suffix = "" if arguments.lengths == "query" else f"-{arguments.lengths}"
    print(record.write(f"ray{suffix}", figures))


def write(folder: Path, made: Sequence[str]) -> None:
    """Each kind's input: all texts, and the first alone."""
    for name, some in (("one", made[:1]), ("all", made)):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in some))
        (folder / name).mkdir()
        for number in range(min(FILES, len(some))):
            pq.write_table(pa.table({"text": some[number::FILES]}), folder / name / f"{number}.parquet")


def embert_embed(folder: Path, arguments: argparse.Namespace) -> Run:
    """`embert embed`, twice."""

    def seconds(name: str) -> float:
        output = folder / f"{name}.npy"
        output.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "embert.server.commands.cli", "embed", "--quiet", "--device"]
        command += [arguments.device, "--file", str(folder / f"{name}.txt"), "--output", str(output)]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        return time.perf_counter() - began

    one_s = seconds("one")
    return Run(one_s, (arguments.texts - 1) / (seconds("all") - one_s))


def ray_data(folder: Path, arguments: argparse.Namespace) -> Run:
    """A Ray Data pipeline, in a process that starts its cluster."""
    command = [sys.executable, "-c", "from benchmarks.ray.pipeline import main; main()", str(folder)]
    command += [arguments.device, str(arguments.actors)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | NO_NEWS)
    one_s, all_s = json.loads(done.stdout.splitlines()[-1])
    return Run(one_s, (arguments.texts - 1) / (all_s - one_s))


if __name__ == "__main__":
    main()
