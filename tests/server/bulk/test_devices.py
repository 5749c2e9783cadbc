"""Several devices, an engine process each: the same output as of one, and what happens when a process is lost."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from embert.engine import load_model
from embert.server.bulk.job import Block, BulkError, Job, RowRange, SharedBuffers
from embert.server.bulk.worker import WorkerConfig, WorkerProcess
from tests.server.bulk.running import BLOCK, embed, embedded, fed, started
from tests.server.live import until

LINES = 5 * BLOCK
TWO = ("--device", "x:0,1")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("".join(f"text {number}\n" for number in range(LINES)))
    return path


@pytest.fixture(scope="module")
def whole(texts: Path) -> Path:
    """The output of one engine."""
    path = texts.with_name("whole.jsonl")
    embed("--dimensions", "8", "-f", texts, "-o", path)
    return path


def into(target: Path) -> list[str]:
    return ["--dimensions", "8", "-o", str(target)]


def processes(pid: int) -> list[psutil.Process]:
    """The run's children: engine processes first, as they are started."""
    return sorted(psutil.Process(pid).children(), key=lambda child: child.create_time())


def test_two_devices_share_the_blocks_and_write_what_one_writes(texts: Path, whole: Path, tmp_path: Path) -> None:
    """While no forward ends, each of the two has its blocks."""
    hold = tmp_path / "hold"
    hold.touch()
    with started(["-f", texts, *into(tmp_path / "two.jsonl"), *TWO], {"STAND_IN_HOLD_FILE": str(hold)}) as process:
        until(lambda: len(processes(process.pid)) == 3, what="three processes")
        engines = processes(process.pid)[:2]

        def mapped(engine: psutil.Process) -> int:
            """Slots that the engine has looked into."""
            return sum("memfd:embert-bulk" in each.path for each in engine.memory_maps(grouped=False))

        until(lambda: all(mapped(engine) for engine in engines), what="a block at each engine")
        hold.unlink()
        assert process.wait(120) == 0
    assert (tmp_path / "two.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("victim", [1, 2], ids=["second engine", "tokenization process"])
def test_a_lost_process_ends_the_run_which_can_be_resumed(
    texts: Path, whole: Path, tmp_path: Path, victim: int
) -> None:
    target = tmp_path / "vectors.jsonl"
    progress = tmp_path / "vectors.jsonl.partial.json"
    with fed(texts, BLOCK + 50, [*into(target), *TWO]) as (process, others):
        until(progress.exists, what="the first complete texts")
        processes(process.pid)[victim].kill()
        out, err = process.communicate(others, timeout=120)
    assert (process.returncode, out) == (1, "")
    complete, error = err.splitlines()
    name = "tokenization process 0" if victim == 2 else f"the engine process of x:{victim}"
    assert name in error
    assert "SIGKILL" in error
    assert complete.endswith("texts are complete; --resume goes on after them")
    if victim == 1:
        embed("-f", texts, *into(target), "--resume")  # with one device: the same blocks
        assert target.read_bytes() == whole.read_bytes()


def test_many_tokenization_processes_write_what_one_writes(tmp_path: Path) -> None:
    """Blocks are formatted at the same time, and the texts of a block are encoded in another order."""
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


def test_a_process_that_is_stopped_is_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = SharedBuffers.create(1)
    config = WorkerConfig(Job(), load_model(), buffers.descriptors, sys.path)
    worker = WorkerProcess("tokenization process 0", config, {})
    try:
        worker.wait_ready()
        monkeypatch.setattr("embert.server.bulk.worker._SILENCE_S", 1)
        psutil.Process(worker.pid).suspend()
        block = Block(0, 7, (RowRange("a.txt", 1, 7, "line"),), buffer=0)
        with pytest.raises(BulkError, match=r"^tokenization process 0 was ended.*a\.txt line 1 to a\.txt line 7"):
            worker.run("tokenize", block)
        worker.join()
        assert not psutil.pid_exists(worker.pid)
    finally:
        worker.kill()
        buffers.close()


@pytest.mark.parametrize(
    ("order", "value", "said"),
    [
        ("STAND_IN_CRASH_FILE", __file__, "the engine process of auto ended with status 139"),
        ("STAND_IN_LOAD", "error", "the stand-in was told not to load"),
        ("STAND_IN_LOAD", "exit", "the engine process of auto ended with status 3"),
    ],
)
def test_an_engine_that_ends(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, value: str, said: str
) -> None:
    monkeypatch.setenv(order, value)
    ended = embedded("-f", texts, *into(tmp_path / "vectors.jsonl"))
    assert ended.returncode == 1
    assert said in ended.stderr
    assert not [*tmp_path.iterdir()]


def test_ctrl_c_ends_at_once_and_can_be_resumed(texts: Path, whole: Path, tmp_path: Path) -> None:
    """Even while a forward goes on for ever: the hold file is never removed."""
    target, hold = tmp_path / "vectors.jsonl", tmp_path / "hold"
    progress = tmp_path / "vectors.jsonl.partial.json"
    with fed(texts, BLOCK + 50, into(target), {"STAND_IN_HOLD_FILE": str(hold)}) as (process, others):
        until(progress.exists, what="the first complete texts")
        hold.touch()
        assert process.stdin is not None
        process.stdin.write(others)
        process.stdin.flush()
        children = processes(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.endswith("texts are complete; --resume goes on after them\n")
    _, alive = psutil.wait_procs(children, 60)
    assert not alive
    embed("-f", texts, *into(target), "--resume")
    assert target.read_bytes() == whole.read_bytes()
