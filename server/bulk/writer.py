"""Writes the output: one file, a folder of shards, or a stream. All but a stream survive a crash at any moment."""

from __future__ import annotations

import abc
import contextlib
import fcntl
import os
import shutil
import stat
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


class Writer(abc.ABC):
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

    @abc.abstractmethod
    def write(self, block: Block, content: bytes | memoryview) -> None:
        """Write the next block."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Complete the output."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - optional
        pass


class _DurableWriter(Writer):
    """Appends blocks to a partial file, which becomes a file of the output with its last row.

    A thread makes what is written durable, and describes it in a JSON file. A block is complete once that file says
    so, after an fsync of its bytes; a resumed run truncates the rest. Parquet files cannot be appended to, so their
    partial files have Arrow streams, and they are made from them at the end.
    """

    def __init__(self, output: Path, state: Path) -> None:
        self._path, self._state_path = output, state
        self._manifest: dict[str, Any] = {}
        self._shards: list[dict[str, Any]] = []  # complete files
        self._begun = 0  # files
        self._descriptor = -1  # of the partial file
        self._size = 0  # its bytes
        self._thread = ThreadPoolExecutor(1, "embert-commit")
        self._commit: Future[None] | None = None

    @abc.abstractmethod
    def _paths(self, number: int) -> tuple[Path, Path]:
        """A file of the output while it is written, and in the end."""

    @abc.abstractmethod
    def _save_complete(self, state: dict[str, Any]) -> None:
        """Record that a file is complete."""

    def begin(self, manifest: dict[str, Any], layout: Layout, *, resume: bool) -> None:
        """Continue after the completed blocks, or start from the beginning."""
        self._manifest, self._layout = orjson.loads(orjson.dumps(manifest)), layout  # as it is read back
        if not resume or not self._state_path.exists():
            self._state_path.unlink(missing_ok=True)
            self._open(0)
            return
        try:
            state: dict[str, Any] = orjson.loads(self._state_path.read_bytes())
            before, shards, size, is_last = dict(state["facts"]), list(state["shards"]), state["bytes"], state["last"]
            texts, rows, digest, finished = (state[name] for name in ("texts", "rows", "digest", "finished"))
            files = {self._paths(number)[1]: shard["bytes"] for number, shard in enumerate(shards)}
        except (ValueError, KeyError, TypeError):
            raise CannotResume(f"{self._state_path} is damaged") from None
        check_manifest(before, self._manifest, self._path)
        for file, file_size in files.items():
            if not file.is_file() or file.stat().st_size != file_size:
                raise CannotResume(f"{file} is missing or has changed")
        self.texts = self.completed = int(texts)
        self.rows, self.digest, self.is_finished = int(rows), str(digest), bool(finished)
        self._shards, self._begun = shards, len(shards)
        if size is None:
            return
        partial, target = self._paths(self._begun)
        if is_last and target.exists() and not (partial.exists() and partial.stat().st_size):
            self._begun += 1
            self._record(target, state)  # it was killed before this
            return
        self._open(size)
        if is_last and self.shard_rows and self.rows % self.shard_rows == 0:
            self._end()

    def _open(self, size: int) -> None:
        """Open the next file, of which `size` bytes are complete."""
        partial, _ = self._paths(self._begun)
        self._begun += 1
        with write_errors(partial):
            if self._descriptor < 0:
                self._descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
            if os.fstat(self._descriptor).st_size < size:
                raise CannotResume(f"{partial} is missing, or has lost its end")
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, size, os.SEEK_SET)
        self._size = size or self._append(self._layout.header(0))

    def write(self, block: Block, content: bytes | memoryview) -> None:
        """Write the next block; it is complete a little later, and at the latest when this object is closed."""
        if self._descriptor < 0:
            self._open(0)
        size = self._size + self._append(content)
        # Without a call, so that Ctrl-C comes before or after all of it.
        self._size, self.texts, self.rows = size, self.texts + block.texts, self.rows + block.rows
        self.digest = block.digest
        if self.shard_rows and self.rows % self.shard_rows == 0:
            self._end()
        elif self._commit is None or self._commit.done():
            self._raise_commit_error()
            self._commit = self._thread.submit(self._save, self._descriptor, self._state())

    def finish(self) -> None:
        """Complete the output. For an empty input, a folder has one shard without rows."""
        if self.is_finished:
            return
        if self._descriptor < 0 and not self._begun:
            self._open(0)
        if self._descriptor >= 0:
            self._end()
        self._raise_commit_error()
        self.is_finished = True

    def _end(self) -> None:
        """Let the thread complete the current file, once the one before it is complete."""
        self._raise_commit_error()
        descriptor, self._descriptor = self._descriptor, -1
        self._commit = self._thread.submit(self._complete, descriptor, self._state(last=True))

    def _complete(self, descriptor: int, state: dict[str, Any]) -> None:
        """Make the output from a partial file. For a moment a Parquet file needs the disk twice."""
        partial, target = self._paths(len(self._shards))
        complete = partial
        try:
            self._save(descriptor, state)
            with write_errors(partial):
                if self._layout.is_parquet:
                    complete = target.with_name(f"{partial.name}.parquet")
                    self._convert(partial, state["bytes"], complete)
                else:
                    texts = state["texts"] - sum(shard["texts"] for shard in self._shards)
                    os.pwrite(descriptor, self._layout.header(texts), 0)
                    os.fsync(descriptor)
                if target.exists():
                    shutil.copymode(target, complete)
                complete.replace(target)
                sync_folder(target.parent)
                if complete != partial:  # else the name may be another run's by now
                    partial.unlink()
                self._record(target, state)
        except BaseException:
            if complete != partial:
                complete.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

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
        except pa.ArrowInvalid as error:
            raise BulkError(f"{partial} is damaged: {error}; {self.restart_hint}") from None

    def _record(self, target: Path, state: dict[str, Any]) -> None:
        texts = state["texts"] - sum(shard["texts"] for shard in self._shards)
        self._shards.append({"name": target.name, "texts": texts, "bytes": target.stat().st_size})
        self._save_complete(state | {"shards": self._shards, "bytes": None, "last": False})

    def _state(self, *, last: bool = False, finished: bool = False) -> dict[str, Any]:
        return {
            "facts": self._manifest,
            "finished": finished,
            "texts": self.texts,
            "rows": self.rows,
            "digest": self.digest,
            "bytes": None if finished else self._size,  # of the partial file, if there is one
            "last": last,  # nothing follows in the partial file
        }

    def _save(self, descriptor: int, state: dict[str, Any]) -> None:
        """Make everything up to `state` durable; called by one thread at a time."""
        with write_errors(self._state_path):
            os.fsync(descriptor)
            replace_json(self._state_path, state | {"shards": self._shards})
        self.completed = state["texts"]

    def _append(self, content: bytes | memoryview) -> int:
        with write_errors(self._paths(self._begun - 1)[0]):
            _write_all(self._descriptor, content)
        return len(content)

    def _raise_commit_error(self) -> None:
        if self._commit is not None:
            self._commit.result()

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if self._descriptor >= 0:
            if self.texts > self.completed:
                with contextlib.suppress(BulkError):  # what was complete before still is
                    self._save(self._descriptor, self._state())
            if not self._state_path.exists():  # there is nothing to continue
                self._paths(self._begun - 1)[0].unlink(missing_ok=True)
            os.close(self._descriptor)


class FileWriter(_DurableWriter):
    """One output file, written next to OUTPUT, which it replaces at the end.

        OUTPUT.partial           the completed blocks
        OUTPUT.partial.json      the manifest, and where the last complete block ends
        OUTPUT.partial.parquet   at the end of a run into Parquet: the output, made from OUTPUT.partial

    OUTPUT.partial is locked while a run writes it.
    """

    restart_hint = "omit --resume to start from the beginning"

    def __init__(self, path: str, *, overwrite: bool = False, resume: bool = False) -> None:
        """Open and lock OUTPUT.partial. Raises BulkError or OSError where that is not possible.

        A file with content is replaced with `overwrite`, or by the run that `resume` continues.
        """
        self._partial, state, _ = partial_files(path)
        super().__init__(Path(os.path.realpath(path)), state)  # replace the target of a link, not the link
        if self._path.exists():
            if not stat.S_ISREG(self._path.stat().st_mode):
                raise BulkError(f"{self._path} is not a regular file, so it cannot be replaced")
            if not os.access(self._path, os.W_OK):
                raise BulkError(f"{self._path} is not writable")
            if not overwrite and self._path.stat().st_size and not (resume and state.exists()):
                raise BulkError(f"{self._path} exists; --overwrite replaces it")
        self._descriptor = self._open_locked()
        if not overwrite and not state.exists() and self._path.exists() and self._path.stat().st_size:
            os.close(self._descriptor)
            self._partial.unlink(missing_ok=True)
            raise BulkError(f"{self._path} was written by another run in the meantime; --overwrite replaces it")

    def _open_locked(self) -> int:
        while True:
            descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
            if not _lock(descriptor):
                os.close(descriptor)
                raise BulkError(f"another run is writing {self._partial}")
            # A run that ended between the two steps has renamed the file to the output.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._partial.stat()):
                    return descriptor
            os.close(descriptor)

    def _paths(self, number: int) -> tuple[Path, Path]:  # noqa: ARG002 - there is one
        return self._partial, self._path

    def _save_complete(self, state: dict[str, Any]) -> None:  # noqa: ARG002 - nothing is left to resume
        self._state_path.unlink(missing_ok=True)
        self.is_finished = True


class FolderWriter(_DurableWriter):
    """A folder of shards, in the order of their names, each of the same number of input rows.

        part-000000.parquet            a complete shard: renamed once its bytes are on the disk
        _part-000001.parquet.partial   the completed blocks of the current shard
        _manifest.json                 what the shards were made from, and what is complete

    Readers of Parquet folders ignore names with an underscore. The folder is locked while a run writes it.
    """

    def __init__(self, path: str, format_: OutputFormat, shard_rows: int, *, resume: bool) -> None:
        """Create the folder, or open it, and lock it. Raises OSError where that is not possible.

        Raises BulkError for a folder with other files, or with shards if `resume` is false.
        """
        super().__init__(Path(path), Path(path) / "_manifest.json")
        self._format, self.shard_rows = format_, shard_rows
        self.restart_hint = f"remove {self._path} to start from the beginning"
        self._is_new = not self._path.exists()
        self._path.mkdir(exist_ok=True)
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise BulkError(f"{self._path} is not writable")
        self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        has_state = self._state_path.exists()
        error = None
        if not _lock(self._folder):
            error = f"another run is writing {self._path}"
        elif has_state and not resume:
            error = f"{self._path} holds the shards of another run; add --resume to continue it, or remove the folder"
        elif not has_state and any(not file.name.startswith("_") for file in self._path.iterdir()):
            error = f"{self._path} is not empty, and has no _manifest.json of an earlier run; name another folder"
        if error is not None:
            os.close(self._folder)
            raise BulkError(error)

    def _paths(self, number: int) -> tuple[Path, Path]:
        name = f"part-{number:06d}.{self._format}"
        return self._path / f"_{name}.partial", self._path / name

    def _save_complete(self, state: dict[str, Any]) -> None:
        replace_json(self._state_path, state)

    def finish(self) -> None:
        """Complete the output. For an empty input, write one shard without rows."""
        if not self.is_finished:
            super().finish()
            replace_json(self._state_path, self._state(finished=True) | {"shards": self._shards})

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._is_new and not self._state_path.exists():
            with contextlib.suppress(OSError):
                self._path.rmdir()
        os.close(self._folder)


class StreamWriter(Writer):
    """JSON lines to a stream that cannot be replaced: standard output, a pipe, a device. It cannot be resumed."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        stream.flush()
        self._stream, self._name = stream, name
        try:
            self._descriptor: int | None = stream.fileno()
        except OSError:  # such as a test's own
            self._descriptor = None

    def write(self, block: Block, content: bytes | memoryview) -> None:  # noqa: ARG002 - other writers count its rows
        """Write a block."""
        with write_errors(self._name):
            if self._descriptor is None:
                self._stream.write(content)
            else:  # unbuffered: a thread that waits for a reader would hold the buffer's lock at the end of the process
                _write_all(self._descriptor, content)


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
