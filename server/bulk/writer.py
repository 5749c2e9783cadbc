"""Writes the output: one file, a folder of shards, or a stream. All but a stream survive a crash at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from embert.server.bulk.job import Block, BulkError, CannotResume, OutputFormat, require_pyarrow
from embert.server.bulk.line_reader import partial_files
from embert.server.bulk.resume import as_json, check_manifest, replace_json, sync_folder
from embert.server.bulk.rows import FileLayout

__all__ = ["FileWriter", "FolderWriter", "StreamWriter", "Writer", "write_errors"]

_WRITE_BYTES = 256 << 10  # per call: for more, the system may search a long time for contiguous memory
_MAX_UNFINISHED_SHARDS = 2  # shards that wait for the disk; writing waits for more


class FileWriter:
    """One output file, written beside OUTPUT, which it replaces at the end. Use as a context manager.

        OUTPUT.partial           the completed blocks; for Parquet as Arrow streams, which can be appended to
        OUTPUT.partial.json      the manifest, the number of texts, and where the last complete block ends
        OUTPUT.partial.parquet   at the end of a run into Parquet: the output, made from OUTPUT.partial

    A block is complete once OUTPUT.partial.json says so, after an fsync of its bytes. A resumed run truncates the
    rest. A thread completes blocks while the next ones are written. OUTPUT.partial is locked while a run writes it.
    """

    restart_hint = "omit --resume to start from the beginning"
    shard_rows: int | None = None

    def __init__(self, path: str, *, overwrite: bool = False, resume: bool = False) -> None:
        """Open and lock OUTPUT.partial. Raises BulkError or OSError where that is not possible.

        A file with content is replaced with `overwrite`, or by the run that `resume` continues.
        """
        self._path = Path(os.path.realpath(path))  # replace the target of a link, not the link
        self._partial, self._progress, self._converted = map(Path, partial_files(path))
        self._had_partial = self._partial.exists() and self._partial.stat().st_size > 0
        self._manifest: dict[str, Any] = {}
        self._size = 0  # bytes written
        self.texts = self.rows = 0  # written
        self.digest = ""  # of the input that they are from
        self.completed = 0  # texts that a crash would not lose
        self.is_finished = False
        if self._path.exists():
            if not stat.S_ISREG(self._path.stat().st_mode):
                raise BulkError(f"{self._path} is not a regular file, so it cannot be replaced")
            if not os.access(self._path, os.W_OK):
                raise BulkError(f"{self._path} must not be written")
            if not overwrite and self._path.stat().st_size and not (resume and self._progress.exists()):
                raise BulkError(f"{self._path} exists; --overwrite replaces it")
        self._descriptor = self._open_locked()
        if not overwrite and not self._progress.exists() and self._path.exists() and self._path.stat().st_size:
            os.close(self._descriptor)
            self._partial.unlink(missing_ok=True)
            raise BulkError(f"{self._path} was written by another run in the meantime; --overwrite replaces it")
        self._thread = ThreadPoolExecutor(1, "embert-commit")
        self._commit: Future[None] | None = None

    def _open_locked(self) -> int:
        while True:
            descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not _lock(descriptor):
                os.close(descriptor)
                raise BulkError(f"another run is writing {self._partial}")
            # A run that ended between the two steps has renamed the file to the output.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._partial.stat()):
                    return descriptor
            os.close(descriptor)

    def begin(self, manifest: dict[str, Any], layout: FileLayout, *, resume: bool) -> None:
        """Continue after the completed texts, whose number is then in `texts`, or start from the beginning.

        Raises CannotResume where the completed texts were made from another manifest.
        """
        self._manifest, self._layout = as_json(manifest), layout
        if resume and self._progress.exists():
            self._resume()
            return
        self._progress.unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        self._append(layout.header(0))

    def _resume(self) -> None:
        try:
            progress = orjson.loads(self._progress.read_bytes())
            before, size = dict(progress["facts"]), int(progress["bytes"])
            texts, rows, digest = int(progress["texts"]), int(progress["rows"]), str(progress["digest"])
            was_last = bool(progress["last"])
        except (ValueError, KeyError, TypeError):
            raise CannotResume(f"{self._progress} is damaged") from None
        check_manifest(before, self._manifest, self._partial)
        self.texts = self.completed = texts
        self.rows, self.digest = rows, digest
        if was_last and not self._had_partial and self._path.exists():  # killed before its last step
            self.is_finished = True
            return
        if os.fstat(self._descriptor).st_size < size:
            raise CannotResume(f"{self._partial} has lost its end")
        os.ftruncate(self._descriptor, size)
        self._size = os.lseek(self._descriptor, size, os.SEEK_SET)

    def write(self, block: Block, content: memoryview) -> None:
        """Write the next block; it is complete a little later, and at the latest when this object is closed."""
        self._append(content)
        self.texts += block.texts
        self.rows += block.rows
        self.digest = block.digest
        if self._commit is None or self._commit.done():
            self._raise_commit_error()
            self._commit = self._thread.submit(self._complete, self._state())

    def finish(self) -> None:
        """Replace the output."""
        if self.is_finished:
            self._partial.unlink(missing_ok=True)
            self._progress.unlink(missing_ok=True)
            return
        self._raise_commit_error()
        self._complete(self._state(last=True))
        if self._layout.is_parquet:
            complete = self._converted
            with write_errors(complete):
                self._convert()
        else:
            complete = self._partial
            with write_errors(complete):
                os.pwrite(self._descriptor, self._layout.header(self.texts), 0)
                os.fsync(self._descriptor)
        if self._path.exists():
            shutil.copymode(self._path, complete)
        complete.replace(self._path)
        sync_folder(self._path.parent)
        if complete != self._partial:  # else the name may be another run's by now
            self._partial.unlink()
        self._progress.unlink(missing_ok=True)
        self.is_finished = True

    def _convert(self) -> None:
        """Make the Parquet file from the Arrow streams of the blocks."""
        pa = require_pyarrow("pyarrow", "Parquet")
        try:
            with self._converted.open("wb") as file, pa.OSFile(str(self._partial)) as partial:
                with self._layout.parquet_writer(file) as parquet:
                    while partial.tell() < self._size:
                        for batch in pa.ipc.open_stream(partial):
                            parquet.write_batch(batch)
                file.flush()
                os.fsync(file.fileno())
        except pa.ArrowInvalid as error:
            raise BulkError(f"{self._partial} is damaged: {error}; {self.restart_hint}") from None

    def _state(self, *, last: bool = False) -> dict[str, Any]:
        return {
            "facts": self._manifest,
            "texts": self.texts,
            "rows": self.rows,
            "bytes": self._size,
            "digest": self.digest,
            "last": last,
        }

    def _complete(self, state: dict[str, Any]) -> None:
        """Make everything up to `state` durable; called by one thread at a time."""
        with write_errors(self._partial):
            os.fsync(self._descriptor)
            replace_json(self._progress, state)
        self.completed = state["texts"]

    def _raise_commit_error(self) -> None:
        if self._commit is not None:
            self._commit.result()

    def _append(self, content: bytes | memoryview) -> None:
        with write_errors(self._partial):
            _write_all(self._descriptor, content)
        self._size += len(content)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if not self.is_finished:
            self._converted.unlink(missing_ok=True)
            if self.texts > self.completed:
                with contextlib.suppress(BulkError):  # what was complete before still is
                    self._complete(self._state())
            if not self._progress.exists():  # there is nothing to continue
                self._partial.unlink(missing_ok=True)
        os.close(self._descriptor)


class _Shard:
    """A shard that is being written."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self.path, self._layout, self.texts = path, layout, 0
        with write_errors(path):
            self._file = path.open("wb")
            self._parquet = layout.parquet_writer(self._file) if layout.is_parquet else None
            self._file.write(layout.header(0))

    def write(self, block: Block, content: memoryview) -> None:
        self.texts += block.texts
        with write_errors(self.path):
            if self._parquet is None:
                self._file.write(content)
            elif content:
                for batch in require_pyarrow("pyarrow", "Parquet").ipc.open_stream(content):
                    self._parquet.write_batch(batch)

    def finish(self) -> None:
        """Write the parts of a complete file that are not blocks."""
        with write_errors(self.path):
            if self._parquet is None:
                self._file.seek(0)
                self._file.write(self._layout.header(self.texts))
            else:
                self._parquet.close()
            self._file.flush()

    def sync(self) -> int:
        """Make the bytes durable, and close the file; returns its size."""
        os.fsync(self._file.fileno())
        size = os.fstat(self._file.fileno()).st_size
        self._file.close()
        return size

    def discard(self) -> None:
        """Close the file of a run that failed."""
        for file in (self._parquet, self._file):
            with contextlib.suppress(OSError, ValueError):
                if file is not None:
                    file.close()


class FolderWriter:
    """A folder of shards, in the order of their names, each of the same number of input rows.

        part-000000.parquet            a complete shard: renamed once its bytes are on the disk
        _part-000001.parquet.partial   the current shard; a resumed run writes it from its beginning
        _manifest.json                 what the shards were made from, and which are complete

    Readers of Parquet folders ignore names with an underscore. A thread completes a shard while the next one is
    written. Use as a context manager.
    """

    def __init__(self, path: str, format_: OutputFormat, shard_rows: int, *, resume: bool) -> None:
        """Create the folder, or open it, and lock it. Raises OSError where that is not possible.

        Raises BulkError for a folder with other files, or with shards if `resume` is false.
        """
        self.shard_rows: int | None = shard_rows
        self._rows_per_shard = shard_rows
        self._path, self._format = Path(path), format_
        self._manifest_path = self._path / "_manifest.json"
        self.restart_hint = f"remove {self._path} to start from the beginning"
        self._manifest: dict[str, Any] = {}
        self._shards: list[dict[str, Any]] = []  # complete ones
        self.texts = self.rows = 0  # written
        self.digest = ""  # of the input that they are from
        self.completed = 0  # texts of complete shards
        self.is_finished = False
        self._shard: _Shard | None = None  # the current one
        self._shards_begun = 0
        self._is_new = not self._path.exists()
        self._path.mkdir(exist_ok=True)
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise BulkError(f"{self._path} must not be written")
        self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        names = {path.name for path in self._path.iterdir()} - {"_manifest.json.new"}
        error = None
        if not _lock(self._folder):
            error = f"another run is writing {self._path}"
        elif "_manifest.json" in names and not resume:
            error = f"{self._path} holds the shards of another run; add --resume to continue it, or remove the folder"
        elif names and "_manifest.json" not in names:
            error = f"{self._path} is not empty, and has no _manifest.json of an earlier run; name another folder"
        if error is not None:
            os.close(self._folder)
            raise BulkError(error)
        self._thread = ThreadPoolExecutor(1, "embert-commit")
        self._commits: deque[Future[None]] = deque()

    def begin(self, manifest: dict[str, Any], layout: FileLayout, *, resume: bool) -> None:
        """Continue after the complete shards, or start in an empty folder.

        Raises CannotResume where the shards were made from another manifest.
        """
        self._manifest, self._layout = as_json(manifest), layout
        if resume and self._manifest_path.exists():
            self._resume()
        self._remove_partial()
        if not self._manifest_path.exists():
            self._save(finished=False)

    def _resume(self) -> None:
        try:
            content = orjson.loads(self._manifest_path.read_bytes())
            before, self._shards = dict(content["facts"]), list(content["shards"])
            self.texts = self.completed = sum(int(shard["texts"]) for shard in self._shards)
            self.rows, self.digest = int(content["rows"]), str(content["digest"])
            self._shards_begun, is_finished = len(self._shards), bool(content["finished"])
            sizes = {str(shard["name"]): int(shard["bytes"]) for shard in self._shards}
        except (ValueError, KeyError, TypeError):
            raise CannotResume(f"{self._manifest_path} is damaged") from None
        check_manifest(before, self._manifest, self._path)
        for name, size in sizes.items():
            path = self._path / name
            if not path.is_file() or path.stat().st_size != size:
                raise CannotResume(f"{path} is missing or has changed")
        self.is_finished = is_finished

    def write(self, block: Block, content: memoryview) -> None:
        """Write the next block. With its last row, a shard goes to the thread that completes it."""
        if self._shard is None:
            self._begin_shard()
        assert self._shard is not None  # noqa: S101 - for mypy
        self._shard.write(block, content)
        self.texts += block.texts
        self.rows += block.rows
        self.digest = block.digest
        if self.rows % self._rows_per_shard == 0:
            self._end_shard()

    def finish(self) -> None:
        """Complete everything. For an empty input, write one shard without rows."""
        if self.is_finished:
            return
        if self._shard is None and not self._shards_begun:
            self._begin_shard()
        if self._shard is not None:
            self._end_shard()
        while self._commits:
            self._commits.popleft().result()
        self._save(finished=True)
        self.is_finished = True

    def _begin_shard(self) -> None:
        while self._commits and (len(self._commits) >= _MAX_UNFINISHED_SHARDS or self._commits[0].done()):
            self._commits.popleft().result()
        name = f"part-{self._shards_begun:06d}.{self._format}"
        self._shard = _Shard(self._path / f"_{name}.partial", self._layout)
        self._shards_begun += 1

    def _end_shard(self) -> None:
        shard = self._shard
        assert shard is not None  # noqa: S101 - for mypy
        shard.finish()
        self._shard = None
        state = {"rows": self.rows, "digest": self.digest}
        self._commits.append(self._thread.submit(self._complete, shard, state))

    def _complete(self, shard: _Shard, state: dict[str, Any]) -> None:
        name = shard.path.name.removeprefix("_").removesuffix(".partial")
        with write_errors(shard.path):
            size = shard.sync()
            shard.path.rename(self._path / name)
            sync_folder(self._path)
            self._shards.append({"name": name, "texts": shard.texts, "bytes": size})
            self._save(finished=False, **state)
        self.completed += shard.texts

    def _save(self, *, finished: bool, **state: Any) -> None:
        state = {"rows": self.rows, "digest": self.digest} | state
        replace_json(
            self._manifest_path, {"facts": self._manifest, "finished": finished, **state, "shards": self._shards}
        )

    def _remove_partial(self) -> None:
        for path in self._path.glob("_part-*.partial"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if self._shard is not None:
            self._shard.discard()
        if not self.is_finished:
            self._remove_partial()
        if self._is_new and not self._manifest_path.exists():
            with contextlib.suppress(OSError):
                self._path.rmdir()
        os.close(self._folder)


class StreamWriter:
    """JSON lines to a stream that cannot be replaced: standard output, a pipe, a device. It cannot be resumed."""

    restart_hint = ""
    shard_rows: int | None = None
    rows, digest, is_finished = 0, "", False
    texts = completed = 0

    def __init__(self, stream: BinaryIO, name: str) -> None:
        stream.flush()
        self._stream, self._name = stream, name
        try:
            self._descriptor: int | None = stream.fileno()
        except OSError:  # such as a test's own
            self._descriptor = None

    def begin(self, manifest: dict[str, Any], layout: FileLayout, *, resume: bool) -> None:
        """Does nothing."""

    def write(self, block: Block, content: memoryview) -> None:  # noqa: ARG002 - other writers count its rows
        """Write a block."""
        with write_errors(self._name):
            if self._descriptor is None:
                self._stream.write(content)
            else:  # unbuffered: a thread that waits for a reader would hold the buffer's lock at the end of the process
                _write_all(self._descriptor, content)

    def finish(self) -> None:
        """Does nothing: everything is written."""


Writer = FileWriter | FolderWriter | StreamWriter


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
