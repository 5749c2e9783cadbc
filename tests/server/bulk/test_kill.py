"""A run that is killed, at any moment and as often as one likes, goes on: no text is lost, none is doubled."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.dataset
import pytest

from tests.server.bulk.crash import STEPS_OF_A_CRASH
from tests.server.bulk.running import embed, embedded, started
from tests.server.live import ROOT, environment, until

LINES = 20_000  # 5 blocks
KILLS = 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts"
    path.write_text("".join(f"text {number}\n" for number in range(LINES)))
    return path


def into(texts: Path, target: Path) -> list[str]:
    """A folder's shards end in the middle of what would be a block."""
    folder = ["--shard-texts", "7000"] if target.suffix == ".d" else []
    return ["--dimensions", "16", "-f", str(texts), "-o", str(target), *folder]


def written(target: Path) -> int:
    """Bytes that a run has written so far."""
    beside = target.with_name(target.name + ".partial")
    files = [*target.iterdir()] if target.is_dir() else [beside, target]
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # renamed a moment ago
            continue
    return total


def kill_at(size: int, command: list[str], target: Path) -> bool:
    """Run until so many bytes are written, and kill all of it with SIGKILL. False where the run has ended before."""
    # Slow enough that there are moments: a few milliseconds a block.
    with started(command, {"STAND_IN_TOKENS_PER_S": "500000"}) as process:

        def reached() -> bool:
            return written(target) >= size or process.poll() is not None

        until(reached, 120, what=f"{size} bytes of output")
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        killed = process.wait() == -9
        _, alive = psutil.wait_procs(children, 60)
        assert not alive, "processes outlive their run"
        return killed


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.jsonl", "vectors.parquet", "vectors.d"])
def test_killed_at_random_sizes_of_the_output(texts: Path, tmp_path: Path, name: str) -> None:
    whole, target = tmp_path / f"whole-{name}", tmp_path / name
    embed(*into(texts, whole))
    size = written(whole)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    moments = sorted(random.Random(seed).randrange(size) for _ in range(KILLS - 1))
    kills = 0
    complete: dict[str, int] = {}
    for moment in (0, *moments):
        kills += kill_at(moment, [*into(texts, target), "--resume"], target)
        if whole.is_dir():
            shards = {path.name: path.stat().st_ino for path in target.glob("part-*")}
            assert complete.items() <= shards.items(), "a complete shard was made again"
            complete = {shard["name"]: shards[shard["name"]] for shard in manifest_of(target)["shards"]}
    assert kills, "no run was killed"
    if target.is_dir() or not target.exists() or Path(f"{target}.partial.json").exists():  # else it has ended
        embed(*into(texts, target), "--resume")
    if whole.is_file():
        assert target.read_bytes() == whole.read_bytes()
        assert {path.name for path in tmp_path.iterdir()} == {name, whole.name}
        return
    names = sorted(path.name for path in whole.glob("part-*"))
    assert names == [f"part-{number:06d}.parquet" for number in range(3)]
    assert {path.name for path in target.iterdir()} == {*names, "_manifest.json"}
    assert all((target / each).read_bytes() == (whole / each).read_bytes() for each in names)
    found = pyarrow.dataset.dataset(target).to_table()
    assert found["text"].to_pylist() == texts.read_text().splitlines()
    assert (manifest_of(target)["finished"], manifest_of(target)["rows"]) == (True, LINES)


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.d"])
def test_resumed_at_once(texts: Path, tmp_path: Path, name: str) -> None:
    """The lock ends with the killed run."""
    whole, target = tmp_path / f"whole-{name}", tmp_path / name
    embed(*into(texts, whole))
    size = written(whole) // 5
    slow = {"STAND_IN_TOKENS_PER_S": "500000"}
    with started([*into(texts, target), "--tokenization-workers", "3"], slow) as process:
        until(lambda: written(target) > size or process.poll() is not None, 120, what="some output")
        process.kill()
        assert process.wait() == -9
        embed(*into(texts, target), "--resume")
    if whole.is_file():
        assert target.read_bytes() == whole.read_bytes()
        return
    names = sorted(path.name for path in whole.glob("part-*"))
    assert {path.name for path in target.iterdir()} == {*names, "_manifest.json"}
    assert all((target / each).read_bytes() == (whole / each).read_bytes() for each in names)


def manifest_of(folder: Path) -> Any:
    path = folder / "_manifest.json"
    return json.loads(path.read_text()) if path.exists() else {"shards": []}


@pytest.mark.parametrize("kind", ["file", "parquet", "folder"])
def test_killed_before_every_step_that_lasts(tmp_path: Path, kind: str) -> None:
    """Before the first, the second, … of all writes, syncs and renames, until none is left to be killed before."""
    with crashing(kind) as run:
        assert run(tmp_path / "whole", 0) == [0, 0]
        steps = 1
        while run(tmp_path / "killed", steps)[-1] == STEPS_OF_A_CRASH:
            *_, status = run(tmp_path / "killed", 3 if steps % 4 == 0 else 0, "--resume")
            if status == STEPS_OF_A_CRASH:  # killed once more, soon after it went on
                *_, status = run(tmp_path / "killed", 0, "--resume")
            assert status == 0
            assert content(tmp_path / "killed") == content(tmp_path / "whole"), f"killed before step {steps}"
            remove(tmp_path / "killed")
            steps += 1
    assert steps > 15


@contextlib.contextmanager
def crashing(kind: str) -> Iterator[Callable[..., list[int]]]:
    """Runs of crash.py: they take a path, steps and options, and give its answer."""
    command = [sys.executable, "-m", "tests.server.bulk.crash", kind]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(*words: object) -> list[int]:
            print(json.dumps(words, default=str), file=process.stdin)
            assert process.stdout is not None
            return [int(word) for word in process.stdout.readline().split()]

        yield run


def content(path: Path) -> dict[str, bytes]:
    """Every file of an output, but not what says how it came about."""
    files = [*path.iterdir()] if path.is_dir() else [*path.parent.glob(path.name + "*")]
    return {file.name.replace(path.name, ""): file.read_bytes() for file in files if not file.name.startswith("_m")}


def remove(path: Path) -> None:
    for file in [*path.iterdir()] if path.is_dir() else [*path.parent.glob(path.name + "*")]:
        file.unlink()
    if path.is_dir():
        path.rmdir()


def test_a_run_that_is_complete_is_not_made_again(texts: Path, tmp_path: Path) -> None:
    target = tmp_path / "vectors.d"
    embed(*into(texts, target))
    times = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    again = embedded(*into(texts, target), "--resume")
    assert (again.returncode, again.stderr) == (0, "embert: everything is embedded already\n")
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == times


def test_arrays_of_shards_are_arrays(texts: Path, tmp_path: Path) -> None:
    target = tmp_path / "vectors.d"
    embed(*into(texts, target), "--output-format", "npy")
    shards = [np.load(path) for path in sorted(target.glob("part-*.npy"))]
    assert [shard.shape for shard in shards] == [(7000, 16)] * 2 + [(6000, 16)]
    embed(*into(texts, tmp_path / "whole.npy"))
    assert np.array_equal(np.concatenate(shards), np.load(tmp_path / "whole.npy"))
