"""Runs that write an output and die before their N-th step that lasts.

`python -m tests.server.bulk.crash file|folder` reads a line for each run: `["PATH", N]`, or with "--resume" after it.
Steps are calls that change what is on the disk. 0 lets the run end. The answer to a line is how many rows the run goes
on after, unless it dies before it knows, and its exit status. Blocks are written as text processes may do it: later
ones before earlier ones, into the next shard before the last is complete.

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

from embert.server.bulk.output.containers import ArrayFile
from embert.server.bulk.output.folder import Folder
from embert.server.bulk.output.place import write_rows
from embert.server.bulk.output.single_file import SingleFile
from embert.server.bulk.slots import Block, Slots

STEPS_OF_A_CRASH = 9  # the exit status
BLOCKS, ROWS, COLUMNS = 5, 4, 2
AT_ONCE = 3  # blocks that are placed and not added


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
    slots = Slots.create(AT_ONCE)
    output = SingleFile(path, resume=resume) if kind == "file" else Folder(path, "npy", 2 * ROWS, resume=resume)
    with output:
        output.begin({"a": 1}, lambda: ArrayFile(COLUMNS), resume=resume)
        print(output.texts, end=" ", flush=True)
        numbers = [] if output.is_finished else range(output.rows // ROWS, BLOCKS)
        for first in range(0, len(numbers), AT_ONCE):
            some = numbers[first : first + AT_ONCE]
            blocks = [Block(number, ROWS, texts=ROWS, digest=str(number), slot=number % AT_ONCE) for number in some]
            places = []
            for block in blocks:
                rows = block.number + np.arange(ROWS, dtype=np.float32)
                slots.put(block, "values", np.repeat(rows[:, None], COLUMNS, axis=1))
                places.append(output.place(block, slots))
            for block, place in reversed([*zip(blocks, places, strict=True)]):
                assert place is not None
                write_rows(place, slots.view(block, "values"), np.arange(ROWS)[::-1])
            for block in blocks:
                output.add(block, slots)
        output.finish()


if __name__ == "__main__":
    main()
