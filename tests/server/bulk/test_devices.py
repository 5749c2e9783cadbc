"""Several devices, an engine process each: the same output as of one, and what happens when a process is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.server.bulk.running import embed, embedded, started
from tests.server.live import until

LINES = 20_000
TWO = ("--device", "x:0,1")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("".join(f"text {number}\n" for number in range(LINES)))
    return path


@pytest.fixture(scope="module")
def whole(texts: Path) -> Path:
    """What one engine makes of them."""
    path = texts.with_name("whole.jsonl")
    embed("--dimensions", "8", "-f", texts, "-o", path)
    return path


def into(texts: Path, target: Path) -> list[str]:
    return ["--dimensions", "8", "-f", str(texts), "-o", str(target)]


def processes(pid: int) -> list[psutil.Process]:
    """The run's children: engine processes first, as they are started."""
    return sorted(psutil.Process(pid).children(), key=lambda child: child.create_time())


def test_two_devices_write_what_one_writes(texts: Path, whole: Path, tmp_path: Path) -> None:
    embed(*into(texts, tmp_path / "two.jsonl"), *TWO, "--tokenization-workers", "2")
    assert (tmp_path / "two.jsonl").read_bytes() == whole.read_bytes()


def test_both_devices_work(texts: Path, tmp_path: Path) -> None:
    """While no forward ends, each of the two has its blocks: both have taken CPU time for them."""
    hold = tmp_path / "hold"
    hold.touch()
    with started([*into(texts, tmp_path / "two.jsonl"), *TWO], {"STAND_IN_HOLD_FILE": str(hold)}) as process:
        until(lambda: len(processes(process.pid)) == 3, what="three processes")
        engines = processes(process.pid)[:2]

        def mapped(engine: psutil.Process) -> int:
            """Slots that the engine has looked into."""
            return sum("memfd:embert-bulk" in each.path for each in engine.memory_maps(grouped=False))

        until(lambda: all(mapped(engine) for engine in engines), what="a block at each engine")
        hold.unlink()
        assert process.wait(120) == 0
    assert len((tmp_path / "two.jsonl").read_text().splitlines()) == LINES


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["first engine", "second engine", "tokenization process"])
def test_a_lost_process_ends_the_run_which_can_be_resumed(
    texts: Path, whole: Path, tmp_path: Path, victim: int
) -> None:
    target = tmp_path / "vectors.jsonl"
    progress = tmp_path / "vectors.jsonl.partial.json"
    with started([*into(texts, target), *TWO], {"STAND_IN_TOKENS_PER_S": "50000"}) as process:
        until(progress.exists, 120, what="the first complete texts")
        processes(process.pid)[victim].kill()
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    complete, error = err.splitlines()
    name = "tokenization process 0" if victim == 2 else f"the engine process of x:{victim}"
    assert error == f"embert: error: {name} was killed by SIGKILL; perhaps memory ran out"
    assert complete.endswith("texts are complete; --resume goes on after them")
    embed(*into(texts, target), "--resume")  # with one device: the same blocks
    assert target.read_bytes() == whole.read_bytes()


def test_an_engine_that_dies_by_itself(texts: Path, tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.touch()
    with started(into(texts, tmp_path / "vectors.jsonl"), {"STAND_IN_CRASH_FILE": str(crash)}) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err == "embert: error: the engine process of auto ended with status 139\n"
    assert [path.name for path in tmp_path.iterdir()] == ["crash"]


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("error", "the stand-in was told not to load"),
        ("memory", "not enough memory for sentence-transformers/all-MiniLM-L6-v2"),
        ("missing", "internal error in the engine of auto: FileNotFoundError: weights vanished"),
        ("exit", "the engine process of auto ended with status 3"),
    ],
)
def test_an_engine_that_does_not_load(texts: Path, tmp_path: Path, order: str, said: str) -> None:
    with started(into(texts, tmp_path / "vectors.jsonl"), {"STAND_IN_LOAD": order}) as process:
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, f"embert: error: {said}\n")
    assert not [*tmp_path.iterdir()]


def test_ctrl_c_ends_at_once_and_can_be_resumed(texts: Path, whole: Path, tmp_path: Path) -> None:
    """Even while a forward goes on for ever: the hold file is never removed."""
    target, hold = tmp_path / "vectors.jsonl", tmp_path / "hold"
    progress = tmp_path / "vectors.jsonl.partial.json"
    slow = {"STAND_IN_TOKENS_PER_S": "100000", "STAND_IN_HOLD_FILE": str(hold)}
    with started([*into(texts, target), *TWO], slow) as process:
        until(progress.exists, 120, what="the first complete texts")
        hold.touch()
        children = processes(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.endswith("texts are complete; --resume goes on after them\n")
    _, alive = psutil.wait_procs(children, 60)
    assert not alive
    embed(*into(texts, target), "--resume")
    assert target.read_bytes() == whole.read_bytes()


def test_a_device_that_is_none(texts: Path) -> None:
    ended = embedded("-f", texts, "--tokenization-workers", "-1")
    assert (ended.returncode, ended.stderr) == (
        2,
        "embert: error: --tokenization-workers must be at least 0; it is -1\n",
    )
