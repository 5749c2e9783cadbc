"""Row groups that are made one by one become one Parquet file; pyarrow reads what it could have written itself."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.engine import Model, load_model
from embert.engine.task_output import TaskOutput
from embert.engine.tasks import Task
from embert.server.bulk.input.read_rows import ReadRows
from embert.server.bulk.job import Job
from embert.server.bulk.output.containers import ParquetFile
from embert.server.bulk.output.row_group import RowGroups
from embert.server.bulk.output.thrift import Struct, read_struct, write_struct
from tests.engine.heads.m3 import build_m3

KEPT = pyarrow.schema([("text", pyarrow.string()), ("id", pyarrow.int64()), ("tags", pyarrow.list_(pyarrow.string()))])


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(build_m3(tmp_path_factory.mktemp("m3"))))


def job(task: Task = Task.EMBED) -> Job:
    return Job(
        task=task,
        input_format="jsonl",
        keep=("text", "id", "tags"),
        output_format="parquet",
        schema=KEPT.serialize().to_pybytes(),
    )


def some(first: int, count: int) -> ReadRows:
    rows = [
        {"text": f"text {n}", "id": None if n % 5 == 0 else n, "tags": ["a"] * (n % 3)}
        for n in range(first, first + count)
    ]
    return ReadRows([str(row["text"]) for row in rows], range(count), [], rows)


def written(container: ParquetFile, pieces: list[memoryview]) -> bytes:
    content = bytearray(container.begin())
    for piece in pieces:
        container.added(piece, len(content))
        content += piece
    return bytes(content)


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(0, 20))
def test_row_groups_are_joined(m3: Model, counts: list[int], cut: int) -> None:
    groups = RowGroups(job(), m3)
    random = np.random.default_rng(0)
    pieces: list[memoryview] = []
    vectors: list[Any] = []
    every: list[Any] = []
    for count in counts:
        rows = some(len(every), count)
        vectors.append(random.standard_normal((count, m3.width)).astype(np.float32))
        pieces.append(groups.row_group(rows, TaskOutput.one_each(vectors[-1])))
        every += rows.content
    container = ParquetFile(groups.empty())
    content = written(container, pieces)
    whole = content + container.end(len(every))[1]
    table = pyarrow.parquet.read_table(io.BytesIO(whole))
    assert table.schema.remove_metadata() == groups.schema
    assert table.drop(["embedding"]).to_pylist() == every
    if every:
        found = table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, m3.width)
        assert np.array_equal(found, np.concatenate(vectors))
    described = pyarrow.parquet.ParquetFile(io.BytesIO(whole)).metadata
    assert [described.row_group(n).num_rows for n in range(described.num_row_groups)] == counts
    # A file that was cut after a block says by itself which blocks it has.
    cut = min(cut, len(counts))
    size = len(container.begin()) + sum(map(len, pieces[:cut]))
    again = ParquetFile(groups.empty())
    descriptor = os.memfd_create("cut")
    try:
        os.write(descriptor, content[:size] + b"half a block")
        again.resume(descriptor, size)
    finally:
        os.close(descriptor)
    for position, piece in zip(np.cumsum([size, *map(len, pieces[cut:])]).tolist(), pieces[cut:], strict=False):
        again.added(piece, position)
    assert content + again.end(len(every))[1] == whole


def test_a_damaged_file_is_not_continued(m3: Model) -> None:
    groups = RowGroups(job(), m3)
    piece = groups.row_group(some(0, 3), TaskOutput.one_each(np.zeros((3, m3.width), np.float32)))
    content = written(ParquetFile(groups.empty()), [piece])
    descriptor = os.memfd_create("damaged")
    try:
        os.write(descriptor, content)
        for size in (len(content) - 1, len(content) - len(piece) // 2):
            with pytest.raises((ValueError, LookupError, OSError)):
                ParquetFile(groups.empty()).resume(descriptor, size)
    finally:
        os.close(descriptor)


def test_sparse_and_multi_vectors_are_lists(m3: Model) -> None:
    sparse = TaskOutput(
        np.array([[0.5], [0.25], [1]], np.float32), np.array([0, 2, 2, 3], np.int32), np.array([3, 7, 5], np.int32)
    )
    groups = RowGroups(job(Task.SPARSE), m3)
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(groups.row_group(some(1, 3), sparse)))
    assert table["indices"].to_pylist() == [[3, 7], [], [5]]
    assert table["values"].to_pylist() == [[0.5, 0.25], [], [1.0]]
    head = m3.heads.multi_vector
    assert head is not None
    values = np.arange(3 * head.columns, dtype=np.float32).reshape(3, head.columns)
    groups = RowGroups(job(Task.MULTI), m3)
    multi = TaskOutput(values, np.array([0, 1, 1, 3], np.int32))
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(groups.row_group(some(1, 3), multi)))
    assert [np.array(each).reshape(-1, head.columns).tolist() for each in table["vectors"].to_pylist()] == [
        values[:1].tolist(), [], values[1:].tolist(),
    ]  # fmt: skip
    assert str(table.schema.field("vectors").type) == (
        f"list<element: fixed_size_list<element: float not null>[{head.columns}] not null>"
    )


def test_values_of_another_type_are_refused(m3: Model) -> None:
    groups = RowGroups(job(), m3)
    rows = some(1, 1)
    rows.content[0]["id"] = "three"
    with pytest.raises(RowGroups.Unfit, match="field 'id' is not int64 everywhere"):
        groups.row_group(rows, TaskOutput.one_each(np.zeros((1, m3.width), np.float32)))


INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)


def structs(values: Any) -> Any:
    fields = st.one_of(
        st.tuples(st.just(1), st.just(True)),
        st.tuples(st.just(2), st.just(False)),
        st.tuples(st.sampled_from([4, 5, 6]), INTEGERS),
        st.tuples(st.just(7), st.binary(min_size=8, max_size=8)),
        st.tuples(st.just(8), st.binary(max_size=300)),
        st.tuples(st.just(9), st.tuples(st.just(6), st.lists(INTEGERS, max_size=20))),
        st.tuples(st.just(9), st.tuples(st.just(12), st.lists(values, max_size=17))),
        st.tuples(st.just(12), values),
    )
    return st.dictionaries(st.integers(1, 40), fields, max_size=6)


@given(st.recursive(st.just({}), structs, max_leaves=8))
def test_thrift_comes_back(struct: Struct) -> None:
    assert read_struct(write_struct(struct)) == struct


def test_footers_come_back_to_the_byte(tmp_path: Path) -> None:
    table = pyarrow.table({"a": [1, 2, 3], "b": [{"c": ["x"]}, None, {"c": []}], "d": [0.5, float("nan"), None]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, write_page_index=True, row_group_size=1)
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    assert write_struct(read_struct(content[-8 - length : -8])) == content[-8 - length : -8]
