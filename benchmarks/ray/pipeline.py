"""The pipeline of Ray Data: Parquet to Parquet through `embert.ray.Embedder`, timed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import ray
import ray.data

from embert.ray import Embedder

__all__ = ["main"]

BATCH = 4096  # texts, as many as `embert embed` takes at a time
LOOK_S = 0.2  # between two looks at the processes: what one uses after the last look before its end is not counted
BESIDE = 2  # CPUs of Ray's count for tasks that read and write, beside those of the actors


class CpuSeconds:
    """What this process and all below it have used, those that have ended among them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], float] = {}  # pid and start of a process → its seconds, when last seen
        threading.Thread(target=self._follow, daemon=True).start()

    def total(self) -> float:
        """Until now."""
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._seen[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seen.copy().values())

    def _follow(self) -> None:
        while True:
            self.total()
            time.sleep(LOOK_S)


def main() -> None:
    """Print a JSON list: seconds and CPU seconds for one text, on a cluster that has run before, and for all texts."""
    folder, device, actors = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    cores = len(os.sched_getaffinity(0))
    gpu = device == "cuda"
    ray.init(
        num_cpus=cores + BESIDE,
        num_gpus=1 if gpu else 0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )

    cpu = CpuSeconds()

    def used(name: str) -> tuple[float, float]:
        output = folder / f"{name}.out"
        shutil.rmtree(output, ignore_errors=True)
        began, before = time.perf_counter(), cpu.total()
        ray.data.read_parquet(str(folder / name)).map_batches(
            Embedder,
            fn_constructor_kwargs={"device": device},
            compute=ray.data.ActorPoolStrategy(size=actors),
            batch_format="pyarrow",
            batch_size=BATCH,
            num_cpus=max(1, cores // actors),
            num_gpus=1 / actors if gpu else 0,
        ).write_parquet(str(output))
        took_s, cpu_s = time.perf_counter() - began, cpu.total() - before
        rows = sum(pq.read_metadata(path).num_rows for path in output.iterdir())
        wanted = sum(pq.read_metadata(path).num_rows for path in (folder / name).iterdir())
        if rows != wanted:
            raise SystemExit(f"{rows} rows were written of {wanted}")
        return took_s, cpu_s

    used("one")  # starts the workers that read and write
    print(json.dumps([used("one"), used("all")]))
