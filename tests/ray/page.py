"""The examples of docs/ray.md, made to run here: on the CPU, with the packaged model, from a folder to a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.server.live import ROOT

TEXTS = [f"text {number}" for number in range(10)]


def block(language: str, word: str) -> str:
    """The page's one example in this language that has this word."""
    page = (ROOT / "docs" / "ray.md").read_text()
    (found,) = (
        text for text in re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if word in text
    )
    return str(found)


def run(word: str, folder: Path) -> dict[str, Any]:
    """Run the example: the names that it has made. `folder` is its bucket."""
    program = block("python", word)
    for there, here in (
        ('"BAAI/bge-small-en-v1.5"', "None"),
        ("num_gpus=1", "num_gpus=0"),
        ("s3://bucket", str(folder)),
        ("max_size=2", "max_size=1"),
    ):
        program = program.replace(there, here)
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def write_texts(folder: Path) -> None:
    """Write files that the examples read."""
    (folder / "texts").mkdir()
    for number in range(2):
        pq.write_table(pa.table({"body": TEXTS[number::2]}), folder / "texts" / f"{number}.parquet")


def vectors(folder: Path, column: str) -> dict[str, list[float]]:
    """Vectors that the examples have written, by text."""
    tables = [pq.read_table(path).to_pylist() for path in (folder / "vectors").glob("*.parquet")]
    rows = [row for table in tables for row in table]
    assert len(rows) == len(TEXTS)
    return {row["body"]: row[column] for row in rows}
