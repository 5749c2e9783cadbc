"""Parquet and CSV: rows of all files in order, from any row on; values that are not texts are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.bulk.job import Block, BulkError, Job
from embert.server.bulk.reader import LineReader, ParquetReader
from embert.server.bulk.rows import ColumnError, json_lines, parse


def blocks(job: Job, source: ParquetReader, most: int) -> list[tuple[list[str], list[dict[str, Any]]]]:
    """The texts and the rows of each block."""
    found = []
    while (piece := source.read(most)) is not None:
        read = parse(job, memoryview(piece.payload))
        assert not read.invalid
        assert len(read.texts) == piece.rows == sum(part.rows for part in piece.ranges)
        found.append((read.texts, read.content.to_pylist()))
    return found


def texts(job: Job, *files: Path | str) -> list[str]:
    source = ParquetReader([*map(str, files)], job)
    return [text for some, _ in blocks(job, source, 1000) for text in some]


PARQUET = Job(input_format="parquet")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 7))
def test_parquet_rows_of_all_files(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], group: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    names, every = [], []
    for number, count in enumerate(counts):
        rows = [f"{number}.{row}" for row in range(count)]
        table = pyarrow.table(
            {"n": pyarrow.array(range(count), pyarrow.int64()), "text": pyarrow.array(rows, "string")}
        )
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=group)
        names.append(str(folder / f"{number}.parquet"))
        every += rows
    whole = [every[first : first + most] for first in range(0, len(every), most)]
    source = ParquetReader(names, PARQUET)
    assert source.total == len(every)
    assert [some for some, _ in blocks(PARQUET, source, most)] == whole


def test_places_of_rows(tmp_path: Path) -> None:
    for name in "ab":
        table = pyarrow.table({"text": [f"{name}{row}" for row in range(10)]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    source = ParquetReader([f"{tmp_path}/a.parquet", f"{tmp_path}/b.parquet"], PARQUET)
    source.read(7)
    piece = source.read(5)
    assert piece is not None
    block = Block(0, piece.rows, piece.ranges)
    assert [block.location(row).removeprefix(f"{tmp_path}/") for row in range(5)] == [
        "a.parquet row 8", "a.parquet row 9", "a.parquet row 10", "b.parquet row 1", "b.parquet row 2",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"])
def test_kinds_of_strings(tmp_path: Path, kind: str) -> None:
    written = ["a", "", "ä\nb", "a"]
    column = pyarrow.array(written)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert texts(PARQUET, tmp_path / "a.parquet") == written


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"id": [1], "body": ["a"]}, "a.parquet has no column 'text'; --column names one of its columns: id, body"),
        ({"text": [1]}, "a.parquet: column 'text' is int64, not strings; --column names another"),
        ({}, "a.parquet has no column 'text'; --column names one of its columns: none"),
    ],
)
def test_columns_that_are_no_texts(tmp_path: Path, table: dict[str, Any], said: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(BulkError) as error:
        ParquetReader([f"{tmp_path}/a.parquet"], PARQUET)
    assert str(error.value) == f"{tmp_path}/{said}"


def test_columns_must_be_the_same_in_all_files(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "id": [1]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"id": ["x"], "text": ["b"]}), tmp_path / "b.parquet")
    files = [f"{tmp_path}/a.parquet", f"{tmp_path}/b.parquet"]
    assert texts(PARQUET, *files) == ["a", "b"]
    with pytest.raises(BulkError, match="different columns: 'id' of type int64, 'id' of type string"):
        ParquetReader(files, Job(input_format="parquet", keep=("id",)))


def test_nulls_and_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    for values, wrong in (
        (pyarrow.array(["a", None, "b"]), (1, "column 'text' is null")),
        (pyarrow.array([b"a", b"x\xff", b"b"]), (1, "is not UTF-8: byte 0xff at position 2")),
        (pyarrow.array([b"a", b"x\xff", b"b"]).view("string"), (1, "is not UTF-8: byte 0xff at position 2")),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
        source = ParquetReader([f"{tmp_path}/a.parquet"], PARQUET)
        piece = source.read(10)
        assert piece is not None
        read = parse(PARQUET, memoryview(piece.payload))
        assert read.texts == ["a", "b"]
        assert [*read.invalid.items()] == [wrong]


def test_a_kept_string_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    note = pyarrow.array([b"a", b"\xff"]).view("string")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "note": note}), tmp_path / "a.parquet")
    job = Job(input_format="parquet", keep=("note",))
    piece = ParquetReader([f"{tmp_path}/a.parquet"], job).read(10)
    assert piece is not None
    with pytest.raises(ColumnError, match="column 'note' is not UTF-8") as error:
        list(json_lines(job, parse(job, piece.payload), iter([{}, {}])))
    assert error.value.row == 1


def test_damaged_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"text {n}" for n in range(1000)]}), tmp_path / "a.parquet")
    good = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "half.parquet").write_bytes(good[: len(good) // 2])
    with pytest.raises(BulkError, match=r"half\.parquet cannot be read: "):
        texts(PARQUET, tmp_path / "half.parquet")
    (tmp_path / "page.parquet").write_bytes(good[:10] + b"\xff" * 40 + good[50:])
    with pytest.raises(BulkError, match=r"page\.parquet cannot be read: "):
        texts(PARQUET, tmp_path / "page.parquet")
    for name, error in (("none.parquet", FileNotFoundError), ("", IsADirectoryError)):
        with pytest.raises(error, match=re.escape(str(tmp_path))):
            texts(PARQUET, tmp_path / name)


def csv_rows(*files: Path | str, **options: Any) -> list[Any]:
    job = Job(input_format="csv", **options)
    source, found = LineReader([*map(str, files)], job), []
    while (piece := source.read(100)) is not None:
        read = parse(job, piece.payload)
        assert not read.invalid
        found += read.content
    return found


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,"text"\r\n007,"a, ""b""\nc"\r\n,\r\nNA,null\r\n')
    (tmp_path / "b.csv").write_text("text,more,id\nx,y,z\n")
    rows = csv_rows(tmp_path / "a.csv", tmp_path / "b.csv", keep=("id",))
    # nothing is guessed to be null or a number
    assert [row["text"] for row in rows] == ['a, "b"\nc', "", "null", "x"]
    assert [row["id"] for row in rows] == ["007", "", "NA", "z"]


def test_empty_lines_of_csv(tmp_path: Path) -> None:
    """A record of one column may be empty; one of two may not."""
    (tmp_path / "one.csv").write_text("\n\ntext\na\n\nb\n\n")
    assert [row["text"] for row in csv_rows(tmp_path / "one.csv")] == ["a", "", "b", ""]
    (tmp_path / "two.csv").write_text("\ntext,id\na,1\n\nb,2\n\n")
    assert [row["text"] for row in csv_rows(tmp_path / "two.csv")] == ["a", "b"]


def test_csv_without_rows(tmp_path: Path) -> None:
    for name, content in (("a.csv", ""), ("b.csv", "\n"), ("c.csv", "text,id"), ("d.csv", "text,id\n")):
        (tmp_path / name).write_text(content)
    assert csv_rows(*sorted(tmp_path.iterdir())) == []


def test_csv_that_is_wrong(tmp_path: Path) -> None:
    for content, error in (
        ("text,id\na\n", "row 1 has 1 values, and the header has 2"),
        ("body,id\na,b\n", "has no column 'text'; --column names one of its columns: body, id"),
        ("text,text\na,b\n", "has 2 columns 'text'; --column names one of its columns: text, text"),
    ):
        (tmp_path / "a.csv").write_text(content)
        with pytest.raises(BulkError, match=f"a.csv {error}"):
            csv_rows(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"text,id\na,b\nc,\xff\n")
    job = Job(input_format="csv", keep=("id",))
    chunk = LineReader([f"{tmp_path}/a.csv"], job).read(10)
    assert chunk is not None
    assert parse(job, chunk.payload).invalid == {1: "is not UTF-8"}
