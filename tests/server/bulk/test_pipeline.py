"""The way of blocks through a run, with workers that do what a test tells them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from embert.server.bulk.job import Block, BulkError, SharedBuffers
from embert.server.bulk.reader import Chunk
from embert.server.bulk.run import Pipeline

BLOCKS, BUFFERS = 20, 4


class Worker:
    """Finds no texts in the blocks."""

    def __init__(self, invalid: int) -> None:
        self.invalid = invalid

    def run(self, stage: str, block: Block) -> Block:
        assert stage == "tokenize"
        block.error = "invalid" if block.number == self.invalid else ""
        return block


def run(worker: Any) -> tuple[list[int], str]:
    """The numbers of the blocks that are written, and the error."""
    written: list[int] = []
    writer: Any = SimpleNamespace(write=lambda block, _: written.append(block.number))
    buffers = SharedBuffers.create(BUFFERS)
    try:
        Pipeline(iter([Chunk(b"\n", 1, (), "")] * BLOCKS), writer, buffers, [worker] * 3, []).run(BUFFERS)
    except BulkError as error:
        return written, str(error)
    finally:
        buffers.close()
    return written, ""


@pytest.mark.parametrize("number", [0, 7, BLOCKS])
def test_everything_before_an_invalid_block_is_written_and_nothing_after_it(number: int) -> None:
    assert run(Worker(number)) == ([*range(number)], "invalid" if number < BLOCKS else "")
