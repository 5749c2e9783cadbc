"""Kills runs that write an output before their first, second, … durable step, resumes them, and compares the outputs.

`python -m tests.server.bulk.crash file|parquet|folder FOLDER` succeeds if all are what an uninterrupted run writes.
Steps are calls that change what is on the disk.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset  # before forks: importing these takes a second
import pyarrow.parquet

from embert.engine import load_model
from embert.engine.batch import TaskOutput
from embert.server.bulk.job import Block, Job
from embert.server.bulk.rows import Layout, ParsedRows
from embert.server.bulk.writer import FileWriter

CRASHED = 9  # the exit status
BLOCKS, ROWS, COLUMNS = 3, 4, 2
JOB, MODEL = Job(dimensions=COLUMNS, output_format="npy"), load_model()


def main(kind: str, folder: Path) -> None:
    whole, killed = folder / "whole", folder / "killed"
    assert attempt(kind, whole, 0) == 0
    steps = 1
    while attempt(kind, killed, steps) == CRASHED:
        # Every fourth time, it is killed once more, soon after it went on.
        status = attempt(kind, killed, 3 if steps % 4 == 0 else 0, resume=True)
        assert status in (0, CRASHED)
        assert status == 0 or attempt(kind, killed, 0, resume=True) == 0
        assert content(killed) == content(whole), f"killed before step {steps}"
        for file in files_of(killed):
            file.unlink()
        steps += 1
    assert steps > 10


def attempt(kind: str, path: Path, steps: int, *, resume: bool = False) -> int:
    """Run in a forked process, because imports take a hundred times as long as writing. Returns its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(kind, str(path), steps, resume=resume)
            status = 0
        except Exception:  # must not reach the caller, whose copy this process is
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def files_of(path: Path) -> list[Path]:
    return [*path.iterdir()] if path.is_dir() else [*path.parent.glob(path.name + "*")]


def content(path: Path) -> dict[str, bytes]:
    """Every file of an output, but not the manifest."""
    return {each.name.replace(path.name, ""): each.read_bytes() for each in files_of(path) if each.name[:2] != "_m"}


def run(kind: str, path: str, steps: int, *, resume: bool) -> None:
    left, lock = steps, threading.Lock()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            with lock:
                left -= 1
                if left == 0:
                    os._exit(CRASHED)
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
        for number in [] if output.is_finished else range(output.rows // ROWS, BLOCKS):
            values = np.full((ROWS, COLUMNS), number, np.float32)
            content: bytes | memoryview = values.reshape(-1).view(np.uint8).data
            if parquet:
                parsed = ParsedRows([f"{number}.{row}" for row in range(ROWS)], range(ROWS))
                content = layout.format(parsed, TaskOutput.one_each(values))
            output.write(Block(number, ROWS, texts=ROWS, digest=str(number)), content)
        output.finish()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
