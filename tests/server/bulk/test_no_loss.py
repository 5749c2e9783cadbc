"""`embert embed` loses no finished output and no kept value, and notices a changed model or input."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

from embert.engine import Model, load_model
from embert.server.bulk import writer
from embert.server.bulk.job import Block, BulkError, CannotResume, Job
from embert.server.bulk.resume import check_manifest, run_manifest
from embert.server.bulk.rows import ColumnError, Layout, json_lines, parse
from embert.server.bulk.writer import FileWriter
from tests.server.bulk.running import BLOCK, COMMAND, embed, embedded
from tests.server.live import ROOT, environment


def test_a_finished_output_is_replaced_only_when_asked(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("precious\n")
    with pytest.raises(BulkError, match="--overwrite"):
        FileWriter(str(target), "jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    with FileWriter(str(target), "jsonl", overwrite=True):
        assert target.read_text() == "precious\n", "it is replaced at the end"


def test_a_run_that_waited_for_another_ones_lock_leaves_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run renames the file that the second has open."""
    target = tmp_path / "out.jsonl"
    locked = writer._lock

    def renamed_meanwhile(descriptor: int) -> bool:
        if not target.exists():
            os.write(descriptor, b"the first run's\n")
            Path(f"{target}.partial").rename(target)
        return locked(descriptor)

    monkeypatch.setattr(writer, "_lock", renamed_meanwhile)
    with pytest.raises(BulkError, match="--overwrite"):
        FileWriter(str(target), "jsonl")
    assert target.read_text() == "the first run's\n"


@pytest.mark.parametrize("name", ["out.jsonl.partial", "out.jsonl.partial.json"])
def test_an_input_with_the_name_of_a_partial_output_is_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    source.write_text("a text\n")
    ended = embedded("-f", source, "--input-format", "text", "-o", tmp_path / "out.jsonl")
    assert (ended.returncode, source.read_text()) == (1, "a text\n")
    assert name in ended.stderr


def test_a_finished_folder_is_compared_with_the_input(tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out"
    run = ("-f", source, "-o", f"{target}/", "--output-format", "jsonl", "--shard-texts", "4", "--dimensions", "8")
    source.write_text("".join(f"line {n}\n" for n in range(6)))
    embed(*run)
    for changed, reason in ((range(9), "the input has more now"), (range(1, 7), "are not those that were embedded")):
        source.write_text("".join(f"line {n}\n" for n in changed))
        ended = embedded(*run, "--resume")
        assert ended.returncode == 1
        assert "cannot resume" in ended.stderr
        assert reason in ended.stderr


def test_a_change_in_a_modules_folder_is_a_change_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    weights = tmp_path / "2_Dense" / "model.safetensors"
    weights.write_bytes(b"1")
    model = cast("Model", SimpleNamespace(model_id="m", revision=None, folder=tmp_path, base=None, pooling="mean"))
    before = run_manifest(Job(), model, [], None)
    check_manifest(before, run_manifest(Job(), model, [], None), tmp_path)
    weights.write_bytes(b"12")
    with pytest.raises(CannotResume, match=r"2_Dense/model\.safetensors"):
        check_manifest(before, run_manifest(Job(), model, [], None), tmp_path)


def test_weights_that_are_swapped_are_noticed(tmp_path: Path) -> None:
    """Size and time of change are the same."""
    path = tmp_path / "model.safetensors"
    model = cast("Model", SimpleNamespace(model_id="m", revision=None, folder=tmp_path, base=None, pooling="mean"))

    def manifest(weight: float) -> dict[str, Any]:
        tensors = {"a": np.zeros((512, 512), np.float32), "b": np.full(8, weight, np.float32)}
        save_file(tensors, path)
        os.utime(path, ns=(1, 1))
        return run_manifest(Job(), model, [], None)

    before = manifest(1)
    check_manifest(before, manifest(1), tmp_path)
    with pytest.raises(CannotResume, match=r"model\.safetensors"):
        check_manifest(before, manifest(2), tmp_path)


@pytest.mark.parametrize(
    ("row", "is_bad"),
    [
        ({"text": "a", "n": 2**64 + 1}, True),
        ({"text": "a", "n": {"deep": [-(2**63) - 1]}}, True),
        ({"text": "a", "n": 2**64 - 1}, False),
        ({"text": "1234567890123456789012345", "n": 0.12345678901234567890123}, False),
    ],
)
def test_integers_that_no_64_bits_hold_are_refused(row: dict[str, Any], is_bad: bool) -> None:
    job = Job(input_format="jsonl", keep=None)
    parsed = parse(job, (json.dumps(row) + "\n").encode())
    with pytest.raises(ColumnError) if is_bad else contextlib.nullcontext():
        (line,) = json_lines(job, parsed, [{}])
        assert json.loads(line) == row


@pytest.mark.parametrize(("arguments", "closed"), [(("-f", "-"), "<&-"), (("a text",), ">&-")], ids=["in", "out"])
def test_a_closed_standard_stream_is_one_sentence(arguments: tuple[str, ...], closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert "is closed" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_value_that_parquet_would_change_names_the_field_and_the_line(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "a", "price": 1}] * 300 + [{"text": "b", "price": 1.75}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = embedded("-f", tmp_path / "in.jsonl", "--keep", "price", "-o", tmp_path / "out.parquet")
    assert ended.returncode == 1
    assert f"{tmp_path}/in.jsonl line 301: field 'price' does not fit" in ended.stderr
    assert "1.75" in ended.stderr
    assert not (tmp_path / "out.parquet").exists()


def test_a_field_that_no_row_of_a_block_has_is_null(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "a", "n": 1}] * BLOCK + [{"text": "b"}] * 2
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    embed("-f", tmp_path / "in.jsonl", "--keep-all", "-o", tmp_path / "out.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet")["n"].to_pylist() == [1] * BLOCK + [None] * 2


def test_a_damaged_partial_file_is_not_converted(tmp_path: Path) -> None:
    schema = pyarrow.schema([("text", pyarrow.string())]).serialize().to_pybytes()
    layout = Layout(Job(output_format="parquet", schema=schema), load_model())
    with FileWriter(str(tmp_path / "out.parquet"), "parquet") as writing:
        writing.begin({}, layout, resume=False)
        writing.write(Block(0, 1, texts=1), memoryview(b"no Arrow stream " * 10))
        with pytest.raises(BulkError, match="damaged"):
            writing.finish()
    assert not (tmp_path / "out.parquet").exists()
