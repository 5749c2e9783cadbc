"""The way of blocks through a run, with workers that do what a test tells them."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from embert.server.bulk.job import Block, BulkError, Chunk, RowRange, SharedBuffers
from embert.server.bulk.run import Pipeline

BLOCKS, BUFFERS = 20, 4


class Workers:
    """Finds no texts in the blocks."""

    def __init__(self, invalid: int) -> None:
        self.invalid, self.buffers = invalid, SharedBuffers(BUFFERS)
        self.results: queue.LifoQueue[Block] = queue.LifoQueue()
        self.put, self.receive = self.results.put, self.results.get

    def tokenize(self, block: Block) -> None:
        if block.number == self.invalid:
            block.fail(0, " is invalid")
        self.put(block)


def run(workers: Any) -> tuple[list[int], str]:
    """The numbers of the blocks that are written, and the error."""
    written: list[int] = []
    writer: Any = SimpleNamespace(write=lambda block, _: written.append(block.number))
    chunks = [Chunk(b"\n", 1, (RowRange("a", number + 1, 1, "line"),), "") for number in range(BLOCKS)]
    try:
        Pipeline(iter(chunks), writer, workers, 3).run(lambda _: None)
    except BulkError as error:
        return written, str(error)
    return written, ""


@pytest.mark.parametrize("number", [0, 7, BLOCKS])
def test_everything_before_an_invalid_block_is_written_and_nothing_after_it(number: int) -> None:
    assert run(Workers(number)) == ([*range(number)], f"a line {number + 1} is invalid" if number < BLOCKS else "")
