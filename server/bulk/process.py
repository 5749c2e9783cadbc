"""`python -m embert.server.bulk.process FD`: a text process or an engine process of a run; orders come over FD."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from embert.engine import load_encoder
from embert.engine.errors import EngineError
from embert.server.bulk.child import Failed, Progress, Ready, Start
from embert.server.bulk.engine_stage import Answer, EngineStage
from embert.server.bulk.job import BulkError
from embert.server.bulk.slots import Block, Slots
from embert.server.bulk.text_stage import TextStage

__all__ = ["main"]

_PROGRESS_S = 0.1  # between two reports


class _Ended(Exception):
    """The other end is closed: so is the run."""


class _Line:
    """The connection to the command's own process. Several threads may send while one receives."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            raise _Ended from None

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise _Ended from None

    @contextlib.contextmanager
    def file(self) -> Iterator[int]:
        """The file that came with the last message, open for the context."""
        try:
            descriptor = reduction.recv_handle(self._connection)
        except (EOFError, OSError):
            raise _Ended from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def main() -> None:
    """Serve one run. Ends when the other end of the connection closes."""
    line = _Line(int(sys.argv[1]))
    with contextlib.suppress(_Ended):
        start = line.receive()
        if not isinstance(start, Start):
            raise SystemExit("embert.server.bulk.process is started by `embert embed`")
        sys.path[:] = start.path
        slots = Slots(start.slots)
        with _failures_told(line, start):
            if start.kind == "text":
                _serve_texts(line, start, slots)
            else:
                _serve_engine(line, start, slots)
    os._exit(0)  # without waiting for threads


@contextlib.contextmanager
def _failures_told(line: _Line, start: Start) -> Iterator[None]:
    """Tell the command's own process, in one sentence, what ends the context."""
    try:
        yield
    except (EngineError, BulkError) as error:
        line.send(Failed(str(error)))
    except MemoryError:
        line.send(Failed(f"not enough memory for {start.model.model_id}"))
    except _Ended:
        raise
    except Exception as error:  # noqa: BLE001 - the user gets one sentence, whatever the error is
        where = f"the engine of {start.device}" if start.kind == "engine" else "a text process"
        line.send(Failed(f"internal error in {where}: {type(error).__name__}: {error}"))


def _serve_texts(line: _Line, start: Start, slots: Slots) -> None:
    stage = TextStage(start.job, start.model)
    line.send(Ready())
    while True:
        what, block, *place = line.receive()
        if what == "prepare":
            stage.prepare(block, slots)
        elif what == "finish":
            stage.finish(block, slots)
        else:
            with line.file() as descriptor:
                stage.write(block, slots, place[0]._replace(descriptor=descriptor))
        line.send(block)


def _serve_engine(line: _Line, start: Start, slots: Slots) -> None:
    encoder = load_encoder(
        start.model,
        device=start.device,
        dtype=start.dtype,
        encoder=start.encoder,
        min_agreement=start.min_agreement,
    )
    texts, reported = 0, time.monotonic()

    def progress(more: int) -> None:
        nonlocal texts, reported
        texts += more
        if time.monotonic() - reported > _PROGRESS_S:
            line.send(Progress(texts))
            texts, reported = 0, time.monotonic()

    stage = EngineStage(start.job, start.model, encoder, slots, progress)
    line.send(Ready(encoder.name, encoder.device.partition(":")[0], encoder.dtype))
    blocks: queue.SimpleQueue[Block] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(line, blocks), daemon=True).start()
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=_land, args=(line, start, stage, answers), daemon=True).start()
    while True:
        while blocks.empty() and stage.is_busy:
            answers.put(stage.finish_one())
        for answer in stage.feed(blocks.get()):
            answers.put(answer)


def _land(line: _Line, start: Start, stage: EngineStage, answers: queue.SimpleQueue[Answer]) -> None:
    """Copy answers into their slots beside the encoder's next batch: copying holds no lock of Python's."""
    with contextlib.suppress(_Ended), _failures_told(line, start):
        while True:
            block = stage.land(answers.get())
            if block is not None:
                line.send(block)
    os._exit(0)


def _listen(line: _Line, blocks: queue.SimpleQueue[Block]) -> None:
    """Take blocks as they come, so that whoever sends one never waits."""
    try:
        while True:
            blocks.put(line.receive())
    except _Ended:
        os._exit(0)


if __name__ == "__main__":
    main()
