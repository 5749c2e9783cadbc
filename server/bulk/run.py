"""A run: its processes, and the path of blocks through them.

    reader ─▶ tokenization process ─▶ engine process ─▶ tokenization process ─▶ writer
              tokenize                encode            format                  in the order of the input

One thread for each shared buffer takes block after block along this path.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from embert.engine import Encoder, Model
from embert.engine.engine import output_width, require_task
from embert.engine.host import blas_threads, usable_cpus
from embert.engine.quantization import MIN_ACCURACY
from embert.server.bulk.job import Block, BulkError, CannotResume, Job, RowRange, SharedBuffers
from embert.server.bulk.resume import run_manifest
from embert.server.bulk.rows import FileLayout, ParsedRows
from embert.server.bulk.stages import EngineStage, TokenizationStage
from embert.server.bulk.table_reader import Reader
from embert.server.bulk.worker import WorkerConfig, WorkerProcess
from embert.server.bulk.writer import Writer

__all__ = ["DeviceConfig", "Pipeline", "ProgressBar", "embed_files", "embed_texts"]

_BLOCKS_PER_ENGINE = 3  # one finishes, one is encoded, one waits
_BUFFERS_PER_ENGINE, _BUFFERS_FOR_WRITER = 4, 3
_TOKENIZATION_PROCESSES_PER_GPU = 12
_CPUS_PER_TOKENIZATION_PROCESS = 8  # where the CPU encodes
_STOP_TIMEOUT_S = 10.0  # for a write in progress


class ProgressBar:
    """The progress of a run, with the rate, and the completed share if the total is known. Use as a context manager."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None

    def begin(self, done: int, total: int | None) -> None:
        """Show it: `done` texts were embedded by an earlier run, of `total` if that is known."""
        self._bar = tqdm(
            unit=" texts", unit_scale=True, initial=done, total=total, disable=self._quiet or None, leave=False
        )

    def encoded(self, texts: int) -> None:
        """Advance it. Called from several threads."""
        if self._bar is not None:
            self._bar.update(texts)

    def warn(self, sentence: str) -> None:
        """Write a sentence above it."""
        tqdm.write(f"embert: {sentence}", sys.stderr)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where a run's encoders run."""

    names: Sequence[str]  # "cuda:0"; one engine process each
    dtype: str = "auto"
    encoder: str = "auto"
    min_agreement: float = MIN_ACCURACY
    tokenization_processes: int = 0  # 0: depends on the number of CPUs

    def num_tokenization_processes(self, device_types: Sequence[str]) -> int:
        """The number of tokenization processes beside engines on devices of these types."""
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
    job: Job,
    model: Model,
    reader: Reader,
    writer: Writer,
    devices: DeviceConfig,
    progress: ProgressBar,
    *,
    resume: bool,
) -> None:
    """Embed everything that `reader` has, into `writer`.

    Raises BulkError, InputError for options that the model does not have, OSError. Every process has ended then.
    """
    require_task(model, job.task)
    output_width(model, job.dimensions)
    # The device type is known once an encoder has loaded. A buffer that is not used costs nothing.
    buffers = SharedBuffers.create(max(devices.num_buffers([device_type]) for device_type in ("cuda", "cpu")))
    with contextlib.closing(buffers), contextlib.ExitStack() as stack:

        def start(name: str, config: WorkerConfig, environment: dict[str, str]) -> WorkerProcess:
            process = WorkerProcess(name, config, environment, progress.encoded)
            stack.callback(process.join)
            stack.callback(process.kill)
            return process

        engines = [
            start(
                f"the engine process of {device}",
                WorkerConfig(
                    "engine",
                    job,
                    model,
                    buffers.descriptors,
                    sys.path,
                    device,
                    devices.dtype,
                    devices.encoder,
                    devices.min_agreement,
                ),
                blas_threads(),
            )
            for device in devices.names
        ]
        loaded = [process.wait_ready() for process in engines]
        device_types = [engine["device"] for engine in loaded]
        count = devices.num_tokenization_processes(device_types)
        # The tokenizers' own threads: together, about as many as there are CPUs.
        threads = {"RAYON_NUM_THREADS": str(max(1, usable_cpus() // count))}
        config = WorkerConfig("tokenization", job, model, buffers.descriptors, sys.path)
        tokenizers = [start(f"tokenization process {number}", config, threads) for number in range(count)]
        for process in tokenizers:
            process.wait_ready()
        try:
            manifest = run_manifest(job, model, loaded, reader.identity, writer.shard_rows)
            writer.begin(manifest, FileLayout(job, model), resume=resume)
            reader.skip(writer.rows, writer.digest)
            if writer.is_finished:
                _check_input_ended(reader, writer)
        except CannotResume as error:
            raise BulkError("; ".join(filter(None, (f"cannot resume: {error}", writer.restart_hint)))) from None
        if writer.is_finished:
            progress.warn("everything is embedded already")
        else:
            progress.begin(writer.texts, reader.total)
            pipeline = Pipeline(job, reader, writer, buffers, tokenizers, engines)
            pipeline.run(devices.num_buffers(device_types), progress)
        writer.finish()


def _check_input_ended(reader: Reader, writer: Writer) -> None:
    if reader.read(1) is not None:
        raise CannotResume(f"the run ended after {writer.rows} rows, and the input has more now")


class Pipeline:
    """Takes blocks through workers that are ready. `run` may be called once."""

    def __init__(
        self,
        job: Job,
        reader: Reader,
        writer: Writer,
        buffers: SharedBuffers,
        tokenizers: Sequence[WorkerProcess],
        engines: Sequence[WorkerProcess],
    ) -> None:
        self._job, self._reader, self._writer, self._buffers = job, reader, writer, buffers
        self._tokenizers: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._engines: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for process in tokenizers:
            self._tokenizers.put(process)
        for process in [*engines] * _BLOCKS_PER_ENGINE:
            self._engines.put(process)
        self._read_lock = threading.Lock()
        self._blocks_read, self._rows_read = 0, writer.rows
        self._at_end = False
        self._writing = threading.Condition()  # guards what follows
        self._blocks_written = self._skipped = 0
        self._error: BaseException | None = None
        self._stopped = threading.Event()

    def run(self, num_buffers: int, progress: ProgressBar) -> None:
        """Process all blocks. Raises the first error; nothing is written after it."""
        self._progress = progress
        self._threads = num_buffers
        for buffer in range(num_buffers):
            threading.Thread(target=self._process_blocks, args=(buffer,), daemon=True).start()
        try:
            self._stopped.wait()
        finally:
            self._stopped.set()
            if self._writing.acquire(timeout=_STOP_TIMEOUT_S):
                self._writing.release()
        if self._error is not None:
            raise self._error
        if self._skipped:
            progress.warn(f"rows skipped: {self._skipped}")

    def _process_blocks(self, buffer: int) -> None:
        error = None
        try:
            while (block := self._read(buffer)) is not None:
                self._write(self._embed(block))
        except BaseException as raised:  # noqa: BLE001 - `run` raises it
            error = raised
        with self._writing:
            self._threads -= 1
            if not self._stopped.is_set() and (error is not None or not self._threads):
                self._error = error
                self._stopped.set()
            self._writing.notify_all()

    def _read(self, buffer: int) -> Block | None:
        with self._read_lock:
            if self._at_end or self._stopped.is_set():
                return None
            max_rows = self._job.block_texts
            if shard_rows := self._writer.shard_rows:
                max_rows = min(max_rows, shard_rows - self._rows_read % shard_rows)
            number = self._blocks_read
            try:
                chunk = self._reader.read(max_rows)
            except (BulkError, OSError) as error:  # the blocks before it are written first
                self._at_end = True
                return Block(number, 0, error=str(error))
            if chunk is None or self._stopped.is_set():  # the buffers of a stopped run may be closed
                self._at_end = True
                return None
            self._blocks_read += 1
            self._rows_read += chunk.rows
        block = Block(number, chunk.rows, chunk.ranges, chunk.digest, buffer=buffer)
        self._buffers.put(block, "payload", chunk.payload)
        return block

    def _embed(self, block: Block) -> Block:
        block = self._run_stage("tokenize", self._tokenizers, block)
        if block.texts:
            block = self._run_stage("encode", self._engines, block)
            block = self._run_stage("format", self._tokenizers, block)
        return block

    def _run_stage(self, stage: str, processes: queue.SimpleQueue[WorkerProcess], block: Block) -> Block:
        """Run a stage in the process that is free next."""
        if block.error:
            return block
        process = processes.get()
        try:
            return process.run(stage, block)
        finally:
            processes.put(process)

    def _write(self, block: Block) -> None:
        with self._writing:
            self._writing.wait_for(lambda: self._blocks_written == block.number or self._stopped.is_set())
            if self._stopped.is_set():
                return
            if block.error:
                raise BulkError(block.error)
            if block.skipped and not self._skipped:
                self._progress.warn(f"{block.warning}; such rows are skipped")
            self._skipped += block.skipped
            content = self._buffers.data(block, "output") if block.texts else memoryview(b"")
            self._writer.write(block, content)
            self._blocks_written += 1
            self._writing.notify_all()


def embed_texts(
    job: Job, model: Model, texts: Sequence[str], encoder: Encoder, writer: Writer, progress: ProgressBar
) -> None:
    """Embed a few texts in this process. Raises as `embed_files` does."""
    buffers = SharedBuffers.create(1)
    with contextlib.closing(buffers):
        tokenization = TokenizationStage(job, model, buffers)
        engine = EngineStage(job, model, encoder, buffers, progress.encoded)
        writer.begin({}, FileLayout(job, model), resume=False)
        progress.begin(0, len(texts))
        for first in range(0, len(texts), job.block_texts):
            some = list(texts[first : first + job.block_texts])
            parsed = ParsedRows(some, range(len(some)), [])
            block = Block(0, len(some), (RowRange("text", first + 1, len(some), "number"),), buffer=0)
            tokenization.tokenize(block, parsed)
            if not block.error:
                for _ in engine.encode(block):
                    pass
                while engine.is_busy:
                    engine.finish_batch()
            if not block.error:
                tokenization.format(block, parsed)
            if block.error:
                raise BulkError(block.error)
            writer.write(block, buffers.data(block, "output"))
        writer.finish()
