"""The pipeline of Ray Data: Parquet to Parquet through `embert.ray.Embedder`, timed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from embert.ray import Embedder

BATCH = 4096  # texts, as many as `embert embed` takes at a time
IO_CPUS = 2  # CPUs of Ray's count for tasks that read and write, next to those of the actors


def embed_on(cores: int) -> None:
    """Keep this process, and what it starts from now on, on its first cores; 0: on all."""
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


class Measured(Embedder):
    """Notes what its process has used: once the actor has ended, nobody can ask any more."""

    def __init__(self, notes: str, cores: int, **options: Any) -> None:
        embed_on(cores)
        super().__init__(**options)
        self._note = Path(notes, f"{os.getpid()}.cpu")

    def __call__(self, batch: pa.Table) -> pa.Table:
        table = super().__call__(batch)
        self._note.write_text(str(time.process_time()))
        return table


def cpu_s(notes: Path) -> tuple[float, float]:
    """CPU seconds of this process and all below it, with the actors that have ended; and of the actors alone."""
    alive = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            alive[process.pid] = times.user + times.system
    actors = {int(note.stem): float(note.read_text()) for note in notes.glob("*.cpu")}
    ended = sum(seconds for pid, seconds in actors.items() if pid not in alive)
    return sum(alive.values()) + ended, sum(actors.values())


def main() -> None:
    """Print a JSON list: seconds, CPU seconds and those of the actors, for one text and for all.

    The cluster has run before.
    """
    folder, device, actors, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    cores = limit or len(os.sched_getaffinity(0))
    gpu = device == "cuda"
    ray.init(
        num_cpus=cores + IO_CPUS,
        num_gpus=1 if gpu else 0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )

    def used(name: str) -> tuple[float, float, float]:
        output = folder / f"{name}.out"
        shutil.rmtree(output, ignore_errors=True)
        began, before = time.perf_counter(), cpu_s(folder)
        ray.data.read_parquet(str(folder / name)).map_batches(
            Measured,
            fn_constructor_kwargs={"notes": str(folder), "cores": limit, "device": device},
            compute=ray.data.ActorPoolStrategy(size=actors),
            batch_format="pyarrow",
            batch_size=BATCH,
            num_cpus=max(1, cores // actors),
            num_gpus=1 / actors if gpu else 0,
        ).write_parquet(str(output))
        took_s, after = time.perf_counter() - began, cpu_s(folder)
        rows = sum(pq.read_metadata(path).num_rows for path in output.iterdir())
        wanted = sum(pq.read_metadata(path).num_rows for path in (folder / name).iterdir())
        if rows != wanted:
            raise SystemExit(f"{rows} rows were written of {wanted}")
        return took_s, after[0] - before[0], after[1] - before[1]

    used("one")  # starts the workers that read and write
    print(json.dumps([used("one"), used("all")]))
