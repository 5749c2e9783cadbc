"""One output file: written beside OUTPUT, which it replaces at the end; a failed run harms nothing.

    OUTPUT.partial        the completed blocks of texts
    OUTPUT.partial.json   what they were made from, the number of texts, and where the last complete block ends

A block is complete once the second file says so: after its bytes are on the disk. `--resume` truncates what a killed
run has written beyond. A thread makes blocks complete while the next ones are written.

Blocks are written by text processes, in any order, and are added here in the order of the input. What is complete never
counts a block that is not added. A process that writes has the descriptor that is locked here, so the lock lasts until
nobody can write any more, even when this process was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from embert.server.bulk.job import BulkError, CannotResume
from embert.server.bulk.output.containers import Container
from embert.server.bulk.output.durable import check_facts, plain, replace_json, sync_folder, write_at
from embert.server.bulk.output.place import Place
from embert.server.bulk.slots import Block, Slots

__all__ = ["SingleFile"]

_LOCK_S = 2.0  # for the text processes of a run that was killed a moment ago
_LOCK_POLL_S = 0.02


class SingleFile:
    """One output file. Use as a context manager."""

    begin_anew = "leave --resume out to begin anew"
    shard_rows: int | None = None

    def __init__(self, path: str, *, overwrite: bool = False, resume: bool = False) -> None:
        """Open the file beside `path`. Raises BulkError or OSError where that is not possible.

        A file with content is replaced with `overwrite`, or by the run that `resume` continues.
        """
        self._path = Path(os.path.realpath(path))  # replace the target of a link, not the link
        self._partial, self._progress = map(Path, self.beside(path))
        self._had_partial = self._partial.exists() and self._partial.stat().st_size > 0
        self._facts: dict[str, Any] = {}
        self._size = 0  # bytes written, without a gap
        self._placed = 0  # where the next block goes
        self.texts = self.rows = 0  # written
        self.digest = ""  # of the input that they are from
        self.completed = 0  # texts that a killed run would not lose
        self.is_finished = False
        if self._path.exists():
            self._check_replaceable()
            if not overwrite and self._path.stat().st_size and not (resume and self._progress.exists()):
                raise BulkError(f"{self._path} exists; --overwrite replaces it")
        self._descriptor = self._open_locked()
        if not overwrite and not self._progress.exists() and self._path.exists() and self._path.stat().st_size:
            os.close(self._descriptor)
            self._partial.unlink(missing_ok=True)
            raise BulkError(f"{self._path} was written by another run meanwhile; --overwrite replaces it")
        self._thread = ThreadPoolExecutor(1, "embert-commit")
        self._commit: Future[None] | None = None

    @staticmethod
    def beside(path: str) -> tuple[str, str]:
        """The files that a run into `path` writes beside it."""
        real = os.path.realpath(path)
        return real + ".partial", real + ".partial.json"

    def _open_locked(self) -> int:
        """The partial file, locked. While the lock is awaited its holder may rename the file to the output."""
        began = time.monotonic()
        while True:
            descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _is_locked(descriptor) and _is_same_file(descriptor, self._partial):
                return descriptor
            os.close(descriptor)
            if time.monotonic() - began > _LOCK_S:
                raise BulkError(f"another run is writing {self._partial}")
            time.sleep(_LOCK_POLL_S)

    def _check_replaceable(self) -> None:
        if not stat.S_ISREG(self._path.stat().st_mode):
            raise BulkError(f"{self._path} is not a regular file, so it cannot be replaced")
        if not os.access(self._path, os.W_OK):
            raise BulkError(f"{self._path} must not be written")

    def begin(self, facts: dict[str, Any], container: Callable[[], Container], *, resume: bool) -> None:
        """Continue after the completed texts, whose number is then in `texts`, or begin anew.

        `facts` is what rows depend on. Raises CannotResume where the completed rows were made from other facts.
        """
        self._facts, self._container = plain(facts), container()
        if resume and self._progress.exists():
            self._resume()
            return
        self._progress.unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        self._write(self._container.begin())
        self._placed = self._size

    def _resume(self) -> None:
        try:
            progress = orjson.loads(self._progress.read_bytes())
            made_with, size = dict(progress["facts"]), int(progress["bytes"])
            texts, rows, digest = int(progress["texts"]), int(progress["rows"]), str(progress["digest"])
            was_last = bool(progress["last"])
        except (ValueError, KeyError, TypeError):
            raise CannotResume(f"{self._progress} is damaged") from None
        check_facts(made_with, self._facts, self._partial)
        self.texts = self.completed = texts
        self.rows, self.digest = rows, digest
        if was_last and not self._had_partial and self._path.exists():  # killed after its last step but one
            self.is_finished = True
            return
        if os.fstat(self._descriptor).st_size < size:
            raise CannotResume(f"{self._partial} has lost its end")
        try:
            self._container.resume(self._descriptor, size)
        except (ValueError, LookupError, OSError):
            raise CannotResume(f"{self._partial} is damaged") from None
        os.ftruncate(self._descriptor, size)
        self._size = self._placed = size

    def place(self, block: Block, slots: Slots) -> Place | None:
        """Where the next block is to be written, before it is added; None: it has no texts."""
        if not block.texts:
            return None
        place = Place(self._descriptor, self._placed, self._partial)
        content = slots.data(block, self._container.section)
        self._container.added(content, self._placed)
        self._placed += len(content)
        return place

    def add(self, block: Block, slots: Slots) -> None:
        """Add the next block; it is complete a little later, and at the latest when this object is closed."""
        if block.texts:
            self._size += len(slots.data(block, self._container.section))
        self.texts += block.texts
        self.rows += block.rows
        self.digest = block.digest
        if self._commit is None or self._commit.done():
            self._raise_of_commit()
            self._commit = self._thread.submit(self._complete, self._state())

    def finish(self) -> None:
        """Replace the output."""
        if self.is_finished:
            self._partial.unlink(missing_ok=True)
            self._progress.unlink(missing_ok=True)
            return
        self._raise_of_commit()
        self._complete(self._state(last=True))
        beginning, end = self._container.end(self.texts)
        self._write(end)
        os.pwrite(self._descriptor, beginning, 0)
        os.fsync(self._descriptor)
        if self._path.exists():
            shutil.copymode(self._path, self._partial)
        self._partial.replace(self._path)
        sync_folder(self._path.parent)
        self._progress.unlink(missing_ok=True)
        self.is_finished = True

    def _state(self, *, last: bool = False) -> dict[str, Any]:
        return {
            "facts": self._facts,
            "texts": self.texts,
            "rows": self.rows,
            "bytes": self._size,
            "digest": self.digest,
            "last": last,
        }

    def _complete(self, state: dict[str, Any]) -> None:
        """Make everything up to `state` last; called by one thread at a time."""
        try:
            os.fsync(self._descriptor)
            replace_json(self._progress, state)
        except OSError as error:
            raise BulkError(f"{self._partial} cannot be written: {error.strerror}") from None
        self.completed = state["texts"]

    def _raise_of_commit(self) -> None:
        if self._commit is not None:
            self._commit.result()

    def _write(self, content: bytes | memoryview) -> None:
        write_at(self._descriptor, content, self._size, self._partial)
        self._size += len(content)

    def __enter__(self) -> SingleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if not self.is_finished:
            if self.texts > self.completed:
                with contextlib.suppress(BulkError):  # what was complete before still is
                    self._complete(self._state())
            if not self._progress.exists():  # there is nothing to continue
                self._partial.unlink(missing_ok=True)
        os.close(self._descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the name `path` still leads to an open file."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), named)


def _is_locked(descriptor: int) -> bool:
    """Lock a file, unless another run has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
