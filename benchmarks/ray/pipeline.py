"""The pipeline of Ray Data: Parquet to Parquet through `embert.ray.Embedder`, timed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import ray
import ray.data

from embert.ray import Embedder

__all__ = ["main"]

BATCH = 4096  # texts, as many as `embert embed` takes at a time
BESIDE = 2  # CPUs of Ray's count for tasks that read and write, beside those of the actors


def main() -> None:
    """Print a JSON list: seconds for one text, on a cluster that has run before, and for all texts."""
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

    def seconds(name: str) -> float:
        output = folder / f"{name}.out"
        shutil.rmtree(output, ignore_errors=True)
        began = time.perf_counter()
        ray.data.read_parquet(str(folder / name)).map_batches(
            Embedder,
            fn_constructor_kwargs={"device": device},
            compute=ray.data.ActorPoolStrategy(size=actors),
            batch_format="pyarrow",
            batch_size=BATCH,
            num_cpus=max(1, cores // actors),
            num_gpus=1 / actors if gpu else 0,
        ).write_parquet(str(output))
        took_s = time.perf_counter() - began
        rows = sum(pq.read_metadata(path).num_rows for path in output.iterdir())
        wanted = sum(pq.read_metadata(path).num_rows for path in (folder / name).iterdir())
        if rows != wanted:
            raise SystemExit(f"{rows} rows were written of {wanted}")
        return took_s

    seconds("one")  # starts the workers that read and write
    print(json.dumps([seconds("one"), seconds("all")]))
