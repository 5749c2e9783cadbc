"""The output of `embert embed`: written beside OUTPUT, which it replaces at the end; a failed run harms nothing.

    OUTPUT.partial        the completed blocks of texts; the header of a .npy counts no rows yet
    OUTPUT.partial.json   what they were made from, the number of texts, and where the last block ends

A block is complete once the second file says so. `--resume` truncates what a killed run has written of the next one.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from embert.engine import SparseVector

__all__ = ["Embedded", "FileOutput", "OutputError", "StreamOutput", "json_lines"]

Vectors = npt.NDArray[np.float32]
# Of n texts: one array [n, columns]; a sparse vector for each; an array [vectors, columns] for each.
Embedded = Vectors | Sequence[SparseVector] | Sequence[Vectors]


class OutputError(Exception):
    """The output cannot be written or resumed; the message is one sentence."""


def json_lines(texts: Sequence[str], vectors: Embedded) -> bytes:
    """One JSON line for each text."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    pairs = zip(texts, vectors, strict=True)
    return b"".join(orjson.dumps({"text": text, **_fields(vector)}, option=option) for text, vector in pairs)


def _fields(vector: Vectors | SparseVector) -> dict[str, Any]:
    if isinstance(vector, SparseVector):
        return {"indices": vector.indices, "values": vector.values}
    return {"embedding" if vector.ndim == 1 else "vectors": vector}


class StreamOutput:
    """JSON lines to a stream that cannot be replaced: standard output, a pipe, a device."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, texts: Sequence[str], vectors: Embedded) -> None:
        """Write a block."""
        self._stream.write(json_lines(texts, vectors))

    def finish(self) -> None:
        """Everything is written."""
        self._stream.flush()


class FileOutput:
    """JSON lines, or float32 rows where the name ends in .npy. Use as a context manager."""

    def __init__(self, path: str) -> None:
        """Open the file beside `path`. Raises OutputError or OSError where that is not possible."""
        self._path = Path(os.path.realpath(path))  # replace the target of a link, not the link
        self._as_array = path.endswith(".npy")
        self._width = 0
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._progress = self._path.with_name(self._path.name + ".partial.json")
        self._found = self._partial.exists() and self._progress.exists()
        self._facts: dict[str, Any] = {}
        self.texts = 0  # completed
        self.digest = ""  # of their input lines
        if self._path.exists():
            self._check_replaceable()
        self._file = os.fdopen(os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise OutputError(f"another run is writing {self._partial}") from None

    def _check_replaceable(self) -> None:
        if not stat.S_ISREG(self._path.stat().st_mode):
            raise OutputError(f"{self._path} is not a regular file, so it cannot be replaced")
        if not os.access(self._path, os.W_OK):
            raise OutputError(f"{self._path} must not be written")

    def begin(self, facts: dict[str, Any], width: int, *, resume: bool) -> None:
        """Continue after the completed texts, whose number is then in `texts`, or begin anew.

        `facts` is what rows depend on. Raises OutputError where the completed rows were made from other facts.
        """
        self._facts, self._width = facts, width
        if resume and self._found:
            self._resume()
            return
        self._progress.unlink(missing_ok=True)
        self._file.truncate(0)
        if self._as_array:
            self._file.write(self._header())

    def _resume(self) -> None:
        again = "; leave --resume out to begin anew"
        try:
            progress = orjson.loads(self._progress.read_bytes())
            made_with, texts, size = progress["facts"], int(progress["texts"]), int(progress["bytes"])
            self.digest = str(progress["digest"])
        except (ValueError, KeyError, TypeError):
            raise OutputError(f"cannot resume: {self._progress} is damaged{again}") from None
        for name in {**made_with, **self._facts}:
            before, now = made_with.get(name), orjson.loads(orjson.dumps(self._facts.get(name)))
            if before != now:
                raise OutputError(f"cannot resume: {name} was {before!r} in {self._partial}, and is {now!r}{again}")
        if os.fstat(self._file.fileno()).st_size < size:
            raise OutputError(f"cannot resume: {self._partial} has lost its end{again}")
        self._file.truncate(size)
        self._file.seek(size)
        self.texts = texts

    def write(self, texts: Sequence[str], vectors: Embedded, digest: str) -> None:
        """Write a block; it is complete when this returns. `digest` covers all input lines so far."""
        if self._as_array and isinstance(vectors, np.ndarray):
            self._file.write(np.ascontiguousarray(vectors, "<f4").data)
        else:
            self._file.write(json_lines(texts, vectors))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.texts += len(texts)
        self.digest = digest
        progress = {"facts": self._facts, "texts": self.texts, "bytes": self._file.tell(), "digest": digest}
        beside = self._progress.with_name(self._progress.name + ".new")
        beside.write_bytes(orjson.dumps(progress))
        beside.replace(self._progress)

    def finish(self) -> None:
        """Replace the output."""
        if self._as_array:
            self._file.seek(0)
            self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._path.exists():
            shutil.copymode(self._path, self._partial)
        self._partial.replace(self._path)
        self._progress.unlink(missing_ok=True)

    def _header(self) -> bytes:
        """The header of a .npy with the completed rows. numpy pads it, so its length never changes."""
        facts = {"descr": "<f4", "fortran_order": False, "shape": (self.texts, self._width)}
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, facts)
        return header.getvalue()

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.texts and not self._progress.exists():  # there is nothing to continue
            self._partial.unlink(missing_ok=True)
        self._file.close()
