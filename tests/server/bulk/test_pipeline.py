"""The ways of blocks through a run, with processes that do what a test tells them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from embert.server.bulk.input.line_blocks import Piece
from embert.server.bulk.output.place import Place
from embert.server.bulk.pipeline import _WRITERS, Pipeline
from embert.server.bulk.slots import Block, Slots

BLOCKS = PROCESSES = 8


class Blocks:
    """So many blocks of one row without a text, from a source to an output. `change` guards everything."""

    shard_rows: int | None = None

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.left, self.rows, self.placed = BLOCKS, 0, 0
        self.writing, self.most, self.may_end = 0, 0, 0

    def take(self, most: int) -> Piece | None:
        if self.left == 0:
            return None
        self.left -= 1
        return Piece(b"\n", 1, (), "")

    def place(self, block: Block, slots: Slots) -> Place:
        with self.change:
            self.placed += 1
            self.change.notify_all()
        return Place(-1, 0, Path("output"))

    def add(self, block: Block, slots: Slots) -> None:
        self.rows += 1

    def until(self, state: Any) -> None:
        """Wait for a state; the limit is far beyond what it takes."""
        assert self.change.wait_for(state, timeout=60)


class TextProcess:
    """Prepares at once, and writes until the test lets one write end."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._block, self._writes = blocks, Block(0, 0), False

    def send(self, what: str, block: Block) -> None:
        assert what == "prepare"
        self._block, self._writes = block, False

    def send_write(self, block: Block, place: Place) -> None:
        self._block, self._writes = block, True

    def receive(self) -> Block:
        if self._writes:
            of = self._blocks
            with of.change:
                of.writing += 1
                of.most = max(of.most, of.writing)
                of.change.notify_all()
                of.until(lambda: of.may_end > 0)
                of.may_end -= 1
                of.writing -= 1
                of.change.notify_all()
        return self._block


def test_few_processes_write_at_the_same_time() -> None:
    blocks = Blocks()
    slots = Slots.create(BLOCKS)
    processes: Any = [TextProcess(blocks) for _ in range(PROCESSES)]
    pipeline = Pipeline(
        blocks, blocks, slots, slots_used=BLOCKS, text_processes=processes, engines=[], block_rows=1, formats=False,
        encoded=lambda _: None, warn=lambda _: None,
    )  # fmt: skip
    run = threading.Thread(target=pipeline.run, daemon=True)
    run.start()
    for ended in range(BLOCKS):
        wanted = min(_WRITERS, BLOCKS - ended)

        def all_write_who_may(wanted: int = wanted) -> bool:
            taken = blocks.placed == BLOCKS and pipeline._for_texts.empty()
            return taken and blocks.may_end == 0 and blocks.writing >= wanted

        with blocks.change:
            while not blocks.change.wait_for(all_write_who_may, timeout=0.01):
                assert run.is_alive()
            blocks.may_end = 1
            blocks.change.notify_all()
    run.join(60)
    assert not run.is_alive()
    assert (blocks.most, blocks.rows) == (_WRITERS, BLOCKS)
    slots.close()
