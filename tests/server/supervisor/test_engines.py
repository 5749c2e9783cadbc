"""Several engines: `--device x:0,1` starts two, which on this machine are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from embert.engine.encoders import devices as module
from embert.engine.encoders.devices import devices
from tests.server.crowd import right, use_both_engines
from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.stand_in import HELD


@pytest.mark.parametrize(
    ("device", "encoder", "gpus", "wanted"),
    [
        ("auto", "auto", 0, ["auto"]),
        ("auto", "auto", 1, ["auto"]),  # it may still turn out that the model cannot run there
        ("auto", "auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", "torch", 3, ["auto"]),
        ("auto", "cuda", 2, ["cuda:0", "cuda:1"]),
        ("cpu", "auto", 3, ["cpu"]),
        ("cuda", "auto", 0, ["cuda"]),  # the engine says why not
        ("cuda", "auto", 1, ["cuda:0"]),
        ("cuda", "auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", "auto", 3, ["cuda:1"]),
        ("cuda:0,2", "auto", 3, ["cuda:0", "cuda:2"]),
    ],
)
def test_what_a_device_means(
    monkeypatch: pytest.MonkeyPatch, device: str, encoder: str, gpus: int, wanted: list[str]
) -> None:
    monkeypatch.setattr(module, "gpu_memory", lambda: [80 << 30] * gpus)
    assert devices(device, encoder) == wanted


def test_a_driver_that_hangs_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(subprocess, "run", hang)
    assert devices("auto") == ["auto"]
    assert devices("cuda") == ["cuda"]


def test_the_working_folder_is_no_place_for_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("print(7)\nprint(7)\nraise SystemExit\n")  # two GPUs, it would be
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert devices("auto") == ["auto"]


@pytest.mark.parametrize(
    ("counting", "auto", "cuda"),
    [
        ("pass", ["auto"], ["cuda"]),
        ("print(85520809984)", ["auto"], ["cuda:0"]),
        ("print(85520809984); print(0)", ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        ("print(0); print(0); raise SystemExit(1)", ["auto"], ["cuda"]),  # died of the driver
    ],
)
def test_gpus_are_counted_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, counting: str, auto: list[str], cuda: list[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(module, "_ASK", counting)
    assert devices("auto") == auto
    assert devices("cuda") == cuda


def test_gpus_that_are_hidden_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the real count, with the CUDA extension or without."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked: list[subprocess.CompletedProcess[str]] = []
    run = subprocess.run

    def noting(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(run(*arguments, **options))
        return asked[-1]

    monkeypatch.setattr(subprocess, "run", noting)
    assert devices("auto") == ["auto"]
    assert devices("cuda") == ["cuda"]
    assert [(each.returncode, each.stdout, each.stderr) for each in asked] == [(0, "", "")] * 2


@pytest.fixture(scope="module")
def two() -> Iterator[Live]:
    options = ("--device", "x:0,1", "--max-batch-tokens", "256", "--max-queue-seconds", "0")
    with live(*STAND_IN, *options, env={"STAND_IN_S": "0.02", **PATIENT}) as server:
        use_both_engines(server)
        yield server


def batches(server: Live) -> list[float]:
    metrics = server.metrics()
    return [metrics[f'embert_batches_total{{engine="{index}"}}'] for index in range(2)]


def test_each_has_a_process_and_the_queue_is_as_long_as_they_are_many(two: Live) -> None:
    assert len(two.engine_pids) == 2
    assert two.get("/info").json()["max_queue_tokens"] == 2 * 256 * 256
    assert two.metrics()["embert_queue_limit_tokens"] == 2 * 256 * 256


def test_work_goes_to_the_engine_with_less_of_it(two: Live) -> None:
    before = batches(two)
    with ThreadPoolExecutor(8) as pool:
        with two.held():
            busy = pool.submit(two.post, "/embed", {"inputs": [[101, HELD, 102], *[[7] * 200] * 5]})
            until(
                lambda: two.metrics()["embert_admitted_tokens"] == 1003, what="the request that keeps one engine busy"
            )
            assert all(
                pool.map(lambda number: right(two, [101, 1000 + number, 102]), range(20))
            )  # nobody waits for that one
        assert busy.result().status_code == 200

    def fewest() -> float:
        return min(after - earlier for after, earlier in zip(batches(two), before, strict=True))

    until(lambda: fewest() >= 3, what="batches of both engines in the metrics, which follow the responses")


def test_one_of_them_may_die(two: Live) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(right, two, [101, 1000 + number, 102]) for number in range(200)]
        until(lambda: sum(future.done() for future in asked) > 20, what="the first responses")
        os.kill(two.engine_pids[0], signal.SIGKILL)
        # What it owed went to the other one.
        assert all(future.result() for future in asked)
    assert two.get("/readyz").status_code == 200
    until(lambda: [two.metrics()[f'embert_engine_up{{engine="{i}"}}'] for i in range(2)] == [1, 1])


def test_an_http_process_that_starts_again_has_the_budget_of_all_engines(two: Live) -> None:
    (pid,) = two.http_pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: two.http_pids not in ([], [pid]), what="another HTTP process")
    two.wait_ready()
    assert two.get("/info").json()["max_queue_tokens"] == 2 * 256 * 256
