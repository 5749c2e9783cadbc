"""JSON lines to a stream that cannot be replaced: standard output, a pipe, a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO

from embert.server.bulk.output.containers import Container
from embert.server.bulk.output.place import Place
from embert.server.bulk.slots import Block, Slots

__all__ = ["Stream"]


class Stream:
    """A stream of JSON lines. Nothing of it is complete for a later run."""

    begin_anew = ""
    shard_rows: int | None = None
    rows, digest, is_finished = 0, "", False
    texts = completed = 0

    def __init__(self, stream: BinaryIO) -> None:
        stream.flush()
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except OSError:  # such as a test's own
            self._descriptor = None

    def begin(self, facts: dict[str, Any], container: Callable[[], Container], *, resume: bool) -> None:
        """Nothing is to be done."""

    def place(self, block: Block, slots: Slots) -> Place | None:
        """Nowhere: a stream has no places."""

    def add(self, block: Block, slots: Slots) -> None:
        """Write a block."""
        if not block.texts:
            return
        content = slots.data(block, "output")
        if self._descriptor is None:
            self._stream.write(content)
            return
        # Without Python's buffer, whose lock a thread that waits for a reader would hold at the end of the process.
        while content:
            content = content[os.write(self._descriptor, content) :]

    def finish(self) -> None:
        """Everything is written."""
