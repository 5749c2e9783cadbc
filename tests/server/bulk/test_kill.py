"""A run that is killed, at any moment and as often as one likes, goes on: no text is lost, none is doubled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.bulk.running import BLOCK, embed, embedded
from tests.server.live import ROOT, environment

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
