"""A run: its processes, from their start to their end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from embert.engine import Encoder, Model
from embert.engine.engine import kept_columns, require_task
from embert.engine.host import usable_cpus
from embert.engine.int8_accuracy import MIN_ACCURACY
from embert.server.bulk import pipeline
from embert.server.bulk.child import Child, Ready, Start
from embert.server.bulk.engine_stage import EngineStage
from embert.server.bulk.facts import facts_of
from embert.server.bulk.input.read_rows import ReadRows
from embert.server.bulk.job import BulkError, CannotResume, Job
from embert.server.bulk.output.containers import ArrayFile, Container, LinesFile, ParquetFile
from embert.server.bulk.output.row_group import RowGroups
from embert.server.bulk.slots import Block, Part, Slots
from embert.server.bulk.text_stage import TextStage

__all__ = ["Devices", "Output", "Report", "Source", "embed_files", "embed_texts"]

# Slots: a block for each text process, those of the engines and those that wait to be written.
_SLOTS_OF_AN_ENGINE, _SLOTS_OF_THE_WRITER = 4, 3
_TEXT_PROCESSES_OF_A_GPU = 12
_CPUS_OF_A_TEXT_PROCESS = 8  # where the CPU encodes


class Source(pipeline.Source, Protocol):
    """Where blocks come from."""

    total: int | None  # rows, where known

    @property
    def identity(self) -> list[list[object]] | None:
        """What tells the files from others; None where the digest of their lines does."""
        ...

    def skip(self, rows: int, digest: str) -> None:
        """Skip completed rows. Raises CannotResume where they are not those that were embedded."""
        ...


class Output(pipeline.Output, Protocol):
    """Where blocks go."""

    begin_anew: str  # how to, for people
    digest: str
    texts: int
    is_finished: bool

    def begin(self, facts: dict[str, Any], container: Callable[[], Container], *, resume: bool) -> None:
        """Continue, or begin anew."""
        ...

    def finish(self) -> None:
        """Everything is written."""
        ...


class Report(Protocol):
    """Tells people how far a run is."""

    def begin(self, done: int, total: int | None) -> None:
        """So many texts are done already, of so many if that is known."""
        ...

    def encoded(self, texts: int) -> None:
        """So many more are encoded. Called from several threads."""
        ...

    def warn(self, sentence: str) -> None:
        """Say something."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Where a run's encoders run."""

    names: Sequence[str]  # "cuda:0"; one engine process each
    dtype: str = "auto"
    encoder: str = "auto"
    min_agreement: float = MIN_ACCURACY
    text_processes: int = 0  # 0: as many as the CPUs that engines leave allow

    def text_processes_beside(self, kinds: Sequence[str]) -> int:
        """How many text processes there are, beside encoders on devices of these kinds."""
        if self.text_processes:
            return self.text_processes
        cpus, engines = usable_cpus(), len(self.names)
        if "cuda" in kinds:
            return max(1, min(cpus - engines - 1, _TEXT_PROCESSES_OF_A_GPU * engines))
        return max(1, cpus // _CPUS_OF_A_TEXT_PROCESS)

    def slots_beside(self, kinds: Sequence[str]) -> int:
        """How many blocks there are at a time."""
        return self.text_processes_beside(kinds) + _SLOTS_OF_AN_ENGINE * len(self.names) + _SLOTS_OF_THE_WRITER


def embed_files(
    job: Job, model: Model, source: Source, output: Output, devices: Devices, report: Report, *, resume: bool
) -> None:
    """Embed everything that `source` has, into `output`.

    Raises BulkError, InputError for options that the model does not have, OSError. Every process has ended then.
    """
    require_task(model, job.task)
    kept_columns(model, job.dimensions)
    # What an encoder runs on is known once it has loaded. A slot that is not used costs nothing.
    slots = Slots.create(max(devices.slots_beside(kinds) for kinds in (["cuda"], ["cpu"])))
    with contextlib.closing(slots), _ended() as children:
        engines = []
        for device in devices.names:
            start = Start(
                "engine",
                job,
                model,
                slots.descriptors,
                sys.path,
                device,
                devices.dtype,
                devices.encoder,
                devices.min_agreement,
            )
            engines.append(children.start(f"the engine process of {device}", start))
        ready: list[Ready] = [child.receive() for child in engines]
        kinds = [each.device for each in ready]
        count = devices.text_processes_beside(kinds)
        # The tokenizer's own threads: together, about as many as there are CPUs.
        threads = {"RAYON_NUM_THREADS": str(max(1, usable_cpus() // count))}
        start = Start("text", job, model, slots.descriptors, sys.path)
        text_processes = [children.start(f"text process {number}", start, threads) for number in range(count)]
        for child in text_processes:
            child.receive()
        try:
            facts = facts_of(job, model, ready, source.identity, output.shard_rows)
            output.begin(facts, _container(job, model), resume=resume)
            source.skip(output.rows, output.digest)
            if output.is_finished:
                _check_ended(source, output)
                report.warn("everything is embedded already")
                output.finish()
                return
        except CannotResume as error:
            raise BulkError("; ".join(filter(None, (f"cannot resume: {error}", output.begin_anew)))) from None
        report.begin(output.texts, source.total)
        run = pipeline.Pipeline(
            source,
            output,
            slots,
            slots_used=devices.slots_beside(kinds),
            text_processes=text_processes,
            engines=engines,
            block_rows=job.block_texts,
            formats=job.output_format != "npy",
            encoded=report.encoded,
            warn=report.warn,
        )
        run.run()
        output.finish()
        if run.skipped:
            report.warn(f"rows skipped: {run.skipped}")


def _check_ended(source: Source, output: Output) -> None:
    if source.take(1) is not None:
        raise CannotResume(f"the run ended after {output.rows} rows, and the input has more now")


class _Children:
    """The processes of a run."""

    def __init__(self) -> None:
        self._started: list[Child] = []

    def start(self, name: str, start: Start, environment: dict[str, str] | None = None) -> Child:
        """Start one."""
        child = Child(name, start, environment or {})
        self._started.append(child)
        return child

    def end(self) -> None:
        """End all of them, and wait for it."""
        for child in self._started:
            child.kill()
        for child in self._started:
            child.wait()


@contextlib.contextmanager
def _ended() -> Iterator[_Children]:
    """Processes that end with the context, however that ends."""
    children = _Children()
    try:
        yield children
    finally:
        children.end()


def _container(job: Job, model: Model) -> Callable[[], Container]:
    if job.output_format == "npy":
        return lambda: ArrayFile(kept_columns(model, job.dimensions))
    if job.output_format == "parquet":
        empty = RowGroups(job, model).empty()
        return lambda: ParquetFile(empty)
    return LinesFile


def embed_texts(job: Job, model: Model, texts: Sequence[str], encoder: Encoder, output: Output, report: Report) -> None:
    """Embed texts in this process: a few, for which no other is worth its start. Raises as `embed_files` does."""
    slots = Slots.create(1)
    with contextlib.closing(slots):
        text_stage = TextStage(job, model)
        engine_stage = EngineStage(job, model, encoder, slots, report.encoded)
        output.begin({}, _container(job, model), resume=False)
        report.begin(0, len(texts))
        for first in range(0, len(texts), job.block_texts):
            some = texts[first : first + job.block_texts]
            read = ReadRows(list(some), range(len(some)), [])
            part = Part("text", first + 1, len(read.texts), "number")
            block = Block(0, len(read.texts), (part,), slot=0)
            text_stage.prepare_rows(block, slots, read)
            if not block.error:
                for answer in engine_stage.feed(block):
                    engine_stage.land(answer)
                while engine_stage.is_busy:
                    engine_stage.land(engine_stage.finish_one())
                if job.output_format != "npy" and not block.error:
                    text_stage.finish_rows(block, slots, read)
            if block.error:
                raise BulkError(block.error)
            place = output.place(block, slots)
            if place is not None:
                text_stage.write(block, slots, place)
            output.add(block, slots)
        output.finish()
