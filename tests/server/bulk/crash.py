"""Writes an output, and dies before its N-th step that lasts.

`python -m tests.server.bulk.crash file|folder PATH N [--resume]`

Steps are calls that change what is on the disk. 0 lets the run end. Prints how many rows it goes on after. Blocks are
written as text processes may do it: later ones before earlier ones, into the next shard before the last is complete.
"""

from __future__ import annotations

import os
import sys
import threading
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
    kind, path, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    resume = "--resume" in sys.argv
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
    output = SingleFile(path) if kind == "file" else Folder(path, "npy", 2 * ROWS, resume=resume)
    with output:
        output.begin({"a": 1}, lambda: ArrayFile(COLUMNS), resume=resume)
        print(output.texts)
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
