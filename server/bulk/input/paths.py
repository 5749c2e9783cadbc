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

__all__ = ["STANDARD_INPUT", "arrow", "expanded", "input_format", "open_bytes", "shown"]

STANDARD_INPUT = "-"

_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_COMPRESSIONS = (".gz", ".zst")


def arrow(module: str, what: str) -> Any:
    """A module of pyarrow, an extra. Raises BulkError, with the command that installs it, where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise BulkError(f"{what} needs pyarrow: pip install 'embert[bulk]'") from None


def expanded(names: Sequence[str]) -> list[str]:
    """Files in the order given; those of a glob, in the order of their names. Raises BulkError for one without any."""
    found = []
    for name in names:
        if name == STANDARD_INPUT or not glob.has_magic(name) or Path(name).exists():
            found.append(name)
            continue
        found_here = glob.glob(name, recursive=True)  # noqa: PTH207 - the name may be absolute
        matches = sorted(match for match in found_here if Path(match).is_file())
        if not matches:
            raise BulkError(f"no file matches {name}")
        found += matches
    if found.count(STANDARD_INPUT) > 1:
        raise BulkError("standard input (-) can be read once only")
    return found


def input_format(files: Sequence[str], asked: InputFormat | None) -> InputFormat:
    """The format of all files. Raises BulkError where their names say several, or what is not read."""
    if asked is not None:
        return asked
    formats: dict[InputFormat, str] = {}
    for file in files:
        formats.setdefault(_format(file), file)
    if len(formats) > 1:
        named = " and ".join(f"{file} ({format_})" for format_, file in formats.items())
        raise BulkError(f"all files of a run must have one format, found {named}; --input-format overrides the names")
    return next(iter(formats))


def _format(file: str) -> InputFormat:
    path = Path(file)
    suffix = (Path(path.stem) if path.suffix.lower() in _COMPRESSIONS else path).suffix.lower()
    if suffix == ".json":
        raise BulkError(f"{file}: JSON is read as lines of one object each; if it is so, add --input-format jsonl")
    return _FORMATS.get(suffix, "text")


def open_bytes(file: str) -> BinaryIO:
    """The bytes of a file, decompressed where its name ends in .gz or .zst; of standard input, as they are."""
    if file == STANDARD_INPUT:
        if sys.stdin is None:
            raise BulkError("standard input is closed; --file names a file")
        try:  # without Python's buffer, whose lock a thread that waits for input would hold at the end of the process
            return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
        except (OSError, AttributeError):
            return sys.stdin.buffer
    suffix = Path(file).suffix.lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(file, "rb"))
    if suffix == ".zst":
        pyarrow = arrow("pyarrow", f"{file}: zstd")
        with Path(file).open("rb"):  # pyarrow's error does not name a folder
            pass
        return cast("BinaryIO", pyarrow.CompressedInputStream(pyarrow.OSFile(file), "zstd"))
    return Path(file).open("rb")


def shown(file: str) -> str:
    """What errors call it."""
    return "standard input" if file == STANDARD_INPUT else file
