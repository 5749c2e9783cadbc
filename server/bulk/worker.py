"""The tokenization and engine processes of a run: `python -m embert.server.bulk.worker FD`, and its parent's side."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from embert.engine import Model, load_encoder
from embert.engine.errors import EngineError
from embert.server.bulk.job import Block, BulkError, Job, SharedBuffers
from embert.server.bulk.stages import EngineStage, TokenizationStage
from embert.server.ipc.control import describe_exit

_EXIT_TIMEOUT_S = 10.0  # for a process that was killed
_PROGRESS_INTERVAL_S = 0.1
# A worker that has work is lost after this many seconds without a message if it uses no CPU time either: it is
# stopped, or waits for ever. On a GPU a batch takes less, so CPU time does not count: a wait for the device may use it.
_SILENCE_S = 60


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The first message to a worker. The later ones are blocks, with the stage's name.

    It sends a string if it cannot continue, blocks, and an engine process the number of texts encoded since then.
    """

    job: Job
    model: Model
    buffers: tuple[int, ...]  # descriptors
    path: list[str]  # sys.path, for custom encoders
    encoder: Mapping[str, Any] | None = None  # options of `load_encoder`; None: a tokenization process


class WorkerProcess:
    """A worker, in its parent. It ends when this end of the connection closes, for any reason."""

    def __init__(self, name: str, config: WorkerConfig, environment: dict[str, str]) -> None:
        """Start it. `name` is for error messages. Raises OSError."""
        self._name = name
        self.progress: Callable[[int], object] = lambda _: None  # called with numbers of encoded texts
        parent_end, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                # -P: never import from the working directory
                [sys.executable, "-P", "-m", "embert.server.bulk.worker", str(child_end.fileno())],
                pass_fds=[child_end.fileno(), *config.buffers],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for vectors
                env=os.environ | environment,
                process_group=0,  # Ctrl-C reaches the command only, which then ends its workers
            )
        self.pid = self._process.pid
        self._connection = Connection(parent_end.detach())
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[Block, Future[Block]]] = {}  # by the number of the block
        self._error: BulkError | None = None
        self._is_loading = self._uses_cpu = True
        self._send(config)

    def wait_ready(self) -> dict[str, str]:
        """Wait until it has loaded. Returns the encoder, device and dtype of an engine. Raises BulkError."""
        ready: dict[str, str] = self._receive()
        self._is_loading, self._uses_cpu = False, ready.get("device") != "cuda"
        threading.Thread(target=self._receive_results, daemon=True).start()
        return ready

    def run(self, stage: str, block: Block) -> Block:
        """Have a block processed: by a tokenization process `tokenize` or `format`, by an engine `encode`.

        Raises BulkError where the process fails or has ended.
        """
        future: Future[Block] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending[block.number] = block, future
            self._send((stage, block))
        return future.result()

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def join(self) -> None:
        """Wait until it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has ended: `_receive` raises
            self._connection.send(message)

    def _receive(self) -> Any:
        self._wait_for_message()
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise BulkError(f"{self._name} {self._exit_reason()}{self._current_rows()}") from None
        except Exception as error:  # noqa: BLE001 - unpickling raises anything
            raise BulkError(f"{self._name} sent a malformed message: {type(error).__name__}: {error}") from None
        if isinstance(message, str):
            raise BulkError(message)
        return message

    def _wait_for_message(self) -> None:
        """Wait until there is a message, or the process has ended. Raises BulkError if it has work and is silent.

        Seconds are counted, not measured, so that a time in which this process was stopped itself does not count.
        """
        silence_s, cpu_ticks = 0, -1
        while not self._connection.poll(1.0):
            before, cpu_ticks = cpu_ticks, self._cpu_ticks() if self._uses_cpu else 0
            silence_s = silence_s + 1 if (self._is_loading or self._pending) and cpu_ticks == before else 0
            if silence_s >= _SILENCE_S:
                self.kill()
                raise BulkError(f"{self._name} was ended: it did nothing for {_SILENCE_S} s{self._current_rows()}")

    def _cpu_ticks(self) -> int:
        """CPU time that the process has used, of all its threads."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return 0
        return int(fields[11]) + int(fields[12])

    def _current_rows(self) -> str:
        """The rows that the process has, for error messages."""
        with self._lock:
            return f", with {self._pending[min(self._pending)][0].extent}" if self._pending else ""

    def _receive_results(self) -> None:
        while True:
            try:
                message = self._receive()
            except BulkError as error:  # the run ends
                with self._lock:
                    self._error = error
                    for _, future in self._pending.values():
                        future.set_exception(error)
                return
            if isinstance(message, int):
                self.progress(message)
            else:
                with self._lock:
                    _, future = self._pending.pop(message.number)
                future.set_result(message)

    def _exit_reason(self) -> str:
        try:
            status = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "does not end"
        return describe_exit(status) + ("; perhaps memory ran out" if status == -signal.SIGKILL else "")


# --- in the worker ---


def main() -> None:
    """Serve one run. Ends when the other end of the connection closes."""
    parent = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        config: WorkerConfig = parent.recv()
        sys.path[:] = config.path
        try:
            (_run_tokenization if config.encoder is None else _run_engine)(parent, config)
        except (EOFError, ConnectionError):
            pass
        except (EngineError, BulkError) as error:
            parent.send(str(error))
        except MemoryError:
            parent.send(f"not enough memory for {config.model.model_id}")
        except Exception as error:  # noqa: BLE001 - the user gets one sentence for any error
            name = "a tokenization process" if config.encoder is None else f"the engine of {config.encoder['device']}"
            parent.send(f"internal error in {name}: {type(error).__name__}: {error}")
    os._exit(0)  # without waiting for threads


def _run_tokenization(parent: Connection, config: WorkerConfig) -> None:
    stage = TokenizationStage(config.job, config.model, SharedBuffers(config.buffers))
    parent.send({})
    while True:
        name, block = parent.recv()
        getattr(stage, name)(block)
        parent.send(block)


def _run_engine(parent: Connection, config: WorkerConfig) -> None:
    encoder = load_encoder(config.model, **config.encoder or {})
    texts, reported = 0, time.monotonic()

    def progress(more: int) -> None:
        nonlocal texts, reported
        texts += more
        if time.monotonic() - reported > _PROGRESS_INTERVAL_S:
            parent.send(texts)
            texts, reported = 0, time.monotonic()

    stage = EngineStage(config.job, config.model, encoder, SharedBuffers(config.buffers), progress)
    parent.send({"encoder": encoder.name, "device": encoder.device.partition(":")[0], "dtype": encoder.dtype})
    blocks: queue.SimpleQueue[Block] = queue.SimpleQueue()
    threading.Thread(target=_receive_blocks, args=(parent, blocks), daemon=True).start()
    for finished in stage.encode(_waiting(blocks)):
        parent.send(finished)


def _waiting(blocks: queue.SimpleQueue[Block]) -> Iterator[Block | None]:
    while True:
        if blocks.empty():
            yield None
        yield blocks.get()


def _receive_blocks(parent: Connection, blocks: queue.SimpleQueue[Block]) -> None:
    """In a thread, so that the process ends with its parent even while a forward hangs."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            _, block = parent.recv()
            blocks.put(block)
    os._exit(0)


if __name__ == "__main__":
    from embert.server.bulk import worker  # so that messages are pickled as classes of this name, not of `__main__`

    worker.main()
