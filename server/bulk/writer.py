"""Writes the output: one file, a folder of shards, or a stream. All but a stream survive a crash at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from embert.engine import Model
from embert.server.bulk.job import Block, BulkError, CannotResume, Job, OutputFormat, require_pyarrow
from embert.server.bulk.reader import partial_files
from embert.server.bulk.rows import Layout

_SAVE_INTERVAL_S = 1.0  # between two syncs of a file that grows
_WRITE_BYTES = 256 << 10  # per call: for more, the system may search a long time for contiguous memory


class Writer(ABC):
    """Takes blocks in the order of the input. Use as a context manager."""

    shard_rows: int | None = None
    restart_hint = ""  # for a run that cannot be resumed
    is_finished = False
    texts = rows = 0  # written
    digest = ""  # of the input that they are from
    completed = 0  # texts that a crash would not lose

    def begin(self, manifest: dict[str, Any], layout: Layout, *, resume: bool) -> None:  # noqa: B027 - optional
        """Continue after the completed rows, or start from the beginning.

        Raises CannotResume where the completed rows were made from another manifest.
        """

    @abstractmethod
    def write(self, block: Block, content: bytes | memoryview) -> None:
        """Write the next block."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Complete the output. An empty input has a file without rows."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - optional
        """Close the output."""


class StreamWriter(Writer):
    """JSON lines to a stream that cannot be replaced: standard output, a pipe, a device. It cannot be resumed."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, block: Block, content: bytes | memoryview) -> None:  # noqa: ARG002 - other writers count its rows
        """Write a block."""
        with write_errors(self._name):
            self._stream.write(content)
            self._stream.flush()


class FileWriter(Writer):
    """Writes a file, or a folder of shards, each of the same number of input rows.

        OUTPUT.partial   _part-000001.parquet.partial   the blocks so far; for Parquet, as Arrow streams
        ….parquet        ….parquet                      for Parquet, which cannot be appended to: made from them
        OUTPUT           part-000000.parquet            when it is complete
        ….partial.json   _manifest.json                 the state: what the output is made from, and what is complete

    A block is complete once the state counts it, after an fsync of its bytes; a resumed run truncates the rest. The
    state counts a complete file before the file gets its name, and a resumed run repeats that if a crash came between.
    OUTPUT.partial, or the folder, is locked while a run writes.
    """

    def __init__(
        self,
        path: str,
        format_: OutputFormat,
        shard_rows: int | None = None,
        *,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        """Lock the output. Raises BulkError or OSError where that is not possible.

        Raises BulkError for a file with content, and for a folder with files, but where the file is replaced with
        `overwrite`, or the output has the state of the run that `resume` continues.
        """
        self._path = Path(os.path.realpath(path))  # replace the target of a link, not the link
        self._format, self.shard_rows = format_, shard_rows
        self._manifest: dict[str, Any] = {}
        self._files: list[dict[str, Any]] = []  # complete: name, texts, bytes
        self._descriptor, self._size = -1, 0  # the current file's partial file; -1: it is not begun
        self._saved_at = 0.0
        self._is_new_folder = bool(shard_rows) and not self._path.exists()
        if shard_rows:
            Path(path).mkdir(exist_ok=True)
            self._state_path, locked, flags = self._path / "_manifest.json", self._path, os.O_RDONLY | os.O_DIRECTORY
            self.restart_hint = f"remove {Path(path)} to start from the beginning"
        else:
            locked, self._state_path, _ = partial_files(path)
            flags = os.O_RDWR | os.O_CREAT
            self.restart_hint = "omit --resume to start from the beginning"
        self._lock = _open_locked(locked, flags)
        if error := self._refusal(overwrite=overwrite, resume=resume):
            self.__exit__()
            raise BulkError(f"{Path(path)} {error}")

    def _refusal(self, *, overwrite: bool, resume: bool) -> str:
        has_state = self._state_path.exists()
        if not self.shard_rows:
            has_content = self._path.exists() and self._path.stat().st_size
            return "exists; --overwrite replaces it" if has_content and not overwrite | (resume & has_state) else ""
        if has_state:
            return (
                "" if resume else "holds the shards of another run; add --resume to continue it, or remove the folder"
            )
        if any(not file.name.startswith("_") for file in self._path.iterdir()):
            return "is not empty, and has no _manifest.json of an earlier run; name another folder"
        return "" if os.access(self._path, os.W_OK | os.X_OK) else "is not writable"

    def _paths(self, number: int) -> tuple[Path, Path, Path]:
        """The partial file of a file of the output, what becomes the output, and the output."""
        target = self._path / f"part-{number:06d}.{self._format}" if self.shard_rows else self._path
        partial = target.with_name(f"{'_' if self.shard_rows else ''}{target.name}.partial")
        return partial, partial.with_name(f"{partial.name}.parquet") if self._format == "parquet" else partial, target

    def begin(self, manifest: dict[str, Any], layout: Layout, *, resume: bool) -> None:
        """Continue after the completed blocks, or start from the beginning."""
        self._manifest, self._layout = orjson.loads(orjson.dumps(manifest)), layout  # as it is read back
        if not resume or not self._state_path.exists():
            self._state_path.unlink(missing_ok=True)
            self._open(0)
            return
        try:
            state: dict[str, Any] = orjson.loads(self._state_path.read_bytes())
            before, files, size = dict(state["manifest"]), list(state["files"]), state["bytes"]
            sizes = {self._paths(number)[2]: file["bytes"] for number, file in enumerate(files)}
            self.texts = self.completed = int(state["texts"])
            self.rows, self.digest, self.is_finished = int(state["rows"]), state["digest"], state["finished"]
        except (ValueError, KeyError, TypeError):
            raise CannotResume(f"{self._state_path} is damaged") from None
        for name in {**before, **self._manifest}:
            if (old := before.get(name)) != (new := self._manifest.get(name)):
                raise CannotResume(f"{name} was {old!r} in {self._path}, and is {new!r}")
        self._files = files
        if files:
            self._rename_last()
        for file, file_size in sizes.items():
            if not file.is_file() or file.stat().st_size != file_size:
                raise CannotResume(f"{file} is missing or has changed")
        if size is not None:
            self._open(size)
            if self._is_full():
                self._complete()

    def _open(self, size: int) -> None:
        """Open the current file, of which `size` bytes are complete."""
        partial, _, _ = self._paths(len(self._files))
        with write_errors(partial):
            self._descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
            if os.fstat(self._descriptor).st_size < size:
                raise CannotResume(f"{partial} is missing, or has lost its end")
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, size, os.SEEK_SET)
        self._size = size or self._append(self._layout.header(0))

    def _append(self, content: bytes | memoryview) -> int:
        view = memoryview(content)
        with write_errors(self._paths(len(self._files))[0]):
            while view:
                view = view[os.write(self._descriptor, view[:_WRITE_BYTES]) :]
        return len(content)

    def write(self, block: Block, content: bytes | memoryview) -> None:
        """Write the next block; it is complete a little later, and at the latest when this object is closed."""
        if self._descriptor < 0:
            self._open(0)
        size = self._size + self._append(content)
        # Without a call, so that Ctrl-C comes before or after all of it.
        self._size, self.texts, self.rows = size, self.texts + block.texts, self.rows + block.rows
        self.digest = block.digest
        if self._is_full():
            self._complete()
        elif time.monotonic() - self._saved_at > _SAVE_INTERVAL_S:
            self._sync(self._descriptor)

    def finish(self) -> None:
        """Complete the output."""
        if self._descriptor >= 0:
            self._complete()
        if not self.shard_rows:
            self._state_path.unlink(missing_ok=True)  # nothing is left to resume
        elif not self.is_finished:
            self._save(None, finished=True)
        self.is_finished = True

    def _is_full(self) -> bool:
        return bool(self.shard_rows and self.rows and self.rows % self.shard_rows == 0)

    def _complete(self) -> None:
        """Make a file of the output from its partial file. For a moment a Parquet file needs the disk twice."""
        partial, ready, target = self._paths(len(self._files))
        texts = self.texts - sum(file["texts"] for file in self._files)
        descriptor, self._descriptor = self._descriptor, -1
        try:
            self._sync(descriptor)
            with write_errors(partial):
                if self._format == "parquet":
                    self._convert(partial, ready)
                else:
                    os.pwrite(descriptor, self._layout.header(texts), 0)
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._files.append({"name": target.name, "texts": texts, "bytes": ready.stat().st_size})
        self._save(None, finished=not self.shard_rows)
        with write_errors(target):
            self._rename_last()

    def _rename_last(self) -> None:
        """Give the last complete file its name, unless it has it already."""
        partial, ready, target = self._paths(len(self._files) - 1)
        if ready.exists() and ready.stat().st_size == self._files[-1]["bytes"]:
            if target.exists():
                shutil.copymode(target, ready)
            ready.replace(target)
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(folder)  # of the name
            os.close(folder)
            if ready == partial:  # the name may be another run's by now
                return
        partial.unlink(missing_ok=True)

    def _convert(self, partial: Path, target: Path) -> None:
        """Make a Parquet file from the Arrow streams of blocks."""
        pa = require_pyarrow("pyarrow", "Parquet")
        try:
            with target.open("wb") as file, pa.OSFile(str(partial)) as streams:
                with self._layout.parquet_writer(file) as parquet:
                    while streams.tell() < self._size:
                        for batch in pa.ipc.open_stream(streams):
                            parquet.write_batch(batch)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            target.unlink(missing_ok=True)
            if isinstance(error, pa.ArrowInvalid):
                raise BulkError(f"{partial} is damaged: {error}; {self.restart_hint}") from None
            raise

    def _sync(self, descriptor: int) -> None:
        """Make everything that is written durable."""
        with write_errors(self._state_path):
            os.fsync(descriptor)
        self._save(self._size)
        self.completed, self._saved_at = self.texts, time.monotonic()

    def _save(self, size: int | None, *, finished: bool = False) -> None:
        """Replace the state. `size` bytes of the current file are complete; None: it is not begun."""
        state = {"manifest": self._manifest, "finished": finished, "texts": self.texts, "rows": self.rows}
        state |= {"digest": self.digest, "bytes": size, "files": self._files}
        new = self._state_path.with_name(self._state_path.name + ".new")
        try:
            with write_errors(self._state_path), new.open("wb") as file:
                file.write(orjson.dumps(state, option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
                new.replace(self._state_path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            if self.texts > self.completed:
                with contextlib.suppress(BulkError):  # what was complete before still is
                    self._sync(self._descriptor)
            os.close(self._descriptor)
        if not self._state_path.exists() and not self.is_finished:  # there is nothing to continue
            self._paths(len(self._files))[0].unlink(missing_ok=True)
            if self._is_new_folder:
                with contextlib.suppress(OSError):
                    self._path.rmdir()
        os.close(self._lock)


def _open_locked(path: Path, flags: int) -> int:
    """Open and lock a file or folder."""
    descriptor = os.open(path, flags, 0o666)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that ended between the two steps has renamed the file to the output.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)
    raise BulkError(f"another run is writing {path}")


@contextlib.contextmanager
def write_errors(path: Path | str) -> Iterator[None]:
    """Turn OSError into BulkError with the file's name, but where the reader of a pipe has exited."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BulkError(f"{path} cannot be written: {error.strerror or error}") from None


def run_manifest(
    job: Job, model: Model, engines: Sequence[Mapping[str, str]], shard_rows: int | None
) -> dict[str, Any]:
    """Everything that the output depends on except the input. `engines` has the encoder, device and dtype of each."""
    manifest: dict[str, Any] = {"model": model.model_id, "revision": model.revision, "pooling": model.pooling}
    # Neither the number of devices nor their indices: any free engine takes a block.
    manifest |= {name: sorted({engine[name] for engine in engines}) for name in ("encoder", "device", "dtype")}
    manifest |= dataclasses.asdict(job) | {"task": job.task.name, "schema": job.schema.hex(), "shard_texts": shard_rows}
    if not re.fullmatch("[0-9a-f]{40}", model.revision or ""):  # a commit identifies the files
        # Modules, heads and adapters have their own folders.
        for folder in [model.folder, *([] if model.base is None else [model.base])]:
            for path in sorted(folder.rglob("*")):
                if path.suffix in (".json", ".safetensors", ".txt"):
                    size, changed = path.stat().st_size, path.stat().st_mtime_ns
                    manifest[str(path.relative_to(folder.parent))] = f"{size} bytes, changed at {changed} ns"
    return manifest
