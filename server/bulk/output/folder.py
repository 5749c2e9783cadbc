"""A folder of shards: files of equally many rows of the input, whose order is that of their names.

    part-000000.parquet            a complete shard: its name appears when its bytes are on the disk
    _part-000001.parquet.partial   the shard that is being written; a run that goes on makes it again
    _manifest.json                 what the shards were made from, and which are complete

What reads folders of Parquet files leaves out names with an underscore. A thread completes a shard while the next one
is written.

Blocks are written by text processes, in any order, and are added here in the order of the input. A shard is completed
once all of its blocks are added; the next ones may be begun by then. What a text process still writes for a run that
was killed goes into a file that has no name any more once the next run has begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from embert.server.bulk.job import BulkError, CannotResume, OutputFormat
from embert.server.bulk.output.containers import Container
from embert.server.bulk.output.durable import check_facts, plain, replace_json, sync_folder, write_at
from embert.server.bulk.output.place import Place
from embert.server.bulk.slots import Block, Slots

__all__ = ["Folder"]

_MANIFEST = "_manifest.json"
_UNFINISHED = 2  # shards that wait for the disk; then writing waits, too


@dataclass(slots=True)
class _Shard:
    """A shard that is being written."""

    name: str
    partial: Path
    descriptor: int
    container: Container
    size: int = 0  # bytes, with those of blocks that are placed
    texts: int = 0  # of the blocks that are added

    def write(self, content: bytes) -> None:
        """Write what is no block's at the end."""
        write_at(self.descriptor, content, self.size, self.partial)
        self.size += len(content)


class Folder:
    """A folder of shards. Use as a context manager."""

    def __init__(self, path: str, format_: OutputFormat, shard_rows: int, *, resume: bool) -> None:
        """Make the folder, or open it. Raises BulkError or OSError where that is not possible.

        So it does where there are other files, or shards that nobody asked to continue.
        """
        self.shard_rows: int | None = shard_rows
        self._rows_of_a_shard = shard_rows
        self._path, self._format = Path(path), format_
        self._manifest = self._path / _MANIFEST
        self.begin_anew = f"remove {self._path} to begin anew"
        self._facts: dict[str, Any] = {}
        self._shards: list[dict[str, Any]] = []
        self.texts = self.rows = 0  # written
        self.digest = ""  # of the input that they are from
        self.completed = 0  # texts of complete shards
        self.is_finished = False
        self._number = 0  # of the next shard
        self._open: deque[_Shard] = deque()  # blocks are placed in the last of them, and added to the first
        self._placed_rows = 0  # of the input
        self._was_made = not self._path.exists()
        self._path.mkdir(exist_ok=True)
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise BulkError(f"{self._path} must not be written")
        self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._folder)
            raise BulkError(f"another run is writing {self._path}") from None
        names = {path.name for path in self._path.iterdir()} - {_MANIFEST + ".new"}
        wrong = None
        if _MANIFEST in names and not resume:
            wrong = "holds the shards of another run; add --resume to continue it, or remove the folder"
        elif names and _MANIFEST not in names:
            wrong = f"is not empty, and has no {_MANIFEST} of an earlier run; name another folder"
        if wrong is not None:
            os.close(self._folder)
            raise BulkError(f"{self._path} {wrong}")
        self._thread = ThreadPoolExecutor(1, "embert-commit")
        self._commits: deque[Future[None]] = deque()

    def begin(self, facts: dict[str, Any], container: Callable[[], Container], *, resume: bool) -> None:
        """Continue after the complete shards, or begin in an empty folder.

        `facts` is what rows depend on. Raises CannotResume where the shards were made from other facts.
        """
        self._facts, self._container = plain(facts), container
        if resume and self._manifest.exists():
            self._resume()
        self._placed_rows = self.rows
        for path in self._path.glob("_part-*.partial"):
            path.unlink()
        if not self._manifest.exists():
            self._save(finished=False)

    def _resume(self) -> None:
        try:
            manifest = orjson.loads(self._manifest.read_bytes())
            made_with, self._shards = dict(manifest["facts"]), list(manifest["shards"])
            self.texts = self.completed = sum(int(shard["texts"]) for shard in self._shards)
            self.rows, self.digest = int(manifest["rows"]), str(manifest["digest"])
            self._number, is_finished = len(self._shards), bool(manifest["finished"])
            sizes = {str(shard["name"]): int(shard["bytes"]) for shard in self._shards}
        except (ValueError, KeyError, TypeError):
            raise CannotResume(f"{self._manifest} is damaged") from None
        check_facts(made_with, self._facts, self._path)
        for name, size in sizes.items():
            path = self._path / name
            if not path.is_file() or path.stat().st_size != size:
                raise CannotResume(f"{path} is missing or has changed")
        self.is_finished = is_finished

    def place(self, block: Block, slots: Slots) -> Place | None:
        """Where the next block is to be written, before it is added; None: it has no texts."""
        if self._placed_rows % self._rows_of_a_shard == 0 or not self._open:
            self._begin_shard()
        self._placed_rows += block.rows
        if not block.texts:
            return None
        shard = self._open[-1]
        place = Place(shard.descriptor, shard.size, shard.partial)
        content = slots.data(block, shard.container.section)
        shard.container.added(content, shard.size)
        shard.size += len(content)
        return place

    def add(self, block: Block, slots: Slots) -> None:  # noqa: ARG002 - of the protocol
        """Add the next block. With its last row, a shard goes on to be completed."""
        self.texts += block.texts
        self._open[0].texts += block.texts
        self.rows += block.rows
        self.digest = block.digest
        if self.rows % self._rows_of_a_shard == 0:
            self._close_shard()

    def finish(self) -> None:
        """Complete everything. Of an empty input there is one shard without rows."""
        if self.is_finished:
            return
        if not self._open and not self._number:
            self._begin_shard()
        if self._open:
            self._close_shard()
        while self._commits:
            self._commits.popleft().result()
        self._save(finished=True)
        self.is_finished = True

    def _begin_shard(self) -> None:
        self._forget_completed(_UNFINISHED)
        name = f"part-{self._number:06d}.{self._format}"
        partial = self._path / f"_{name}.partial"
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        shard = _Shard(name, partial, descriptor, self._container())
        self._open.append(shard)
        self._number += 1
        shard.write(shard.container.begin())

    def _close_shard(self) -> None:
        """Hand the first of the open shards to the thread that completes it."""
        shard = self._open[0]
        beginning, end = shard.container.end(shard.texts)
        shard.write(end)
        write_at(shard.descriptor, beginning, 0, shard.partial)
        self._open.popleft()
        record = {"name": shard.name, "texts": shard.texts, "bytes": shard.size}
        state = {"rows": self.rows, "digest": self.digest}
        self._commits.append(self._thread.submit(self._complete, shard.descriptor, shard.partial, record, state))

    def _forget_completed(self, most: int) -> None:
        """Until fewer than `most` shards wait for the disk; raises what went wrong with one."""
        while self._commits and (len(self._commits) >= most or self._commits[0].done()):
            self._commits.popleft().result()

    def _complete(self, descriptor: int, partial: Path, shard: dict[str, Any], state: dict[str, Any]) -> None:
        try:
            os.fsync(descriptor)
            os.close(descriptor)
            partial.rename(self._path / shard["name"])
            sync_folder(self._path)
            self._shards.append(shard)
            self._save(finished=False, **state)
        except OSError as error:
            raise BulkError(f"{partial} cannot be written: {error.strerror}") from None
        self.completed += shard["texts"]

    def _save(self, *, finished: bool, **state: Any) -> None:
        state = {"rows": self.rows, "digest": self.digest} | state
        replace_json(self._manifest, {"facts": self._facts, "finished": finished, **state, "shards": self._shards})

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        for shard in self._open:
            os.close(shard.descriptor)
        if not self.is_finished:
            for path in self._path.glob("_part-*.partial"):  # a run that goes on makes it again
                path.unlink(missing_ok=True)
        if self._was_made and not self._manifest.exists():
            with contextlib.suppress(OSError):
                self._path.rmdir()
        os.close(self._folder)
