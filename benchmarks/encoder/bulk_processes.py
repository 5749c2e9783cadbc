"""CPU time that a text costs each process of `embert embed`, and the threads that nothing can stand in for.

    python -m benchmarks.encoder.bulk_processes [--texts 400000] [--outputs npy parquet jsonl] [--rounds 3]

The encoder costs nothing. Time counts from the moment when the first blocks are in the output, so that start and
loading do not count; some of the 100 blocks are on their way by then. A figure is the least of the rounds, because
other processes only ever add to it. Times are those of /proc, read until a process is gone: what it does in its last
20 ms may be missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.lib import record
from benchmarks.lib.texts import QUERY_TOKENS, texts
from embert.engine import load_model

OUTPUTS = ("npy", "parquet", "jsonl")
DIFFERENT_TEXTS = 100_000
PROCESSES = 3  # the command's own, the engine's and one for texts, in the order of their start
STUB = ("--encoder", "benchmarks.lib.stub_encoders:StubEncoder", "--tokenization-workers", "1")
READ_S = 0.02
LEAST_BYTES = 4096  # more than a header

Thread = tuple[int, int]  # the process's number, and the thread's


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.bulk_processes", description=__doc__)
    parser.add_argument("--texts", type=int, default=400_000)
    parser.add_argument("--outputs", nargs="+", choices=OUTPUTS, default=OUTPUTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="bulk-processes", help="of the record")
    options = parser.parse_args(argv)
    tokenizer = load_model().transformer_folder / "tokenizer.json"
    different = [each.text for each in texts(QUERY_TOKENS, min(options.texts, DIFFERENT_TEXTS), tokenizer)]
    lines = [different[number % len(different)] for number in range(options.texts)]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "texts.txt"
        source.write_text("".join(f"{line}\n" for line in lines))
        for output in options.outputs:
            rounds = [_run(source, folder / f"vectors.{output}", options.texts) for _ in range(options.rounds)]
            found[output] = {part: min(each[part] for each in rounds) for part in rounds[0]}
    parts = list(next(iter(found.values())))
    rows = [(part, *(f"{each[part]:.2f}" for each in found.values())) for part in parts]
    record.print_table(("µs of CPU a text", *found), rows)
    print(record.write(options.name, {"texts": options.texts, "us": found}))


def _run(source: Path, target: Path, count: int) -> dict[str, float]:
    """Microseconds a text of each part of a run."""
    command = [sys.executable, "-m", "embert.server.cli.main", "embed", "-q", "-f", str(source), "-o", str(target)]
    partial = target.with_name(f"{target.name}.partial")
    first: dict[Thread, float] = {}
    last: dict[Thread, float] = {}
    first_bytes = 0
    with subprocess.Popen([*command, *STUB]) as run:
        while run.poll() is None:
            if not first_bytes and partial.exists() and partial.stat().st_size > LEAST_BYTES:
                first_bytes, first = partial.stat().st_size, _times(run.pid)
            last |= _times(run.pid)
            time.sleep(READ_S)
    if run.returncode or not first_bytes:
        raise SystemExit(f"a run failed or was too short: {command}")
    count = round(count * (1 - first_bytes / target.stat().st_size))
    target.unlink()
    us = {thread: (seconds - first.get(thread, 0.0)) / count * 1e6 for thread, seconds in sorted(last.items())}
    command_us, engine_us, text_us = ([us[each] for each in us if each[0] == number] for number in range(3))
    return {
        "the command's own process": sum(command_us),
        "… its busiest thread": max(command_us),
        "engine process": sum(engine_us),
        "… the encoder's thread": engine_us[0],
        "… the thread that copies": max(engine_us[1:]),
        "text process": sum(text_us),
    }


def _times(pid: int) -> dict[Thread, float]:
    """CPU seconds of each thread of a run."""
    family = enumerate(_family(pid))
    return {(number, thread): seconds for number, process in family for thread, seconds in _threads(process)}


def _family(pid: int) -> list[int]:
    try:
        children = psutil.Process(pid).children()
        return [pid, *(each.pid for each in sorted(children, key=lambda child: child.create_time()))][:PROCESSES]
    except psutil.NoSuchProcess:
        return []


def _threads(pid: int) -> Iterator[tuple[int, float]]:
    """CPU seconds of each thread of a process, finer than its ticks."""
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        try:
            yield int(folder.name), int((folder / "schedstat").read_text().split()[0]) / 1e9
        except (OSError, IndexError):  # it has ended
            continue


if __name__ == "__main__":
    main()
