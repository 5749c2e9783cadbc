"""Runs that write an output and die before their N-th durable step.

`python -m tests.server.bulk.crash file|parquet|folder` reads a line for each run: `["PATH", N]`, or with "--resume"
after it. Steps are calls that change what is on the disk. 0 lets the run end. The response to a line is the number of
rows that the run continues after, unless it dies before it knows, and its exit status.

Each run is a process of its own, forked from this one, because importing takes a hundred times as long as writing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from embert.engine import load_model
from embert.engine.batch import TaskOutput
from embert.server.bulk.job import Block, Job
from embert.server.bulk.rows import Layout, ParsedRows
from embert.server.bulk.writer import FileWriter

STEPS_OF_A_CRASH = 9  # the exit status
BLOCKS, ROWS, COLUMNS = 3, 4, 2
JOB, MODEL = Job(dimensions=COLUMNS, output_format="npy"), load_model()


def main() -> None:
    for line in sys.stdin:
        path, steps, *resume = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(sys.argv[1], path, steps, resume=bool(resume))
                status = 0
            except Exception:  # whatever it is: the child must not come back to this loop and read the next line
                traceback.print_exc()
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(kind: str, path: str, steps: int, *, resume: bool) -> None:
    left, lock = steps, threading.Lock()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            with lock:
                left -= 1
                if left == 0:
                    os._exit(STEPS_OF_A_CRASH)
            return function(*arguments, **options)

        return call

    for name in ("write", "pwrite", "fsync", "ftruncate"):
        setattr(os, name, counted(getattr(os, name)))
    for name in ("replace", "rename", "unlink"):
        setattr(Path, name, counted(getattr(Path, name)))
    parquet = kind == "parquet"
    schema = pyarrow.schema([("text", pyarrow.string())]).serialize().to_pybytes()
    job = Job(dimensions=COLUMNS, output_format="parquet", schema=schema) if parquet else JOB
    layout = Layout(job, MODEL)
    output = FileWriter(path, job.output_format, 2 * ROWS if kind == "folder" else None, resume=resume)
    with output:
        output.begin({"a": 1}, layout, resume=resume)
        print(output.texts, end=" ", flush=True)
        for number in [] if output.is_finished else range(output.rows // ROWS, BLOCKS):
            values = np.full((ROWS, COLUMNS), number, np.float32)
            content: bytes | memoryview = values.reshape(-1).view(np.uint8).data
            if parquet:
                parsed = ParsedRows([f"{number}.{row}" for row in range(ROWS)], range(ROWS))
                content = layout.format(parsed, TaskOutput.one_each(values))
            output.write(Block(number, ROWS, texts=ROWS, digest=str(number)), content)
        output.finish()


if __name__ == "__main__":
    main()
