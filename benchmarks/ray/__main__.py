"""Does Ray Data on one machine embed as fast as `embert embed`?

    python -m benchmarks.ray [--texts 40000] [--lengths query] [--rounds 5] [--device cpu] [--actors 1] [--cores 1]

Both embed the same texts in interleaved rounds, each from files to files, with all cores or the GPU. Each runs one text
too: what it takes less is that of the other texts, and the start is reported apart. Ray has a cluster of this machine
alone, which is up and has run a pipeline before the clock starts. With `--cores` what embeds, on either side, has so
many cores, and the others are Ray's: so it is on a machine with many cores, where Ray's own processes take a small part
of them.

Rates are by wall clock. CPU seconds are of all processes, Ray's own among them: where other work keeps the machine
busy, rates favor the one that has more processes, and CPU seconds tell more. The last lines have medians of the
rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
from benchmarks.ray.pipeline import embed_on
from embert import load_model

LENGTHS = {"query": QUERY_TOKENS, "passage": PASSAGE_TOKENS}
FILES = 8  # of Ray's input
TARGET = 0.95
NO_NEWS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds by the wall clock, and of the CPUs."""

    wall_s: float
    cpu_s: float
    encoder_s: float  # of the CPUs, in the processes that embed


@dataclass(frozen=True, slots=True)
class Run:
    """Cost of one text, and of the others."""

    start_s: float
    texts_per_s: float
    cpu_ms_per_text: float
    encoder_ms_per_text: float  # of it, in the processes that embed
    other_cores: float  # that all others keep busy

    @classmethod
    def of(cls, one: Used, every: Used, texts: int) -> Run:
        """Combine the times of one text and of `texts` texts."""
        wall_s, cpu_s = every.wall_s - one.wall_s, every.cpu_s - one.cpu_s
        encoder_s = every.encoder_s - one.encoder_s
        per_text = 1000 / (texts - 1)
        return cls(
            one.wall_s, (texts - 1) / wall_s, cpu_s * per_text, encoder_s * per_text, (cpu_s - encoder_s) / wall_s
        )


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="benchmarks.ray", description=__doc__)
    parser.add_argument("--texts", type=int, default=40_000)
    parser.add_argument("--lengths", choices=sorted(LENGTHS), default="query")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--actors", type=int, default=1, help="of Ray, which share the GPU")
    parser.add_argument("--cores", type=int, default=0, help="of what embeds; 0: all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embert-ray-") as name:
        folder = Path(name)
        tokenizer = load_model().transformer_folder / "tokenizer.json"
        drawn = texts(LENGTHS[arguments.lengths], arguments.texts, tokenizer)
        write(folder, [each.text for each in drawn])
        rounds = []
        for number in range(arguments.rounds):
            # The one that begins alternates, so that what drifts is nobody's.
            order = (embert_embed, ray_data) if number % 2 == 0 else (ray_data, embert_embed)
            done = {run.__name__: run(folder, arguments) for run in order}
            rounds.append(done)
            record.print_table(
                (
                    f"round {number + 1}",
                    "texts/s",
                    "CPU ms a text",
                    "of it embedding",
                    "other cores",
                    "one text, s",
                ),
                [
                    (
                        kind,
                        f"{run.texts_per_s:.0f}",
                        f"{run.cpu_ms_per_text:.3f}",
                        f"{run.encoder_ms_per_text:.3f}",
                        f"{run.other_cores:.2f}",
                        f"{run.start_s:.1f}",
                    )
                    for kind, run in sorted(done.items())
                ],
            )
    ratios = [done["ray_data"].texts_per_s / done["embert_embed"].texts_per_s for done in rounds]
    cpu_ratios = [done["embert_embed"].cpu_ms_per_text / done["ray_data"].cpu_ms_per_text for done in rounds]
    ratio, cpu_ratio = statistics.median(ratios), statistics.median(cpu_ratios)
    print(
        f"Ray Data has {ratio:.1%} of the rate of `embert embed`, {cpu_ratio:.1%} by CPU seconds; asked: {TARGET:.0%}"
    )
    figures = {
        "lengths": arguments.lengths,
        "texts": arguments.texts,
        "cores": arguments.cores,
        "mean_tokens": round(statistics.mean(each.tokens for each in drawn), 1),
        "ratio": ratio,
        "cpu_ratio": cpu_ratio,
        "load_average": os.getloadavg(),
        "rounds": [{kind: asdict(run) for kind, run in done.items()} for done in rounds],
    }
    suffix = "" if arguments.lengths == "query" else f"-{arguments.lengths}"
    suffix += f"-of-{arguments.cores}-cores" if arguments.cores else ""
    print(record.write(f"ray{suffix}", figures))


def write(folder: Path, made: Sequence[str]) -> None:
    """Each kind's input: all texts, and the first alone."""
    for name, some in (("one", made[:1]), ("all", made)):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in some))
        (folder / name).mkdir()
        for number in range(min(FILES, len(some))):
            pq.write_table(pa.table({"text": some[number::FILES]}), folder / name / f"{number}.parquet")


def embert_embed(folder: Path, arguments: argparse.Namespace) -> Run:
    def used(name: str) -> Used:
        output = folder / f"{name}.npy"
        output.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "embert.server.cli.main", "embed", "--quiet", "--device"]
        command += [arguments.device, "--file", str(folder / f"{name}.txt"), "--output", str(output)]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, preexec_fn=lambda: embed_on(arguments.cores))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Used(time.perf_counter() - began, cpu_s, cpu_s)

    return Run.of(used("one"), used("all"), arguments.texts)


def ray_data(folder: Path, arguments: argparse.Namespace) -> Run:
    """A Ray Data pipeline, twice, in a process that starts its cluster."""
    command = [sys.executable, "-c", "from benchmarks.ray.pipeline import main; main()", str(folder)]
    command += [arguments.device, str(arguments.actors), str(arguments.cores)]
    env = os.environ | NO_NEWS | {"PYTHONPATH": str(Path(__file__).parents[2])}  # where workers find benchmarks.ray
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    one, every = json.loads(done.stdout.splitlines()[-1])
    return Run.of(Used(*one), Used(*every), arguments.texts)


if __name__ == "__main__":
    main()
