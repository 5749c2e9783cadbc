"""Counts the calls of a process's own code, of Python's and of C's functions: a figure of neither load nor clock.

Python imports this at its start where the folder is on PYTHONPATH. CALL_COUNTER names a folder: at each SIGUSR2 the
process writes what it has counted so far into the file of its process id there. Code is its own in `embert/`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

FOLDER = os.environ["CALL_COUNTER"]
OWN = str(Path.cwd() / "embert")
calls = itertools.count()  # next() is atomic: threads count together


def count(frame: FrameType, event: str, _: object) -> None:
    """Callback of sys.setprofile. For a call of C's, `frame` is the caller's."""
    if event in ("call", "c_call") and frame.f_code.co_filename.startswith(OWN):
        next(calls)


def report(*_: object) -> None:
    """Write the number of calls."""
    sys.setprofile(None)
    file = Path(FOLDER, str(os.getpid()))
    file.with_suffix(".part").write_text(str(next(calls)))
    file.with_suffix(".part").rename(file)
    sys.setprofile(count)


signal.signal(signal.SIGUSR2, report)
threading.setprofile(count)
sys.setprofile(count)
