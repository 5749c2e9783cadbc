"""Blocks on their way through the processes of a run: read in order, worked on side by side, placed in order.

    reader ─▶ text processes ─▶ engine processes ─▶ text processes ─▶ collector ─▶ text processes ─▶ collector
              tokenize          encode              format            places       write             adds

A thread stands behind each arrow. The collector says where in the output a block goes once all those before it have
their places, and adds it to the output once all those before it are written. So nothing is written behind a block that
fails. Every block has a slot, and the reader waits for a free one, so the number of slots bounds what is in memory. The
block that is nearest to its end is always served first, so no slot is held for ever.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from embert.server.bulk.child import Child, Progress
from embert.server.bulk.input.line_blocks import Piece
from embert.server.bulk.job import BulkError
from embert.server.bulk.output.place import Place
from embert.server.bulk.slots import Block, Slots

__all__ = ["Output", "Pipeline", "Source"]

# Text processes that write at the same time. A system lets one process at a time write to a file, and those that wait
# keep their CPUs busy: on 16 cores 12 writers wrote 2.25 GB/s for 4.6 s of CPU a GB into memory, one wrote 3.1 for 0.3.
_WRITERS = 3
_BLOCKS_OF_AN_ENGINE = 3  # one is copied, one is encoded, one waits: the engine never waits for this process
_WAIT_S = 10.0  # for the collector's present step, when a run ends early

_WRITE, _FINISH, _PREPARE, _END = range(4)  # text processes take what is nearest to its end first


class Source(Protocol):
    """Where blocks come from."""

    def take(self, most: int) -> Piece | None:
        """Take a block of at most `most` rows; None at the end."""
        ...


class Output(Protocol):
    """Where blocks go."""

    shard_rows: int | None  # a block ends where a multiple of so many rows does
    rows: int  # of the input that are added

    def place(self, block: Block, slots: Slots) -> Place | None:
        """Say where the next block is to be written; None: nowhere."""
        ...

    def add(self, block: Block, slots: Slots) -> None:
        """Count the next block as written; one without a place goes into the output now."""
        ...


@dataclass(frozen=True, slots=True)
class _Last:
    """In place of a block: there are so many, and no more."""

    number: int


@dataclass(frozen=True, slots=True)
class _Written:
    """A block that is where it was placed."""

    block: Block


class Pipeline:
    """One run, of children that are ready. `run` may be called once."""

    def __init__(
        self,
        source: Source,
        output: Output,
        slots: Slots,
        *,
        slots_used: int,
        text_processes: Sequence[Child],
        engines: Sequence[Child],
        block_rows: int,
        formats: bool,
        encoded: Callable[[int], None],
        warn: Callable[[str], None],
    ) -> None:
        """`formats` says whether vectors go through a text process again. `encoded` is called with numbers of texts."""
        self._source, self._output, self._slots, self._slots_used = source, output, slots, slots_used
        self._text_processes, self._engines = text_processes, engines
        self._block_rows, self._formats = block_rows, formats
        self._encoded, self._warn = encoded, warn
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._for_texts: queue.PriorityQueue[tuple[int, int, Block | None, Place | None]] = queue.PriorityQueue()
        self._for_engines: queue.PriorityQueue[tuple[int, Block | None]] = queue.PriorityQueue()
        self._for_output: queue.SimpleQueue[Block | _Written | _Last | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.skipped = 0  # bad rows

    def run(self) -> None:
        """Until everything is added. Raises what went wrong first; then nothing is added any more."""
        for slot in range(self._slots_used):
            self._free.put(slot)
        self._start(self._read)
        for child in self._text_processes:
            self._start(self._serve_texts, child)
        for child in self._engines:
            room = threading.Semaphore(_BLOCKS_OF_AN_ENGINE)
            self._start(self._feed, child, room)
            self._start(self._hear, child, room)
        collector = self._start(self._collect)
        try:
            self._over.wait()
        finally:
            self._over.set()
            self._free.put(None)
            self._for_output.put(None)
            for number in range(len(self._text_processes)):
                self._for_texts.put((_END, number, None, None))
            for number in range(len(self._engines)):
                self._for_engines.put((-1 - number, None))
            collector.join(_WAIT_S)
        if self._error is not None:
            raise self._error

    def _start(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                target(*arguments)
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                if not self._over.is_set():
                    self._error = error
                self._over.set()

        thread = threading.Thread(target=run, name=f"embert-{target.__name__}", daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        number, rows = 0, self._output.rows
        while (slot := self._free.get()) is not None and not self._over.is_set():
            most = self._block_rows
            if shard := self._output.shard_rows:
                most = min(most, shard - rows % shard)
            try:
                piece = self._source.take(most)
            except (BulkError, OSError) as error:  # in its place: what was read before is written first
                self._for_output.put(Block(number, 0, error=str(error)))
                return
            if piece is None:
                self._for_output.put(_Last(number))
                return
            block = Block(number, piece.rows, piece.parts, piece.digest, slot=slot)
            self._slots.put(block, "payload", piece.payload)
            rows += piece.rows
            self._for_texts.put((_PREPARE, number, block, None))
            number += 1

    def _serve_texts(self, child: Child) -> None:
        while True:
            stage, number, block, place = self._for_texts.get()
            if block is None:
                return
            if place is not None:
                child.send_write(block, place)
            else:
                child.send("prepare" if stage == _PREPARE else "finish", block)
            block = child.receive()
            if stage == _WRITE:
                self._for_output.put(_Written(block))
            elif stage == _PREPARE and block.texts and not block.error:
                self._for_engines.put((number, block))
            else:
                self._for_output.put(block)

    def _feed(self, child: Child, room: threading.Semaphore) -> None:
        while True:
            room.acquire()
            _, block = self._for_engines.get()
            if block is None:
                return
            child.send(block)

    def _hear(self, child: Child, room: threading.Semaphore) -> None:
        while True:
            message = child.receive()
            if isinstance(message, Progress):
                self._encoded(message.texts)
                continue
            room.release()
            if self._formats and not message.error:
                self._for_texts.put((_FINISH, message.number, message, None))
            else:
                self._for_output.put(message)

    def _collect(self) -> None:
        ready: dict[int, Block] = {}
        written: dict[int, Block] = {}
        waiting: deque[tuple[int, int, Block, Place]] = deque()  # to be written
        writing = placed = added = 0
        failed: Block | None = None
        last = None
        while added != last:
            arrived = self._for_output.get()
            if arrived is None or self._over.is_set():
                return
            if isinstance(arrived, _Last):
                last = arrived.number
            elif isinstance(arrived, _Written):
                written[arrived.block.number] = arrived.block
                writing -= 1
            else:
                ready[arrived.number] = arrived
            while failed is None and (block := ready.pop(placed, None)) is not None:
                if block.error:
                    failed = block
                    break
                place = self._output.place(block, self._slots)
                if place is None:
                    written[placed] = block
                else:
                    waiting.append((_WRITE, placed, block, place))
                placed += 1
            while waiting and writing < _WRITERS:
                self._for_texts.put(waiting.popleft())
                writing += 1
            while (block := written.pop(added, None)) is not None:
                if block.skipped and not self.skipped:
                    self._warn(f"{block.warning}; such rows are skipped")
                self.skipped += block.skipped
                self._output.add(block, self._slots)
                self._free.put(block.slot)
                added += 1
            if failed is not None and added == failed.number:
                raise BulkError(failed.error)
        self._over.set()
