"""The writer: blocks in the order of the input, and Parquet files from Arrow streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from embert.engine import Model, load_model
from embert.engine.batch import TaskOutput
from embert.engine.tasks import Task
from embert.server.bulk.job import Block, BulkError, Job
from embert.server.bulk.rows import Layout, ParsedRows
from embert.server.bulk.writer import FileWriter
from tests.server.bulk.running import embed
from tests.server.models import three_heads

KEPT = pyarrow.schema([("text", pyarrow.string()), ("id", pyarrow.int64()), ("tags", pyarrow.list_(pyarrow.string()))])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(three_heads(tmp_path_factory.mktemp("model"))))


def job(task: Task = Task.EMBED) -> Job:
    return Job(
        task=task,
        input_format="jsonl",
        keep=("text", "id", "tags"),
        output_format="parquet",
        schema=KEPT.serialize().to_pybytes(),
    )


def some(first: int, count: int) -> ParsedRows:
    rows = [
        {"text": f"text {n}", "id": None if n % 5 == 0 else n, "tags": ["a"] * (n % 3)}
        for n in range(first, first + count)
    ]
    return ParsedRows([str(row["text"]) for row in rows], range(count), content=rows)


def test_many_tokenization_processes_write_what_one_writes(tmp_path: Path) -> None:
    """Blocks are formatted side by side, and the texts of a block are encoded in another order."""
    texts = tmp_path / "texts"
    lines = [f"{number} " + "word " * (number * 7 % 130) for number in range(1_000)]  # 4 blocks of several batches
    texts.write_text("".join(f"{line}\n" for line in lines))
    one, many, some = (tmp_path / f"{name}.npy" for name in ("one", "many", "some"))
    embed("--dimensions", "16", "-f", texts, "-o", one, "--tokenization-workers", "1")
    embed("--dimensions", "16", "-f", texts, "-o", many, "--tokenization-workers", "3")
    assert many.read_bytes() == one.read_bytes()
    texts.write_text("".join(f"{line}\n" for line in lines[300:400]))  # blocks that are cut elsewhere
    embed("--dimensions", "16", "-f", texts, "-o", some)
    assert np.array_equal(np.load(one)[300:400], np.load(some))


def test_blocks_become_one_parquet_file(tmp_path: Path, model: Model) -> None:
    format_ = Layout(job(), model)
    rows: list[Any] = []
    vectors: list[Any] = []
    with FileWriter(str(tmp_path / "out.parquet")) as writer:
        writer.begin({}, Layout(job(), model), resume=False)
        for number, count in enumerate((3, 40, 1)):
            parsed = some(len(rows), count)
            rows += parsed.content
            vectors.append(np.random.default_rng(number).standard_normal((count, model.width), np.float32))
            content = format_.format(parsed, TaskOutput.one_each(vectors[-1]))
            writer.write(Block(number, count, texts=count), content)
        writer.finish()
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.schema.remove_metadata() == format_.schema
    assert table.drop(["embedding"]).to_pylist() == rows
    stored = table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, model.width)
    assert np.array_equal(stored, np.concatenate(vectors))
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_a_damaged_partial_file_is_not_converted(tmp_path: Path, model: Model) -> None:
    with FileWriter(str(tmp_path / "out.parquet")) as writer:
        writer.begin({}, Layout(job(), model), resume=False)
        writer.write(Block(0, 1, texts=1), memoryview(b"no Arrow stream " * 10))
        with pytest.raises(BulkError, match="damaged"):
            writer.finish()
    assert not (tmp_path / "out.parquet").exists()


def test_sparse_and_multi_vectors_are_lists(model: Model) -> None:
    def table(task: Task, vectors: TaskOutput) -> Any:
        return pyarrow.ipc.open_stream(Layout(job(task), model).format(some(1, 3), vectors)).read_all()

    sparse = TaskOutput(
        np.array([[0.5], [0.25], [1]], np.float32), np.array([0, 2, 2, 3], np.int32), np.array([3, 7, 5], np.int32)
    )
    assert table(Task.SPARSE, sparse)["indices"].to_pylist() == [[3, 7], [], [5]]
    assert table(Task.SPARSE, sparse)["values"].to_pylist() == [[0.5, 0.25], [], [1.0]]
    head = model.heads.multi_vector
    assert head is not None
    values = np.arange(3 * head.columns, dtype=np.float32).reshape(3, head.columns)
    multi = table(Task.MULTI, TaskOutput(values, np.array([0, 1, 1, 3], np.int32)))
    assert [np.array(each).reshape(-1, head.columns).tolist() for each in multi["vectors"].to_pylist()] == [
        values[:1].tolist(), [], values[1:].tolist(),
    ]  # fmt: skip
    assert str(multi.schema.field("vectors").type) == (
        f"list<element: fixed_size_list<element: float not null>[{head.columns}] not null>"
    )
