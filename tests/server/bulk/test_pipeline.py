"""The way of blocks through a run, with workers that do what a test tells them."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from embert.server.bulk.job import Block, BulkError, SharedBuffers
from embert.server.bulk.reader import Chunk
from embert.server.bulk.run import Pipeline

BLOCKS, BUFFERS = 20, 4


class Blocks:
    """A writer that notes the numbers of blocks."""

    def __init__(self) -> None:
        self.written = list[int]()

    def write(self, block: Block, content: memoryview) -> None:
        assert not content
        self.written.append(block.number)


class Worker:
    """Finds no texts in the blocks."""

    def __init__(self, invalid: int | None = None, lost: int | None = None) -> None:
        self.invalid, self.lost = invalid, lost

    def run(self, stage: str, block: Block) -> Block:
        assert stage == "tokenize"
        if block.number == self.lost:
            raise BulkError("lost")
        block.error = "invalid" if block.number == self.invalid else ""
        return block


def run(worker: Worker) -> tuple[Blocks, str]:
    blocks: Any = Blocks()
    buffers = SharedBuffers.create(BUFFERS)
    tokenizers: Any = [worker] * 3
    try:
        Pipeline(iter([Chunk(b"\n", 1, (), "")] * BLOCKS), blocks, buffers, tokenizers, []).run(BUFFERS)
    except BulkError as error:
        return blocks, str(error)
    finally:
        buffers.close()
    return blocks, ""


def test_blocks_are_written_in_the_order_of_the_input() -> None:
    blocks, error = run(Worker())
    assert (blocks.written, error) == ([*range(BLOCKS)], "")


@pytest.mark.parametrize("number", [0, 7, BLOCKS - 1])
def test_everything_before_an_invalid_block_is_written_and_nothing_after_it(number: int) -> None:
    blocks, error = run(Worker(invalid=number))
    assert (blocks.written, error) == ([*range(number)], "invalid")


def test_a_lost_worker_ends_the_run() -> None:
    blocks, error = run(Worker(lost=7))
    assert (blocks.written, error) == ([*range(len(blocks.written))], "lost")
    assert len(blocks.written) <= 7


class Interrupted(Worker):
    """Receives a SIGINT for the process in its own thread, and never ends its block."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def run(self, stage: str, block: Block) -> Block:
        if not block.number:
            time.sleep(0.2)  # by then, the main thread waits for this block
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            self.ended.wait()
        return super().run(stage, block)


def test_ctrl_c_interrupts_the_run_whichever_thread_receives_the_signal() -> None:
    worker = Interrupted()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(worker)
    finally:
        worker.ended.set()
