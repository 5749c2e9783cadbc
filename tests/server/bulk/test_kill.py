"""A run that is killed, at any moment and as often as one likes, goes on: no text is lost, none is doubled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.dataset
import pytest

from tests.server.bulk.running import BLOCK, embed, embedded, fed
from tests.server.live import ROOT, environment, until

LINES = 5 * BLOCK - 50
SHARD = 400  # texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts"
    path.write_text("".join(f"text {number}\n" for number in range(LINES)))
    return path


@pytest.fixture(scope="module")
def shards(texts: Path) -> Path:
    """A complete folder. Its shards end in the middle of what would be a block."""
    target = texts.with_name("shards.d")
    embed("-f", texts, *into(target))
    return target


@pytest.fixture(scope="module")
def array(texts: Path) -> Path:
    target = texts.with_name("array.npy")
    embed("-f", texts, *into(target))
    return target


def into(target: Path) -> list[str]:
    folder = ["--shard-texts", str(SHARD)] if target.suffix == ".d" else []
    return ["--dimensions", "16", "-o", str(target), *folder]


def complete(target: Path) -> int:
    """The number of rows that a run which is killed now would not lose."""
    progress = target / "_manifest.json" if target.suffix == ".d" else target.with_name(f"{target.name}.partial.json")
    return int(json.loads(progress.read_text())["rows"]) if progress.exists() else 0


@pytest.mark.parametrize("kind", ["array", "shards"])
def test_killed_and_resumed_at_once(texts: Path, request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Killed while it waits for more lines, then in full flight. The lock ends with the killed run."""
    whole: Path = request.getfixturevalue(kind)
    target = tmp_path / whole.name
    shards = dict[str, int]()
    children = []
    for lines in (2 * BLOCK + 10, LINES):
        before = complete(target)
        with fed(texts, lines, [*into(target), "--resume"]) as (process, _):
            until(lambda: complete(target) > before or process.poll() is not None, what="more complete texts")  # noqa: B023
            if process.poll() is None:
                children += psutil.Process(process.pid).children()
            process.kill()
            assert process.wait() == -9
        if not target.is_dir():
            with Path(f"{target}.partial").open("ab") as partial:
                partial.write(b"half a bl")  # as if it had been killed while it wrote
        else:
            inodes = {path.name: path.stat().st_ino for path in target.glob("part-*")}
            assert shards.items() <= inodes.items(), "a complete shard was made again"
            recorded = complete(target) // SHARD  # it may have been killed after a shard was renamed, before its record
            shards = {name: inodes[name] for name in sorted(inodes)[:recorded]}
    embed("-f", texts, *into(target), "--resume")
    _, alive = psutil.wait_procs(children, 60)
    assert not alive, "processes outlive their run"
    if whole.is_file():
        assert target.read_bytes() == whole.read_bytes()
        assert {path.name for path in tmp_path.iterdir()} == {target.name}
        return
    names = sorted(path.name for path in whole.glob("part-*"))
    assert names == [f"part-{number:06d}.parquet" for number in range(4)]
    assert {path.name for path in target.iterdir()} == {*names, "_manifest.json"}
    assert all((target / each).read_bytes() == (whole / each).read_bytes() for each in names)
    found = pyarrow.dataset.dataset(target).to_table()
    assert found["text"].to_pylist() == texts.read_text().splitlines()
    assert (manifest_of(target)["finished"], manifest_of(target)["rows"]) == (True, LINES)


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / "_manifest.json").read_text())


@pytest.mark.parametrize("kind", ["file", "parquet", "folder"])
def test_killed_before_every_step_that_lasts(tmp_path: Path, kind: str) -> None:
    """Before the first, the second, … of all writes, syncs and renames, until none is left to be killed before."""
    command = [sys.executable, "-m", "tests.server.bulk.crash", kind, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)


def test_a_run_that_is_complete_is_not_made_again(texts: Path, shards: Path) -> None:
    times = {path.name: path.stat().st_mtime_ns for path in shards.iterdir()}
    again = embedded("-f", texts, *into(shards), "--resume")
    assert (again.returncode, again.stderr) == (0, "embert: everything is embedded already\n")
    assert {path.name: path.stat().st_mtime_ns for path in shards.iterdir()} == times


def test_arrays_of_shards_are_arrays(texts: Path, array: Path, tmp_path: Path) -> None:
    target = tmp_path / "vectors.d"
    embed("-f", texts, *into(target), "--output-format", "npy")
    shards = [np.load(path) for path in sorted(target.glob("part-*.npy"))]
    assert [shard.shape for shard in shards] == [(SHARD, 16)] * 3 + [(LINES - 3 * SHARD, 16)]
    assert np.array_equal(np.concatenate(shards), np.load(array))
