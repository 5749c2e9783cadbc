"""Writes an output, and dies before its N-th step that lasts: `python -m tests.server.bulk.crash KIND PATH N [--resume]`.

Steps are calls that change what is on the disk. 0 lets the run end. Prints how many rows it goes on after.
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
from embert.server.bulk.output.single_file import SingleFile
from embert.server.bulk.slots import Block, Slots

STEPS_OF_A_CRASH = 9  # the exit status
BLOCKS, ROWS, COLUMNS = 3, 4, 2


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
    slots = Slots.create(1)
    output = SingleFile(path) if kind == "file" else Folder(path, "npy", 2 * ROWS, resume=resume)
    with output:
        output.begin({"a": 1}, lambda: ArrayFile(COLUMNS), resume=resume)
        print(output.texts)
        for number in range(output.rows // ROWS, BLOCKS):
            if output.is_finished:
                break
            block = Block(number, ROWS, texts=ROWS, digest=str(number), slot=0)
            slots.put(block, "values", np.full((ROWS, COLUMNS), number, np.float32))
            output.write(block, slots)
        output.finish()


if __name__ == "__main__":
    main()
