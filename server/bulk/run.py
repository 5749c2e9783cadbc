"""A run: its processes, and the path of blocks through them.

    reader ─▶ tokenization process ─▶ engine process ─▶ the same tokenization process ─▶ writer
              tokenize                encode            format                           in the order of the input

A thread reads blocks, one for each shared buffer takes a block along this path, and the main thread writes.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tqdm import tqdm

from embert.engine import Encoder, Model
from embert.engine.host import blas_threads, usable_cpus
from embert.engine.options import output_width, require_tasks
from embert.server.bulk.job import Block, BulkError, CannotResume, Job, RowRange, SharedBuffers
from embert.server.bulk.reader import Chunk, Reader
from embert.server.bulk.resume import run_manifest
from embert.server.bulk.rows import Layout, ParsedRows
from embert.server.bulk.stages import EngineStage, TokenizationStage
from embert.server.bulk.worker import WorkerConfig, WorkerProcess
from embert.server.bulk.writer import Writer

_BLOCKS_PER_ENGINE = 3  # one finishes, one is encoded, one waits
_BUFFERS_PER_ENGINE, _BUFFERS_FOR_WRITER = 4, 3
_TOKENIZATION_PROCESSES_PER_GPU = 12
_CPUS_PER_TOKENIZATION_PROCESS = 8  # where the CPU encodes
# The main thread waits in steps of this. Ctrl-C does not end a wait without a timeout if another thread receives the
# signal, or if it arrives just before the wait.
_SIGNAL_INTERVAL_S = 0.5


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

    def num_buffers(self, device_types: Sequence[str]) -> int:
        """The number of blocks in memory at a time."""
        processes = self.num_tokenization_processes(device_types)
        return processes + _BUFFERS_PER_ENGINE * len(self.names) + _BUFFERS_FOR_WRITER


def embed_files(
    job: Job, model: Model, reader: Reader, writer: Writer, devices: DeviceConfig, *, resume: bool, quiet: bool
) -> None:
    """Embed everything that `reader` has, into `writer`.

    Raises BulkError, InputError for options that the model does not have, OSError. Every process has ended then.
    """
    require_tasks(model, job.task)
    output_width(model, job.dimensions)
    # The device type is known once an encoder has loaded. A buffer that is not used costs nothing.
    buffers = SharedBuffers.create(max(devices.num_buffers([device_type]) for device_type in ("cuda", "cpu")))
    with contextlib.closing(buffers), contextlib.ExitStack() as stack:

        def start(name: str, config: WorkerConfig, environment: dict[str, str]) -> WorkerProcess:
            process = WorkerProcess(name, config, environment)
            stack.callback(process.join)
            stack.callback(process.kill)
            return process

        config = WorkerConfig(job, model, buffers.descriptors, sys.path)
        engines = [
            start(
                f"the engine process of {device}",
                replace(config, encoder={**devices.encoder, "device": device}),
                blas_threads(),
            )
            for device in devices.names
        ]
        loaded = [process.wait_ready() for process in engines]
        device_types = [engine["device"] for engine in loaded]
        count = devices.num_tokenization_processes(device_types)
        # The tokenizers' own threads: together, about as many as there are CPUs.
        threads = {"RAYON_NUM_THREADS": str(max(1, usable_cpus() // count))}
        tokenizers = [start(f"tokenization process {number}", config, threads) for number in range(count)]
        for process in tokenizers:
            process.wait_ready()
        try:
            writer.begin(run_manifest(job, model, loaded, writer.shard_rows), Layout(job, model), resume=resume)
            chunks = reader.chunks(writer.shard_rows, writer.rows)
            _skip_completed(chunks, reader, writer)
        except CannotResume as error:
            raise BulkError("; ".join(filter(None, (f"cannot resume: {error}", writer.restart_hint)))) from None
        if writer.is_finished:
            _warn("everything is embedded already")
        else:
            with tqdm(
                unit=" texts",
                unit_scale=True,
                initial=writer.texts,
                total=reader.total,
                disable=quiet or None,
                leave=False,
            ) as bar:
                for process in engines:
                    process.progress = bar.update
                Pipeline(chunks, writer, buffers, tokenizers, engines).run(devices.num_buffers(device_types))
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


Result = Block | Exception | None  # None: the end of the input


class Pipeline:
    """Takes chunks through workers that are ready. `run` may be called once."""

    def __init__(
        self,
        chunks: Iterator[Chunk],
        writer: Writer,
        buffers: SharedBuffers,
        tokenizers: Sequence[WorkerProcess],
        engines: Sequence[WorkerProcess],
    ) -> None:
        self._chunks, self._writer, self._buffers = chunks, writer, buffers
        self._numbers = itertools.count()
        self._tokenizers, self._engines = _queue_of(tokenizers), _queue_of([*engines] * _BLOCKS_PER_ENGINE)
        self._reading = threading.Lock()  # held while a thread waits for input
        self._filling, self._stopped = threading.Lock(), False  # the buffers of a stopped run may be closed
        self._results: queue.SimpleQueue[tuple[int, Result]] = queue.SimpleQueue()  # with the numbers of the blocks

    def run(self, num_buffers: int) -> None:
        """Process all blocks. Raises the first error; nothing is written after it."""
        self._free = _queue_of(range(num_buffers))
        for _ in range(num_buffers):  # daemons, because one may wait for standard input when the run ends
            threading.Thread(target=self._process_blocks, daemon=True).start()
        results: dict[int, Result] = {}
        number = skipped = 0
        try:
            while (block := self._result(results, number)) is not None:
                if isinstance(block, Exception):
                    raise block
                if block.error:
                    raise BulkError(block.error)
                if block.skipped and not skipped:
                    _warn(f"{block.warning}; such rows are skipped")
                skipped += block.skipped
                self._writer.write(block, self._buffers.output(block))
                self._free.put(block.buffer)
                number += 1
        finally:
            with self._filling:
                self._stopped = True
            self._free.put(-1)
        if skipped:
            _warn(f"rows skipped: {skipped}")

    def _result(self, results: dict[int, Result], number: int) -> Result:
        while number not in results:
            with contextlib.suppress(queue.Empty):
                results.update([self._results.get(timeout=_SIGNAL_INTERVAL_S)])
        return results.pop(number)

    def _process_blocks(self) -> None:
        while (buffer := self._free.get()) >= 0:
            number = 0
            result: Result = None
            try:
                with self._reading:
                    number, chunk = next(self._numbers), next(self._chunks, None)
                    if chunk is not None:
                        block = Block(number, chunk.rows, chunk.ranges, chunk.digest, buffer=buffer)
                        with self._filling:
                            if self._stopped:
                                return
                            self._buffers.put(block, "payload", chunk.payload)
                if chunk is not None:
                    result = self._embed(block)
            except Exception as error:  # noqa: BLE001 - `run` raises it, after the blocks before it are written
                result = error
            self._results.put((number, result))
        self._free.put(-1)  # for the other threads

    def _embed(self, block: Block) -> Block:
        with _borrowed(self._tokenizers) as tokenizer:
            block = tokenizer.run("tokenize", block)
        if block.texts and not block.error:
            with _borrowed(self._engines) as engine:
                block = engine.run("encode", block)
            block = tokenizer.run("format", block)
        return block


Item = TypeVar("Item")


def _queue_of(items: Iterable[Item]) -> queue.SimpleQueue[Item]:
    filled: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        filled.put(item)
    return filled


@contextlib.contextmanager
def _borrowed(processes: queue.SimpleQueue[WorkerProcess]) -> Iterator[WorkerProcess]:
    """The process that is free next."""
    process = processes.get()
    try:
        yield process
    finally:
        processes.put(process)


def embed_texts(job: Job, model: Model, texts: Sequence[str], encoder: Encoder, writer: Writer) -> None:
    """Embed a few texts in this process. Raises as `embed_files` does."""
    with contextlib.closing(SharedBuffers.create(1)) as buffers:
        tokenization = TokenizationStage(job, model, buffers)
        engine = EngineStage(job, model, encoder, buffers)
        writer.begin({}, Layout(job, model), resume=False)
        for first in range(0, len(texts), job.block_texts):
            some = list(texts[first : first + job.block_texts])
            block = Block(0, len(some), (RowRange("text", first + 1, len(some), "number"),), buffer=0)
            tokenization.tokenize(block, ParsedRows(some, range(len(some))))
            if block.texts and not block.error:
                for encoded in engine.encode([block]):
                    tokenization.format(encoded)
            if block.error:
                raise BulkError(block.error)
            writer.write(block, buffers.output(block))
        writer.finish()
