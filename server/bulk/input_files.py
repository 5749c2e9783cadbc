"""Which files are read, and in what format."""

from __future__ import annotations

import glob
import gzip
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from embert.server.bulk.job import BulkError, InputFormat

__all__ = ["STANDARD_INPUT", "display_name", "expand", "input_format", "open_bytes", "require_pyarrow"]

STANDARD_INPUT = "-"

_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_COMPRESSIONS = (".gz", ".zst")


def require_pyarrow(module: str, feature: str) -> Any:
    """Import a module of pyarrow, an extra. Raises BulkError, with the command that installs it, if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise BulkError(f"{feature} needs pyarrow: pip install 'embert[bulk]'") from None


def expand(names: Sequence[str]) -> list[str]:
    """Files in the order of the arguments; those of a glob, in the order of their names.

    Raises BulkError for a glob without matches.
    """
    files = []
    for name in names:
        if name == STANDARD_INPUT or not glob.has_magic(name) or Path(name).exists():
            files.append(name)
            continue
        matches = glob.glob(name, recursive=True)  # noqa: PTH207 - the name may be absolute
        matches = sorted(match for match in matches if Path(match).is_file())
        if not matches:
            raise BulkError(f"no file matches {name}")
        files += matches
    if files.count(STANDARD_INPUT) > 1:
        raise BulkError("standard input (-) can be read once only")
    return files


def input_format(files: Sequence[str], override: InputFormat | None) -> InputFormat:
    """The format of all files. Raises BulkError where their names mean several formats, or one that is not read."""
    if override is not None:
        return override
    formats: dict[InputFormat, str] = {}
    for file in files:
        formats.setdefault(_format(file), file)
    if len(formats) > 1:
        examples = " and ".join(f"{file} ({format_})" for format_, file in formats.items())
        raise BulkError(
            f"all files of a run must have one format, found {examples}; --input-format overrides the names"
        )
    return next(iter(formats))


def _format(file: str) -> InputFormat:
    path = Path(file)
    suffix = (Path(path.stem) if path.suffix.lower() in _COMPRESSIONS else path).suffix.lower()
    if suffix == ".json":
        raise BulkError(f"{file}: JSON is read as lines of one object each; if it is so, add --input-format jsonl")
    return _FORMATS.get(suffix, "text")


def open_bytes(file: str) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz or .zst. Raises BulkError, OSError."""
    if file == STANDARD_INPUT:
        if sys.stdin is None:
            raise BulkError("standard input is closed; --file names a file")
        try:  # unbuffered: a thread that waits for input would hold the buffer's lock at the end of the process
            return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
        except (OSError, AttributeError):
            return sys.stdin.buffer
    suffix = Path(file).suffix.lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(file, "rb"))
    if suffix == ".zst":
        pyarrow = require_pyarrow("pyarrow", f"{file}: zstd")
        with Path(file).open("rb"):  # pyarrow's error does not name a folder
            pass
        return cast("BinaryIO", pyarrow.CompressedInputStream(pyarrow.OSFile(file), "zstd"))
    return Path(file).open("rb")


def display_name(file: str) -> str:
    """The file's name in error messages."""
    return "standard input" if file == STANDARD_INPUT else file
