"""Blocks as row groups: each is a Parquet file of its own, which parquet_file.py joins."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from embert.engine import Model
from embert.engine.engine import kept_columns
from embert.engine.task_output import TaskOutput
from embert.engine.tasks import Task
from embert.server.bulk.input.paths import arrow
from embert.server.bulk.input.read_rows import ReadRows
from embert.server.bulk.job import Job

__all__ = ["RowGroups"]


def same(value: Any, kept: Any) -> bool:
    """Whether a value of JSON is what its column keeps; a field that an object lacks is null there."""
    if isinstance(value, dict) and isinstance(kept, dict):
        return value.keys() <= kept.keys() and all(same(value.get(name), each) for name, each in kept.items())
    if isinstance(value, list) and isinstance(kept, list):
        return len(value) == len(kept) and all(map(same, value, kept))
    return bool(value == kept) and isinstance(value, bool) == isinstance(kept, bool)


class RowGroups:
    """Makes row groups of one job's blocks.

    embedding        FixedSizeList<float32>[dimensions]
    indices, values  List<int32>, List<float32>: sparse vectors
    vectors          List<FixedSizeList<float32>[columns]>: multi-vectors

    None of them has nulls.
    """

    class Unfit(Exception):
        """A column's values are not of its type."""

    def __init__(self, job: Job, model: Model) -> None:
        """`job` must have the schema of its kept columns."""
        self._pa, self._parquet = arrow("pyarrow", "Parquet"), arrow("pyarrow.parquet", "Parquet")
        pa = self._pa
        self._job = job
        self._kept = pa.ipc.read_schema(pa.py_buffer(job.schema))
        floats = pa.field("element", pa.float32(), nullable=False)
        if job.task == Task.SPARSE:
            ids = pa.field("element", pa.int32(), nullable=False)
            types = [pa.list_(ids), pa.list_(floats)]
        elif job.task == Task.MULTI:
            head = model.heads.multi_vector
            types = [pa.list_(pa.field("element", pa.list_(floats, head.columns if head else 0), nullable=False))]
        else:
            types = [pa.list_(floats, kept_columns(model, job.dimensions))]
        named = zip(job.vector_names, types, strict=True)
        self.schema = pa.schema([*self._kept, *(pa.field(name, type_, nullable=False) for name, type_ in named)])

    def row_group(self, read: ReadRows, vectors: TaskOutput) -> memoryview:
        """A Parquet file of a block. Raises Unfit for a kept value that is not of its column's type."""
        columns = [*self._kept_columns(read), *self._vectors(vectors)]
        return self._file(self._pa.RecordBatch.from_arrays(columns, schema=self.schema))

    def empty(self) -> memoryview:
        """A Parquet file without rows."""
        return self._file(self._pa.RecordBatch.from_pylist([], schema=self.schema))

    def _file(self, batch: Any) -> memoryview:
        sink = self._pa.BufferOutputStream()
        names = self._kept.names
        with self._parquet.ParquetWriter(
            sink,
            self.schema,
            # Vectors do not repeat: nothing is gained by compressing, counting or looking for their least.
            compression=dict.fromkeys(names, "zstd") if names else "none",
            use_dictionary=[name for name in names if name != self._job.column],
            write_statistics=names,
        ) as writer:
            if batch.num_rows:
                writer.write_batch(batch)
        return memoryview(sink.getvalue())

    def _kept_columns(self, read: ReadRows) -> list[Any]:
        """The kept columns of the texts' rows."""
        pa, job = self._pa, self._job
        if read.content is not None and job.input_format != "jsonl":
            batch = read.content
            whole = len(read.rows) == batch.num_rows
            names = [name for name in self._kept.names if name != job.column]
            rest = batch.select(names) if whole else batch.select(names).take(pa.array(read.rows, pa.int64()))
        columns = []
        for field in self._kept:
            if field.name == job.column:
                columns.append(pa.array(read.texts, field.type))
            elif job.input_format == "jsonl":
                columns.append(self._field(field, [read.content[row].get(field.name) for row in read.rows]))
            else:
                column = rest.column(field.name)
                columns.append(column if column.type == field.type else column.cast(field.type))
        if job.input_format == "jsonl" and job.kept is None:
            self._check_fields(read)
        return columns

    def _field(self, field: Any, values: list[Any]) -> Any:
        try:
            array = self._pa.array(values, field.type)
        except (self._pa.ArrowException, OverflowError) as error:
            wrong = str(error)
        else:  # pyarrow cuts fractions off, and drops fields that a struct does not have
            lost = next(
                (value for value, kept in zip(values, array.to_pylist(), strict=True) if not same(value, kept)), None
            )
            if lost is None:
                return array
            wrong = f"it would change {orjson.dumps(lost).decode()[:80]}"
        raise self.Unfit(
            f"field {field.name!r} is not {field.type} everywhere, as in the first lines, so it is no column of a "
            f"Parquet file: {wrong}"
        )

    def _check_fields(self, read: ReadRows) -> None:
        names = set(self._kept.names)
        new = next((name for row in read.rows for name in read.content[row] if name not in names), None)
        if new is not None:
            raise self.Unfit(f"there is a field {new!r}, which the first lines have not; name the fields with --keep")

    def _vectors(self, vectors: TaskOutput) -> list[Any]:
        """The vectors' columns, which lie where they are."""
        pa, own = self._pa, [self.schema.field(name).type for name in self._job.vector_names]
        values = pa.array(np.ascontiguousarray(vectors.values, np.float32).reshape(-1))
        if self._job.task == Task.EMBED:
            return [pa.Array.from_buffers(own[0], len(vectors.values), [None], children=[values])]
        offsets = pa.py_buffer(np.ascontiguousarray(vectors.offsets, np.int32))
        count = vectors.sequences
        if self._job.task == Task.SPARSE:
            indices = pa.array(np.ascontiguousarray(vectors.indices, np.int32))
            return [
                pa.Array.from_buffers(type_, count, [None, offsets], children=[each])
                for type_, each in zip(own, (indices, values), strict=True)
            ]
        inner = pa.Array.from_buffers(own[0].value_type, len(vectors.values), [None], children=[values])
        return [pa.Array.from_buffers(own[0], count, [None, offsets], children=[inner])]
