"""Processes killed, lost and broken for real: every client gets a response in bounded time; the process comes back."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from embert.server.ipc.channel import EncodeRequest, Submit, encode
from tests.server.connections import connection_counts
from tests.server.crowd import PATIENCE_S, Crowd, post, right, use_both_engines
from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.models import copy_model
from tests.server.stand_in import CRASH, HELD, HUNGRY, LOSE, expected
from tests.server.wire import Wire


@pytest.fixture(scope="module")
def _healing() -> Iterator[Live]:
    with live(*STAND_IN, env={"STAND_IN_S": "0.005", **PATIENT}, clean_log=False) as server:
        yield server


@pytest.fixture(scope="module")
def pair() -> Iterator[Live]:
    options = ("--device", "x:0,1", "--max-batch-tokens", "256", "--max-queue-seconds", "0")
    with live(*STAND_IN, *options, env={"STAND_IN_S": "0.02", **PATIENT}) as server:
        use_both_engines(server)
        yield server


@pytest.fixture
def healing(_healing: Live) -> Live:
    """A server whose processes tests may kill: it is ready again when the next test has it."""
    _healing.wait_ready()
    return _healing


def test_a_killed_engine_comes_back_and_every_request_gets_a_response(healing: Live) -> None:
    server = healing
    before = server.metrics()['embert_engine_restarts_total{engine="0"}']
    with Crowd(server) as crowd:
        crowd.wait_for(50)
        for _ in range(2):
            server.kill_engine()
            server.wait_ready()
            crowd.wait_for(50)
    assert set(crowd.responses) <= {"200", "503"}, crowd.responses
    metrics = server.metrics()
    assert metrics['embert_engine_restarts_total{engine="0"}'] == before + 2
    assert metrics['embert_engine_up{engine="0"}'] == 1
    assert server.get("/health").status_code == 200


def test_what_a_lost_engine_owed_is_sent_once_more(healing: Live) -> None:
    server = healing
    responses: list[httpx.Response] = []
    slow = [101, HELD, 102]
    with server.held() as runs:
        threads = [post(server, [slow], responses)]
        until(runs.exists, what="the first")
        threads.append(post(server, [[101, 5000, 102]] * 3, responses))  # waits until the first is done
        until(lambda: server.metrics()["embert_queue_tokens"] == 9, what="the second")
        os.kill(server.engine_pids[0], signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [response.status_code for response in responses] == [200, 200]
    by_size = sorted((np.array(response.json()) for response in responses), key=len)
    np.testing.assert_allclose(by_size[0], [expected(slow)], atol=1e-5)
    np.testing.assert_allclose(by_size[1], [expected([101, 5000, 102])] * 3, atol=1e-5)


def test_want_of_memory_fails_the_request_and_not_the_engine(healing: Live) -> None:
    server = healing
    pids = server.engine_pids
    with ThreadPoolExecutor(8) as pool:
        with server.held() as runs:  # so that the others share a batch
            blocking = pool.submit(right, server, [101, HELD, 102])
            until(runs.exists, what="the blocking request")
            hungry = pool.submit(server.post, "/embed", {"inputs": [[101, HUNGRY, 102]]})
            others = [pool.submit(right, server, [101, 1000 + number, 102]) for number in range(5)]
            until(lambda: server.metrics()["embert_admitted_tokens"] == 21, what="the others")
        assert hungry.result().status_code == 424
        assert "not enough memory" in hungry.result().json()["error"]
        assert blocking.result()
        assert all(other.result() for other in others)
    assert server.engine_pids == pids


def test_every_process_dumps_its_stacks_and_goes_on(healing: Live) -> None:
    server = healing
    pids = server.pids
    for number, pid in enumerate(pids, 1):
        before = server.log.count("most recent call first")
        os.kill(pid, signal.SIGUSR1)
        until(lambda before=before: server.log.count("most recent call first") > before, what=f"stacks {number}")  # type: ignore[misc]
    assert server.pids == pids
    assert right(server)


def test_a_lost_thread_ends_the_engine_process(healing: Live) -> None:
    """A process that cannot receive would look alive: here, a request that no HTTP process can have sent."""
    server = healing
    (pid,) = server.engine_pids
    stranger = Wire.connect(server.engine_endpoint)
    request = EncodeRequest(1, 1, b"half", b"\1\0\0", b"", 0, True, 1e9, 0.0)
    stranger.send(encode(Submit([request], [])))
    until(lambda: server.engine_pids not in ([], [pid]), what="another engine process")
    stranger.close()
    until(lambda: right(server), what="a response")
    assert "internal error" in server.log


# --- two engines ---


def test_each_has_a_process_and_a_budget_also_after_a_restart_of_the_http_process(pair: Live) -> None:
    assert len(pair.engine_pids) == 2
    budget, (pid,) = 2 * 256 * 256, pair.http_pids
    assert pair.get("/info").json()["max_queue_tokens"] == pair.metrics()["embert_queue_limit_tokens"] == budget
    os.kill(pid, signal.SIGKILL)
    until(lambda: pair.http_pids not in ([], [pid]), what="another HTTP process")
    pair.wait_ready()
    assert pair.get("/info").json()["max_queue_tokens"] == budget


def batches(server: Live) -> list[float]:
    metrics = server.metrics()
    return [metrics[f'embert_batches_total{{engine="{index}"}}'] for index in range(2)]


def test_work_goes_to_the_engine_with_less_of_it(pair: Live) -> None:
    before = batches(pair)
    with ThreadPoolExecutor(8) as pool:
        with pair.held():
            busy = pool.submit(pair.post, "/embed", {"inputs": [[101, HELD, 102], *[[7] * 200] * 5]})
            until(lambda: pair.metrics()["embert_admitted_tokens"] == 1003, what="the request of one engine")
            # Nobody waits for that one.
            assert all(pool.map(lambda number: right(pair, [101, 1000 + number, 102]), range(20)))
        assert busy.result().status_code == 200

    def fewest() -> float:
        return min(after - earlier for after, earlier in zip(batches(pair), before, strict=True))

    until(lambda: fewest() >= 3, what="batches of both engines in the metrics, which follow the responses")


@pytest.mark.parametrize("poison", [CRASH, LOSE])
def test_a_request_that_kills_engines_fails_none_of_its_neighbors(pair: Live, poison: int) -> None:
    """Two engines, both busy, so that it is in a batch with others; and with others again when those are sent again."""
    server = pair
    up = [f'embert_engine_up{{engine="{i}"}}' for i in range(2)]
    until(lambda: [server.metrics()[name] for name in up] == [1, 1], what="both engines")
    use_both_engines(server)
    responses: list[httpx.Response] = []
    killed: list[httpx.Response] = []
    with server.held():
        busy = [post(server, [[101, HELD, 102]], responses) for _ in range(2)]
        until(lambda: server.metrics()["embert_admitted_tokens"] == 6, what="both engines at work")
        threads = [post(server, [[101, poison, 102]], killed)]
        threads += [post(server, [[101, 1000 + number, 102]], responses) for number in range(12)]
        until(lambda: server.metrics()["embert_admitted_tokens"] == 6 + 3 * 13, what="all of them")
    for thread in (*busy, *threads):
        thread.join(PATIENCE_S * 2)
    assert [response.status_code for response in killed] == [424]
    assert Counter(response.status_code for response in responses) == {200: 14}


def test_a_child_that_cannot_be_started_is_tried_again(healing: Live) -> None:
    """The supervisor has no descriptors left: first for the control connection, then for the process."""
    server = healing
    supervisor = server.process.pid
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    opened = descriptors(supervisor)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (max(opened) + 1, limits[1]))
    os.kill(server.engine_pids[0], signal.SIGKILL)
    cannot = "failed to start engine-0: [Errno 24] Too many open files"
    until(lambda: cannot in server.log, what="a start that fails")
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (max(opened) + 2, limits[1]))
    until(lambda: f"{cannot}: '/dev/null'" in server.log, what="one that fails later")
    assert server.get("/livez").status_code == 200
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
    server.wait_ready()
    assert server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200
    until(lambda: descriptors(supervisor) == opened, what="the descriptors of before")


def descriptors(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


def test_a_signal_without_a_name_kills_nobody_else(healing: Live) -> None:
    healing.kill_engine(signal.SIGRTMIN + 7)
    assert f"engine-0 was killed by signal {signal.SIGRTMIN + 7}" in healing.log


def test_a_process_that_does_not_come_back_takes_no_connections(tmp_path: Path) -> None:
    """An engine is lost, too, when the first of the HTTP processes already serves, and the other perhaps not."""
    model = tmp_path / "model"
    copy_model(model)
    with live(str(model), *STAND_IN, "--workers", "2") as server:
        server.kill_engine()
        until(lambda: server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200, what="a response")
        server.wait_announced()
        tokenizer = model / "tokenizer.json"
        kept = tokenizer.rename(tmp_path / "tokenizer.json")
        os.kill(server.http_pids[0], signal.SIGKILL)
        for _ in range(30):
            assert server.get("/livez").status_code == 200
        kept.rename(tokenizer)
        until(lambda: re.search(r"http-\d is ready again", server.log), what="its return")
        until(lambda: connection_counts(server) == [0, 0], what="the end of the connections so far")
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                client = stack.enter_context(server.client())
                assert client.get("/livez").status_code == 200
            assert connection_counts(server) == [15, 15]
