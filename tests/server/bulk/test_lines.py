"""Files of lines: every line is read, in blocks that depend on the lines alone."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import types
from pathlib import Path
from typing import Literal

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.bulk import reader as reading
from embert.server.bulk import rows as bulk_rows
from embert.server.bulk.job import BLOCK_BYTES, BulkError, Job
from embert.server.bulk.reader import LineReader, expand, input_format
from embert.server.bulk.rows import parse

LINES = st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=20), max_size=30)


def blocks(source: LineReader, most: int) -> list[list[str]]:
    found = []
    while (piece := source.read(most)) is not None:
        read = parse(Job(), memoryview(piece.payload))
        assert not read.invalid
        assert len(read.texts) == piece.rows == sum(part.rows for part in piece.ranges)
        found.append(read.texts)
    return found


@given(
    st.lists(LINES, min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.integers(1, 40),
)
def test_all_lines_of_all_files(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], most: int, end: str, ended: bool, read: int
) -> None:
    """Whatever is read at once, and whether the last line has an end or not."""
    folder = tmp_path_factory.mktemp("lines")
    names, expected = [], []
    for number, lines in enumerate(files):
        content = end.join(lines) + (end if ended and lines else "")
        (folder / f"{number}").write_bytes(content.encode())
        names.append(str(folder / f"{number}"))
        text = content.removeprefix("\ufeff")
        expected += [line.rstrip("\r") for line in (text.split("\n")[:-1] if text.endswith("\n") else text.split("\n"))]
        if not text:
            expected.pop()
    before = reading._READ_BYTES
    reading._READ_BYTES = max(read, 3)  # so that a byte order mark is read at once
    try:
        source = LineReader(names, Job())
        source.peek(most)
        found = blocks(source, most)
    finally:
        reading._READ_BYTES = before
    assert [line for block in found for line in block] == expected
    assert all(len(block) == most for block in found[:-1])


def test_a_block_is_bounded_in_bytes(tmp_path: Path) -> None:
    """A text of more bytes is a separate block of any length."""
    huge = "a " * (BLOCK_BYTES // 2 + 1000)
    (tmp_path / "lines").write_text(f"{'b' * (BLOCK_BYTES - 3)}\nc\nd\n{huge}\ne\n")
    source = LineReader([str(tmp_path / "lines")], Job())
    found = blocks(source, 100)
    assert [len(block) for block in found] == [2, 1, 1, 1]
    assert found[2] == [huge]


@pytest.mark.parametrize("format_", ["text", "jsonl"])
def test_lines_over_the_limit_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: Literal["text", "jsonl"]
) -> None:
    for module in (reading, bulk_rows):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(reading, "_READ_BYTES", 64)
    line = "{}" if format_ == "text" else '{{"text": "{}"}}'
    room = 100 - len(line.format(""))
    expected = ["a", "b" * room, "", "c", "", "d"]
    written = ["a", "b" * room, "x" * (room + 1), "c", "x" * 1000, "d"]
    (tmp_path / "lines").write_text("".join(f"{line.format(text)}\n" for text in written))
    found = []
    monkeypatch.setattr("embert.server.bulk.job.BLOCK_BYTES", 50)
    source = LineReader([str(tmp_path / "lines")], Job())
    while (piece := source.read(10)) is not None:
        assert len(piece.payload) <= 102
        read = parse(Job(input_format=format_), memoryview(piece.payload))
        found += read.texts + [""] * len(read.invalid)
        assert all("which is the limit" in reason for reason in read.invalid.values())
    assert found == expected


def test_a_line_without_an_end_is_refused_at_the_limit() -> None:
    source = LineReader(["/dev/zero"], Job())
    piece = source.read(10)
    assert piece is not None
    assert len(parse(Job(), memoryview(piece.payload)).invalid) == 1


def test_compressed_lines(tmp_path: Path) -> None:
    content = b"".join(b"line %d\n" % number for number in range(100_000))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    with pyarrow.CompressedOutputStream(str(tmp_path / "a.txt.zst"), "zstd") as file:
        file.write(content)
    for name in ("a.txt.gz", "a.txt.zst"):
        source = LineReader([str(tmp_path / name)], Job())
        lines = [line for block in blocks(source, 4096) for line in block]
        assert lines == content.decode().splitlines()


def test_damaged_compressed_lines(tmp_path: Path) -> None:
    good = gzip.compress(b"".join(b"line %d\n" % number for number in range(10_000)))
    for name, content, said in (
        ("half.gz", good[: len(good) // 2], "is damaged or incomplete"),
        ("wrong.gz", good[:-6] + b"xx" + good[-4:], "CRC check failed"),
        ("none.gz", bz2.compress(b"a\n"), "Not a gzipped file"),
        ("none.zst", b"no zstd", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BulkError, match=said) as error:
            blocks(LineReader([str(tmp_path / name)], Job()), 20_000)
        assert str(error.value).startswith(str(tmp_path / name))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO("\ufeffä\r\n\nb".encode())))
    source = LineReader(["-"], Job())
    assert blocks(source, 10) == [["ä", "", "b"]]


def test_what_is_wrong_with_a_line_of_json() -> None:
    lines = [
        {"body": "good", "n": 1},
        {"body": None},
        {"body": 3},
        {"body": ["a"]},
        {"n": 1, "m": 2},
        {},
        [1],
        "body",
    ]
    payload = "\n".join(map(json.dumps, lines)).encode() + b'\n  \n{"body": \n{"body": "\xff"}\n{"body": "last"}\n'
    read = parse(Job(input_format="jsonl", column="body"), memoryview(payload))
    assert (read.texts, list(read.rows)) == (["good", "last"], [0, 11])
    wrong = [*read.invalid.values()]
    assert [*read.invalid] == [1, 2, 3, 4, 5, 6, 7, 9, 10]  # a blank line counts for nothing
    assert wrong[:7] == [
        "field 'body' is null, not a string",
        "field 'body' is a number, not a string",
        "field 'body' is a list, not a string",
        "has no field 'body'; it has n, m; --column names another",
        "has no field 'body'; it has no field; --column names another",
        "is a list, not an object with the field 'body'",
        "is a value, not an object with the field 'body'",
    ]
    assert all(each.startswith("is not JSON: ") for each in wrong[7:])


def test_globs_and_formats(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.JSONL.GZ", "d.txt", "[x].txt"):
        (tmp_path / name).touch()
    assert expand([f"{tmp_path}/*.jsonl", "-"]) == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl", "-"]
    assert expand([f"{tmp_path}/[x].txt"]) == [f"{tmp_path}/[x].txt"]
    for names, said in ((["*.none"], r"no file matches \*\.none"), (["-", "-"], "can be read once")):
        with pytest.raises(BulkError, match=said):
            expand(names)
    for file, format_ in (
        ("a.jsonl", "jsonl"), ("a.ndjson.zst", "jsonl"), ("c.JSONL.GZ", "jsonl"), ("a.csv.gz", "csv"), ("a.tsv", "tsv"),
        ("a.parquet", "parquet"), ("a.pq", "parquet"), ("a.txt", "text"), ("a", "text"), ("-", "text"),
    ):  # fmt: skip
        assert input_format([file], None) == format_
    assert input_format(["a.csv", "b.txt"], "jsonl") == "jsonl"
    with pytest.raises(BulkError, match=r"found a\.csv \(csv\) and b\.txt \(text\)"):
        input_format(["a.csv", "b.txt"], None)
    with pytest.raises(BulkError, match=r"a\.json: JSON is read as lines"):
        input_format(["a.json"], None)
