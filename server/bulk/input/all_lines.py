"""All lines of one file at once, for commands that need no more."""

from __future__ import annotations

from embert.server.bulk.input.line_blocks import LineBlocks
from embert.server.bulk.input.read_rows import read_rows
from embert.server.bulk.job import BulkError, Job
from embert.server.bulk.slots import Block

__all__ = ["all_lines"]

_AT_ONCE = 65_536


def all_lines(file: str) -> list[str]:
    """The lines of a UTF-8 file; `-` is standard input. Raises BulkError for a line that is not UTF-8, OSError."""
    texts: list[str] = []
    with LineBlocks([file]) as source:
        while (piece := source.take(_AT_ONCE)) is not None:
            read = read_rows(Job(), memoryview(piece.payload))
            if read.bad:
                place = Block(0, piece.rows, piece.parts).place(read.bad[0].row)
                raise BulkError(f"{place} {read.bad[0].wrong}")
            texts += read.texts
    return texts
