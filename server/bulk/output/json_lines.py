"""Blocks as JSON lines: the kept columns of a row, and its vector."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import pybase64

from embert.engine.task_output import TaskOutput
from embert.engine.tasks import Task
from embert.server.bulk.input.read_rows import ReadRows
from embert.server.bulk.job import Job

__all__ = ["json_lines"]


def json_lines(job: Job, read: ReadRows, vectors: TaskOutput) -> bytes:
    """One line for each text. Bytes of a column are written in base64; what JSON lacks, such as decimals, as text."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    pairs = zip(_kept(job, read), _vectors(job, vectors), strict=True)
    return b"".join(orjson.dumps(kept | vector, default=_plain, option=option) for kept, vector in pairs)


def _kept(job: Job, read: ReadRows) -> Iterable[dict[str, Any]]:
    """The kept columns of each text's row."""
    if read.content is None:
        return ({job.column: text} for text in read.texts)
    names = job.kept
    if job.input_format == "jsonl":
        rows = (read.content[row] for row in read.rows)
        return rows if names is None else ({name: row.get(name) for name in names} for row in rows)
    batch = read.content if names is None else read.content.select(list(names))
    rows = batch.to_pylist() if len(read.rows) == batch.num_rows else batch.take(list(read.rows)).to_pylist()
    as_text = job.input_format in ("csv", "tsv")

    def columns() -> Iterator[dict[str, Any]]:
        for text, row in zip(read.texts, rows, strict=True):
            if as_text:
                row |= {name: value.decode() for name, value in row.items() if name != job.column}
            if job.column in row:
                row[job.column] = text
            yield row

    return columns()


def _vectors(job: Job, vectors: TaskOutput) -> Iterator[dict[str, Any]]:
    if job.task == Task.SPARSE:
        return ({"indices": each.indices, "values": each.values} for each in vectors.sparse_vectors())
    if job.task == Task.MULTI:
        places = itertools.pairwise(vectors.offsets.tolist())
        return ({"vectors": vectors.values[start:stop]} for start, stop in places)
    return ({"embedding": vector} for vector in vectors.values)


def _plain(value: Any) -> str:
    """What orjson cannot write."""
    return pybase64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
