"""Writes the output: one file, a folder of shards, or a stream. All but a stream survive a crash at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from embert.server.bulk.job import Block, BulkError, CannotResume, OutputFormat, require_pyarrow
from embert.server.bulk.reader import partial_files
from embert.server.bulk.resume import check_manifest, replace_json, sync_folder
from embert.server.bulk.rows import Layout

_WRITE_BYTES = 256 << 10  # per call: for more, the system may search a long time for contiguous memory


class Writer(ABC):
    """Takes blocks in the order of the input. Use as a context manager."""

    shard_rows: int | None = None
    restart_hint = ""  # for a run that cannot be resumed
    is_finished = False
    texts = rows = 0  # written
    digest = ""  # of the input that they are from
    completed = 0  # texts that a crash would not lose

    @abstractmethod
    def begin(self, manifest: dict[str, Any], layout: Layout, *, resume: bool) -> None:
        """Continue after the completed rows, or start from the beginning.

        Raises CannotResume where the completed rows were made from another manifest.
        """

    @abstractmethod
    def write(self, block: Block, content: bytes | memoryview) -> None:
        """Write the next block."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the output. An empty input has a file without rows."""

    def __enter__(self) -> Writer:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


class StreamWriter(Writer):
    """JSON lines to a stream that cannot be replaced: standard output, a pipe, a device. It cannot be resumed."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        stream.flush()
        self._stream, self._name = stream, name

    def begin(self, manifest: dict[str, Any], layout: Layout, *, resume: bool) -> None:
        """Start from the beginning, as every run does."""
        del manifest, layout, resume

    def finish(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return

    def write(self, block: Block, content: bytes | memoryview) -> None:  # noqa: ARG002 - other writers count its rows
        """Write a block."""
        with write_errors(self._name):
            try:
                descriptor = self._stream.fileno()
            except OSError:  # such as a test's own
                self._stream.write(content)
            else:  # unbuffered: a thread that waits for a reader would hold the buffer's lock at the end of the process
                _write_all(descriptor, content)


class FileWriter(Writer):
    """Writes a file, or a folder of shards, each of the same number of input rows.

        OUTPUT.partial   _part-000001.parquet.partial   the blocks so far; for Parquet, as Arrow streams
        ….parquet        ….parquet                      for Parquet, which cannot be appended to: made from them
        OUTPUT           part-000000.parquet            when it is complete
        ….partial.json   _manifest.json                 the state: what the output is made from, and what is complete

    A block is complete once the state counts it, after an fsync of its bytes; a resumed run truncates the rest. The
    state counts a complete file before the file gets its name, and a resumed run repeats that if a crash came between.
    A thread does all this, and only it changes the state. OUTPUT.partial, or the folder, is locked while a run writes.
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
        self._number = 0  # of the current file
        self._descriptor, self._size = -1, 0  # its partial file; -1: it is not begun
        self._thread = ThreadPoolExecutor(1, "embert-commit")
        self._commit: Future[None] | None = None
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
        check_manifest(before, self._manifest, self._path)
        self._files, self._number = files, len(files)
        if files:
            self._rename_last()
        for file, file_size in sizes.items():
            if not file.is_file() or file.stat().st_size != file_size:
                raise CannotResume(f"{file} is missing or has changed")
        if size is not None:
            self._open(size)
            self._end_full_shard()

    def _open(self, size: int) -> None:
        """Open the current file, of which `size` bytes are complete."""
        partial, _, _ = self._paths(self._number)
        with write_errors(partial):
            self._descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
            if os.fstat(self._descriptor).st_size < size:
                raise CannotResume(f"{partial} is missing, or has lost its end")
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, size, os.SEEK_SET)
        self._size = size or self._append(self._layout.header(0))

    def _append(self, content: bytes | memoryview) -> int:
        with write_errors(self._paths(self._number)[0]):
            _write_all(self._descriptor, content)
        return len(content)

    def write(self, block: Block, content: bytes | memoryview) -> None:
        """Write the next block; it is complete a little later, and at the latest when this object is closed."""
        if self._descriptor < 0:
            self._open(0)
        size = self._size + self._append(content)
        # Without a call, so that Ctrl-C comes before or after all of it.
        self._size, self.texts, self.rows = size, self.texts + block.texts, self.rows + block.rows
        self.digest = block.digest
        if not self._end_full_shard() and (self._commit is None or self._commit.done()):
            self._raise_commit_error()
            self._commit = self._thread.submit(self._save, self._descriptor, self._state())

    def finish(self) -> None:
        """Complete the output."""
        if self._descriptor >= 0:
            self._end()
        self._raise_commit_error()
        if not self.shard_rows:
            self._state_path.unlink(missing_ok=True)  # nothing is left to resume
        elif not self.is_finished:
            self._write_state(self._state() | {"bytes": None, "finished": True})
        self.is_finished = True

    def _end_full_shard(self) -> bool:
        is_full = bool(self.shard_rows and self.rows and self.rows % self.shard_rows == 0)
        if is_full:
            self._end()
        return is_full

    def _end(self) -> None:
        """Let the thread complete the current file, once the one before it is complete."""
        self._raise_commit_error()
        descriptor, self._descriptor = self._descriptor, -1
        self._commit = self._thread.submit(self._complete, self._number, descriptor, self._state())
        self._number += 1

    def _complete(self, number: int, descriptor: int, state: dict[str, Any]) -> None:
        """Make a file of the output from its partial file. For a moment a Parquet file needs the disk twice."""
        partial, ready, target = self._paths(number)
        texts = state["texts"] - sum(file["texts"] for file in self._files)
        try:
            self._save(descriptor, state)
            with write_errors(partial):
                if self._format == "parquet":
                    self._convert(partial, state["bytes"], ready)
                else:
                    os.pwrite(descriptor, self._layout.header(texts), 0)
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._files.append({"name": target.name, "texts": texts, "bytes": ready.stat().st_size})
        self._write_state(state | {"bytes": None, "finished": not self.shard_rows})
        with write_errors(target):
            self._rename_last()

    def _rename_last(self) -> None:
        """Give the last complete file its name, unless it has it already."""
        partial, ready, target = self._paths(len(self._files) - 1)
        if ready.exists() and ready.stat().st_size == self._files[-1]["bytes"]:
            if target.exists():
                shutil.copymode(target, ready)
            ready.replace(target)
            sync_folder(target.parent)
            if ready == partial:  # the name may be another run's by now
                return
        partial.unlink(missing_ok=True)

    def _convert(self, partial: Path, size: int, target: Path) -> None:
        """Make a Parquet file from the Arrow streams of blocks."""
        pa = require_pyarrow("pyarrow", "Parquet")
        try:
            with target.open("wb") as file, pa.OSFile(str(partial)) as streams:
                with self._layout.parquet_writer(file) as parquet:
                    while streams.tell() < size:
                        for batch in pa.ipc.open_stream(streams):
                            parquet.write_batch(batch)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            target.unlink(missing_ok=True)
            if isinstance(error, pa.ArrowInvalid):
                raise BulkError(f"{partial} is damaged: {error}; {self.restart_hint}") from None
            raise

    def _state(self) -> dict[str, Any]:
        names = "texts", "rows", "digest"
        state = {"manifest": self._manifest, "finished": False} | {name: getattr(self, name) for name in names}
        return state | {"bytes": self._size}  # of the partial file; None: there is none

    def _save(self, descriptor: int, state: dict[str, Any]) -> None:
        """Make everything up to `state` durable; called by one thread at a time."""
        with write_errors(self._state_path):
            os.fsync(descriptor)
        self._write_state(state)
        self.completed = state["texts"]

    def _write_state(self, state: dict[str, Any]) -> None:
        with write_errors(self._state_path):
            replace_json(self._state_path, state | {"files": self._files})

    def _raise_commit_error(self) -> None:
        if self._commit is not None:
            self._commit.result()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if self._descriptor >= 0:
            if self.texts > self.completed:
                with contextlib.suppress(BulkError):  # what was complete before still is
                    self._save(self._descriptor, self._state())
            os.close(self._descriptor)
        if not self._state_path.exists() and not self.is_finished:  # there is nothing to continue
            self._paths(self._number)[0].unlink(missing_ok=True)
            if self._is_new_folder:
                with contextlib.suppress(OSError):
                    self._path.rmdir()
        os.close(self._lock)


def _open_locked(path: Path, flags: int) -> int:
    """Open and lock a file or folder."""
    while True:
        descriptor = os.open(path, flags, 0o666)
        if not _lock(descriptor):
            os.close(descriptor)
            raise BulkError(f"another run is writing {path}")
        # A run that ended between the two steps has renamed the file to the output.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]


@contextlib.contextmanager
def write_errors(path: Path | str) -> Iterator[None]:
    """Turn OSError into BulkError with the file's name, but where the reader of a pipe has exited."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BulkError(f"{path} cannot be written: {error.strerror or error}") from None


def _lock(descriptor: int) -> bool:
    """Lock a file or folder; False if another run has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
