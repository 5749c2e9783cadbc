"""A run: its processes, and the path of blocks through them.

    reader ─▶ tokenization process ─▶ engine process ─▶ the same tokenization process ─▶ writer
              tokenize                encode            format                           in the order of the input

A thread reads blocks, and the main thread writes them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from typing import Any

from tqdm import tqdm

from embert.engine import Encoder, Model
from embert.engine.host import blas_threads, usable_cpus
from embert.engine.options import output_width, require_tasks
from embert.server.bulk.job import Block, BulkError, CannotResume, Chunk, Job, RowRange, SharedBuffers
from embert.server.bulk.reader import Reader
from embert.server.bulk.rows import Layout, ParsedRows
from embert.server.bulk.stages import EngineStage, Links, TokenizationStage, work
from embert.server.bulk.writer import Writer, run_manifest
from embert.server.ipc.control import describe_exit

_BUFFERS_PER_ENGINE, _BUFFERS_FOR_WRITER = 4, 3
_TOKENIZATION_PROCESSES_PER_GPU = 12
_CPUS_PER_TOKENIZATION_PROCESS = 8  # where the CPU encodes
# The main thread waits in steps of this. Ctrl-C does not end a wait without a timeout if another thread receives the
# signal, or if it arrives just before the wait.
_SIGNAL_INTERVAL_S = 0.5
_PROCESSES = get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Devices of a run's encoders, and processes next to them."""

    names: Sequence[str]  # "cuda:0"; one engine process each
    encoder: Mapping[str, Any] = field(default_factory=dict)  # options of `load_encoder` but the device
    tokenization_processes: int = 0  # 0: depends on the number of CPUs

    def num_tokenization_processes(self, device_types: Sequence[str]) -> int:
        """The number of tokenization processes next to engines on devices of these types."""
        if self.tokenization_processes:
            return self.tokenization_processes
        cpus, engines = usable_cpus(), len(self.names)
        if "cuda" in device_types:
            return max(1, min(cpus - engines - 1, _TOKENIZATION_PROCESSES_PER_GPU * engines))
        return max(1, cpus // _CPUS_PER_TOKENIZATION_PROCESS)


def embed_files(
    job: Job, model: Model, reader: Reader, writer: Writer, devices: DeviceConfig, *, resume: bool, quiet: bool
) -> None:
    """Embed everything that `reader` has, into `writer`.

    Raises BulkError, InputError for options that the model does not have, OSError. Every process has ended then.
    """
    require_tasks(model, job.task)
    output_width(model, job.dimensions)
    # The device type is known once an encoder has loaded. A queue or buffer that is not used costs nothing.
    most = max(devices.num_tokenization_processes([device_type]) for device_type in ("cuda", "cpu"))
    workers = Workers(job, model, most, most + _BUFFERS_PER_ENGINE * len(devices.names) + _BUFFERS_FOR_WRITER)
    with contextlib.closing(workers):
        engines = [(f"the engine process of {name}", {**devices.encoder, "device": name}) for name in devices.names]
        loaded = workers.start(engines)
        count = devices.num_tokenization_processes([engine["device"] for engine in loaded])
        workers.start([(f"tokenization process {number}", number) for number in range(count)])
        try:
            writer.begin(run_manifest(job, model, loaded, writer.shard_rows), Layout(job, model), resume=resume)
            chunks = reader.chunks(writer.shard_rows, writer.rows)
            _skip_completed(chunks, reader, writer)
        except CannotResume as error:
            raise BulkError("; ".join(filter(None, (f"cannot resume: {error}", writer.restart_hint)))) from None
        if writer.is_finished:
            _warn("everything is embedded already")
        else:
            initial, total = writer.texts, reader.total
            with tqdm(
                unit=" texts", unit_scale=True, initial=initial, total=total, disable=quiet or None, leave=False
            ) as bar:
                Pipeline(chunks, writer, workers, count).run(bar.update)
        writer.finish()


def _warn(sentence: str) -> None:
    tqdm.write(f"embert: {sentence}", sys.stderr)  # above a progress bar


def _skip_completed(chunks: Iterator[Chunk], reader: Reader, writer: Writer) -> None:
    """Read the completed rows again. Raises CannotResume where they are not the ones that were embedded."""
    rows, digest = 0, writer.digest if not writer.rows else ""
    while rows < writer.rows and (chunk := next(chunks, None)):
        rows, digest = rows + chunk.rows, chunk.digest
    if rows != writer.rows or digest != writer.digest:
        raise CannotResume(f"the first {writer.rows} {reader.unit}s of {reader.name} are not those that were embedded")
    if writer.is_finished and next(chunks, None) is not None:
        raise CannotResume(f"the run ended after {writer.rows} rows, and the input has more now")


class Workers:
    """The processes of a run. They end when this process ends, for any reason."""

    def __init__(self, job: Job, model: Model, tokenizers: int, buffers: int) -> None:
        """Allow at most this many tokenization processes, and blocks in memory."""
        self.buffers = SharedBuffers(buffers)
        self._job, self._model = job, model
        self._results, sender = _PROCESSES.Pipe(duplex=False)
        queues = [_PROCESSES.SimpleQueue() for _ in range(tokenizers)]
        self._links = Links(queues, _PROCESSES.SimpleQueue(), sender, _PROCESSES.Lock())
        self._processes: dict[Any, Any] = {}  # by their sentinels

    def start(self, roles: Sequence[tuple[str, Any]]) -> list[dict[str, str]]:
        """Start processes of these names and roles; see `work`. Returns what an engine has loaded, once all are ready.

        Raises BulkError where one cannot load.
        """
        environment = blas_threads() | {"PYTHONSAFEPATH": "1"}  # never import from the working directory
        os.environ |= environment
        # Ctrl-C reaches this process only, which then ends the others.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for name, role in roles:
                arguments = self._job, self._model, self.buffers, self._links, role
                process = _PROCESSES.Process(target=work, args=arguments, name=name, daemon=True)
                process.start()
                self._processes[process.sentinel] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for variable in environment:
                del os.environ[variable]
        return [self.receive() for _ in roles]

    def tokenize(self, block: Block) -> None:
        """Let a block be processed; `receive` returns it."""
        self._links.tokenizers[block.tokenizer].put(("tokenize", block))

    def put(self, block: Block) -> None:
        """Let `receive` return this block."""
        self._links.put(block)

    def receive(self) -> Any:
        """The next message. Raises BulkError where a process fails or has ended."""
        while not (ready := connection.wait([self._results, *self._processes], _SIGNAL_INTERVAL_S)):
            pass
        if self._results not in ready:
            process = self._processes[ready[0]]
            process.join()
            hint = "; perhaps memory ran out" if process.exitcode == -signal.SIGKILL else ""
            raise BulkError(f"{process.name} {describe_exit(process.exitcode)}{hint}")
        message = self._results.recv()
        if isinstance(message, str):
            raise BulkError(message)
        return message

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


class Pipeline:
    """Takes chunks through the workers. `run` may be called once."""

    def __init__(self, chunks: Iterator[Chunk], writer: Writer, workers: Workers, tokenizers: int) -> None:
        self._chunks, self._writer, self._workers, self._tokenizers = chunks, writer, workers, tokenizers
        self._sources: dict[int, Chunk] = {}  # by the numbers of their blocks
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # buffers; -1: the run has ended
        self._error: Exception | None = None  # of reading

    def run(self, progress: Callable[[int], object]) -> None:
        """Process all blocks. Raises the first error; nothing is written after it."""
        for buffer in range(self._workers.buffers.count):
            self._free.put(buffer)
        # A daemon, because it may wait for standard input when the run ends.
        threading.Thread(target=self._read, daemon=True).start()
        finished: dict[int, Block] = {}
        skipped = 0
        try:
            for number in itertools.count():
                while number not in finished:
                    received: Block = self._workers.receive()
                    finished[received.number] = received
                block = finished.pop(number)
                if not block.rows:
                    break
                problem = self._sources.pop(number).location(block.bad_row) + block.reason if block.reason else ""
                if block.failed:
                    raise BulkError(problem)
                if block.skipped and not skipped:
                    _warn(f"{problem}; such rows are skipped")
                skipped += block.skipped
                self._writer.write(block, self._workers.buffers.output(block))
                self._free.put(block.buffer)
                progress(block.texts)
        finally:
            self._free.put(-1)
        if self._error is not None:
            raise self._error
        if skipped:
            _warn(f"rows skipped: {skipped}")

    def _read(self) -> None:
        number = 0
        try:
            for chunk in self._chunks:
                if (buffer := self._free.get()) < 0:
                    return
                block = Block(number, chunk.rows, chunk.digest, buffer=buffer, tokenizer=number % self._tokenizers)
                self._workers.buffers.put(block, "payload", chunk.payload)
                self._sources[number] = chunk._replace(payload=b"")
                self._workers.tokenize(block)
                number += 1
        except Exception as error:  # noqa: BLE001 - `run` raises it, after the blocks before it are written
            self._error = error
        self._workers.put(Block(number, 0))  # the end


def embed_texts(job: Job, model: Model, texts: Sequence[str], encoder: Encoder, writer: Writer) -> None:
    """Embed a few texts in this process. Raises as `embed_files` does."""
    buffers = SharedBuffers(1)
    tokenization, engine = TokenizationStage(job, model, buffers), EngineStage(job, model, encoder, buffers)
    writer.begin({}, Layout(job, model), resume=False)
    for first in range(0, len(texts), job.block_texts):
        some = list(texts[first : first + job.block_texts])
        source = Chunk(b"", len(some), (RowRange("text", first + 1, len(some), "number"),), "")
        block = Block(0, len(some))
        tokenization.tokenize(block, ParsedRows(some, range(len(some))))
        if block.texts:
            for encoded in engine.encode([block]):
                tokenization.format(encoded)
        if block.failed:
            raise BulkError(source.location(block.bad_row) + block.reason)
        writer.write(block, buffers.output(block))
    writer.finish()
