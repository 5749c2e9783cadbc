"""Processes killed, hung, drained and flooded for real: clients are answered in bounded time, and it comes back."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.server.connections import send
from tests.server.live import STAND_IN, Live, live, until
from tests.server.stand_in import CRASH, FAIL, HANG, HELD, LOSE, expected

PATIENCE_S = 20.0  # no client may wait longer than this, whatever happens


@pytest.fixture(scope="module")
def _healing() -> Iterator[Live]:
    with live(*STAND_IN, env={"STAND_IN_S": "0.005"}) as server:
        yield server


@pytest.fixture(scope="module")
def pair() -> Iterator[Live]:
    """With two engines."""
    with live(*STAND_IN, "--device", "x:0,1") as server:
        yield server


@pytest.fixture(scope="module")
def narrow() -> Iterator[Live]:
    """With a queue that is soon full."""
    options = ("--max-queue-tokens", "64", "--max-batch-tokens", "256")
    with live(*STAND_IN, *options, env={"STAND_IN_S": "0.02"}) as server:
        yield server


@pytest.fixture
def healing(_healing: Live) -> Live:
    """A server whose processes tests may kill: it is ready again when the next test has it."""
    _healing.wait_ready()
    return _healing


@dataclass
class Crowd:
    """Clients that ask for known vectors without pause, and what became of their requests."""

    server: Live
    clients: int = 16
    answers: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Crowd:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S + 10)
        assert not self._thread.is_alive(), "a client hangs"
        assert self.slowest_s < PATIENCE_S
        assert self.wrong == 0

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=PATIENCE_S) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(self.clients)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            sequences = [[101, 1000 + number, 2000 + turn % 500 + text, 102] for text in range(1 + number % 4)]
            began = time.perf_counter()
            try:
                answer = await http.post("/embed", json={"inputs": sequences})
            except httpx.TransportError as error:
                self.answers[type(error).__name__] += 1
                await asyncio.sleep(0.02)
                continue
            finally:
                self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
            self.answers[str(answer.status_code)] += 1
            if answer.status_code == 200:
                wanted = np.stack([expected(ids) for ids in sequences])
                self.wrong += not np.allclose(np.array(answer.json()), wanted, atol=1e-5)
            else:
                assert answer.headers["retry-after"]
                await asyncio.sleep(0.02)

    def wait_for(self, more: int, kind: str = "200") -> None:
        """Until so many more answers of a kind have come."""
        before = self.answers[kind]
        until(lambda: self.answers[kind] >= before + more, what=f"{more} more answers {kind}")


def post(server: Live, ids: list[list[int]], into: list[httpx.Response]) -> threading.Thread:
    """Send a request from a thread of its own."""
    thread = threading.Thread(target=lambda: into.append(server.post("/embed", {"inputs": ids})))
    thread.start()
    return thread


def ask_held(server: Live, into: list[object]) -> threading.Thread:
    """Send a request that waits for `held` from a thread of its own; the server may leave before it answers."""

    def ask() -> None:
        try:
            into.append(server.post("/embed", {"inputs": [[101, HELD, 102]]}))
        except httpx.TransportError as error:
            into.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_killed_engine_comes_back_and_every_request_is_answered(healing: Live) -> None:
    server = healing
    before = server.metrics()['embert_engine_restarts_total{engine="0"}']
    with Crowd(server) as crowd:
        crowd.wait_for(50)
        for _ in range(2):
            (pid,) = server.engine_pids
            os.kill(pid, signal.SIGKILL)
            until(lambda old=pid: server.engine_pids not in ([], [old]), what="a new engine process")  # type: ignore[misc]
            server.wait_ready()
            crowd.wait_for(50)
    assert set(crowd.answers) <= {"200", "503"}, crowd.answers
    metrics = server.metrics()
    assert metrics['embert_engine_restarts_total{engine="0"}'] == before + 2
    assert metrics['embert_engine_up{engine="0"}'] == 1
    assert server.get("/health").status_code == 200


def test_an_engine_may_die_before_everybody_was_ready() -> None:
    """Several API processes take their time; the engine is lost when the first of them already serves."""
    with live(*STAND_IN, "--workers", "3") as server:
        (pid,) = server.engine_pids
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.engine_pids not in ([], [pid]), what="a new engine process")
        # Each HTTP process learns of it in its own time.
        until(lambda: server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200, what="an answer")
        until(lambda: "ready    http" in server.log, what="the announcement")


def test_what_a_lost_engine_owed_is_sent_once_more(healing: Live) -> None:
    server = healing
    answers: list[httpx.Response] = []
    slow = [101, HELD, 102]
    with server.held():
        threads = [post(server, [slow], answers)]
        until(lambda: server.metrics()["embert_admitted_tokens"] == 3, what="the first")
        threads.append(post(server, [[101, 5000, 102]] * 3, answers))  # waits until the first is done
        until(lambda: server.metrics()["embert_queue_tokens"] == 9, what="the second")
        os.kill(server.engine_pids[0], signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200, 200]
    by_size = sorted((np.array(answer.json()) for answer in answers), key=len)
    np.testing.assert_allclose(by_size[0], [expected(slow)], atol=1e-5)
    np.testing.assert_allclose(by_size[1], [expected([101, 5000, 102])] * 3, atol=1e-5)


def test_a_request_that_kills_every_engine_is_given_up_on_and_others_live(healing: Live) -> None:
    server = healing
    answer = server.post("/embed", {"inputs": [[101, CRASH, 102]]})
    assert answer.status_code == 424
    assert "lost twice" in answer.json()["error"]
    server.wait_ready()
    assert server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200


@pytest.mark.parametrize("poison", [CRASH, LOSE])
def test_a_request_that_kills_engines_fails_none_of_its_neighbours(pair: Live, poison: int) -> None:
    """Two engines, both busy, so that it is in a batch with others; and with others again when those are sent again."""
    server = pair
    up = [f'embert_engine_up{{engine="{i}"}}' for i in range(2)]
    until(lambda: [server.metrics()[name] for name in up] == [1, 1], what="both engines")
    answers: list[httpx.Response] = []
    killed: list[httpx.Response] = []
    with server.held():
        busy = [post(server, [[101, HELD, 102]], answers) for _ in range(2)]
        until(lambda: server.metrics()["embert_admitted_tokens"] == 6, what="both engines at work")
        threads = [post(server, [[101, poison, 102]], killed)]
        threads += [post(server, [[101, 1000 + number, 102]], answers) for number in range(12)]
        until(lambda: server.metrics()["embert_admitted_tokens"] == 6 + 3 * 13, what="all of them")
    for thread in (*busy, *threads):
        thread.join(PATIENCE_S * 2)
    assert [answer.status_code for answer in killed] == [424]
    assert Counter(answer.status_code for answer in answers) == {200: 14}


def test_a_lost_encoder_answers_424_and_is_replaced(healing: Live) -> None:
    server = healing
    (pid,) = server.engine_pids
    answer = server.post("/embed", {"inputs": [[101, LOSE, 102]]})
    assert answer.status_code == 424
    until(lambda: server.engine_pids not in ([], [pid]), what="a new engine process")
    server.wait_ready()
    assert server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200


def test_a_failing_request_does_not_fail_its_neighbours(healing: Live) -> None:
    with Crowd(healing) as crowd:
        crowd.wait_for(20)
        for _ in range(10):
            assert healing.post("/embed", {"inputs": [[101, FAIL, 102]]}).status_code == 424
        crowd.wait_for(20)
        assert set(crowd.answers) == {"200"}


def test_a_hanging_engine_keeps_nobody_waiting() -> None:
    with live(*STAND_IN, "--request-timeout", "1", "--drain-timeout", "1", status=None) as server:
        answer = server.post("/embed", {"inputs": [[101, HANG, 102]]})
        assert answer.status_code == 503
        assert "--request-timeout" in answer.json()["error"]
        assert server.metrics()['embert_rejected_total{reason="deadline"}'] == 1


def test_a_killed_api_process_comes_back(healing: Live) -> None:
    server = healing
    engine = server.engine_pids
    with Crowd(server) as crowd:
        crowd.wait_for(50)
        (pid,) = server.api_pids
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.api_pids not in ([], [pid]), what="a new API process")
        crowd.wait_for(50)
    assert not any(status.isdigit() and status not in ("200", "503") for status in crowd.answers), crowd.answers
    assert server.engine_pids == engine  # nobody else was disturbed
    assert server.metrics()["embert_requests_in_flight"] == 1  # the dead process's share is forgotten


def test_restarts_keep_the_totals_and_leave_no_files(healing: Live) -> None:
    server = healing
    restarts = server.metrics()["embert_api_restarts_total"]
    metrics = server.runtime_folder / "metrics"

    def samples(name: str) -> float:
        return sum(value for sample, value in server.metrics().items() if sample.startswith(name))

    def ask() -> None:
        until(lambda: server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200, what="an answer")

    def killed(pids: Callable[[], list[int]]) -> None:
        (pid,) = pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: pids() not in ([], [pid]), what="another process")
        server.wait_ready()

    ask()
    files = {path.name for path in metrics.iterdir()}
    for turn in range(1, 3):
        texts, batches = samples("embert_texts_total"), samples("embert_batches_total")
        assert batches >= turn
        killed(lambda: server.engine_pids)
        assert samples("embert_batches_total") == batches
        ask()
        assert samples("embert_batches_total") > batches
        until(lambda old=texts: samples("embert_texts_total") > old, what="its texts")  # type: ignore[misc]
        texts, sizes = samples("embert_texts_total"), samples("embert_request_texts_bucket")
        killed(lambda: server.api_pids)
        assert samples("embert_texts_total") == texts
        assert samples("embert_request_texts_bucket") == sizes
        assert {path.name for path in metrics.iterdir()} == files
    assert server.metrics()["embert_api_restarts_total"] == restarts + 2
    assert server.metrics()["embert_requests_in_flight"] == 1


def test_with_two_api_processes_one_may_die() -> None:
    with live(*STAND_IN, "--workers", "2") as server:
        os.kill(server.api_pids[0], signal.SIGKILL)
        for _ in range(20):
            assert server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200


def test_children_do_not_outlive_a_killed_supervisor() -> None:
    with live(*STAND_IN, status=-signal.SIGKILL) as server:
        children = server.api_pids + server.engine_pids
        folders = [Path(path) for path in re.findall(r"/\S*/embert-\w+", " ".join(_open_paths(server.engine_pids[0])))]
        server.signal(signal.SIGKILL)
        until(lambda: not alive(children), what="the end of the children")
        assert folders
        until(lambda: not any(folder.exists() for folder in folders), what="the end of the runtime folder")


def _open_paths(pid: int) -> list[str]:
    return [mapped.path for mapped in psutil.Process(pid).memory_maps()]


def test_sigterm_lets_requests_in_flight_finish() -> None:
    with live(*STAND_IN, "--max-queue-tokens", "100") as server:
        folder = server.runtime_folder
        answers: list[httpx.Response] = []
        with server.held(), server.client() as client:
            thread = post(server, [[101, HELD, 102]], answers)
            until(lambda: server.metrics()["embert_admitted_tokens"] == 3, what="the request in flight")
            client.get("/livez")
            server.signal(signal.SIGTERM)
            until(lambda: client.get("/readyz").json()["status"] == "draining", what="readiness to flip")
            for text in ("too late", "too many words " * 50):  # 503 even where there is no room in the queue
                refused = client.post("/embed", json={"inputs": text})
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
        thread.join(PATIENCE_S)
        assert [answer.status_code for answer in answers] == [200]
        assert server.wait() == 0
        assert not folder.exists()


def test_drain_timeout_bounds_the_wait() -> None:
    with live(*STAND_IN, "--drain-timeout", "1") as server, server.held():
        answers: list[object] = []
        thread = ask_held(server, answers)
        until(lambda: server.metrics()["embert_requests_in_flight"] >= 2, what="the request in flight")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        thread.join(PATIENCE_S)
        (answer,) = answers
        assert isinstance(answer, httpx.Response)
        assert answer.status_code == 503  # and no connection that breaks
        assert "shutting down" in answer.json()["error"]


def test_a_second_signal_ends_at_once() -> None:
    with live(*STAND_IN, status=1) as server, server.held():
        answers: list[object] = []
        thread = ask_held(server, answers)
        until(lambda: server.metrics()["embert_requests_in_flight"] >= 2, what="the request in flight")
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)  # `timeout` and shells tell one wish twice; this is no second one
        time.sleep(0.8)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loading_server_can_be_stopped(number: signal.Signals) -> None:
    with live(*STAND_IN, loading=True) as server:
        until(lambda: server.engine_pids and server.api_pids, what="the children")
        until(lambda: _answers(server, "/livez"), what="an answer")
        server.signal(number)
        assert server.wait() == 0


def _answers(server: Live, path: str) -> bool:
    try:
        return server.get(path).status_code == 200
    except httpx.TransportError:
        return False


def test_an_engine_that_never_comes_up_ends_the_server() -> None:
    with live(*STAND_IN, env={"STAND_IN_LOAD": "exit"}, ready=False, status=1) as server:
        assert server.wait() == 1
        assert "never was ready" in server.log


def test_an_engine_that_never_comes_back_ends_the_server(tmp_path: Path) -> None:
    """So that whoever watches the server, which answers `/livez` all the time, brings another one."""
    broken = tmp_path / "broken"
    env = {"STAND_IN_EXIT_FILE": str(broken)}
    with live(*STAND_IN, "--give-up-after", "1", env=env, status=1) as server, server.held():
        until(lambda: "ready    http" in server.log, what="the announcement")
        broken.touch()
        answers: list[httpx.Response] = []
        thread = post(server, [[101, HELD, 102]], answers)
        until(lambda: server.metrics()["embert_requests_in_flight"] >= 2, what="the request in flight")
        os.kill(server.engine_pids[0], signal.SIGKILL)
        assert server.wait() == 1
        assert re.search(r"no engine could work for \d+ s \(--give-up-after\): leaving", server.log)
        thread.join(PATIENCE_S)
        assert [answer.status_code for answer in answers] == [503]  # and no connection that breaks


def test_what_comes_back_in_time_is_waited_for(tmp_path: Path) -> None:
    """Never for less than twice the longest start: with the second that is asked for, no start could succeed."""
    broken = tmp_path / "broken"
    env = {"STAND_IN_EXIT_FILE": str(broken), "STAND_IN_LOAD_S": "1.5"}
    with live(*STAND_IN, "--give-up-after", "1", env=env) as server:
        (pid,) = server.engine_pids
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.engine_pids not in ([], [pid]), what="a new engine process")
        server.wait_ready()
        assert server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200


def test_a_child_that_cannot_be_started_is_tried_again(healing: Live) -> None:
    """The supervisor has no descriptors left: first for the line to the child, then for the process."""
    server = healing
    supervisor = server.process.pid
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    opened = descriptors(supervisor)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (max(opened) + 1, limits[1]))
    os.kill(server.engine_pids[0], signal.SIGKILL)
    cannot = "engine-0 cannot be started: [Errno 24] Too many open files"
    until(lambda: cannot in server.log, what="a start that fails")
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (max(opened) + 2, limits[1]))
    until(lambda: f"{cannot}: '/dev/null'" in server.log, what="one that fails later")
    assert server.get("/livez").status_code == 200
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
    server.wait_ready()
    assert server.post("/embed", {"inputs": [[101, 7, 102]]}).status_code == 200
    assert descriptors(supervisor) == opened


def descriptors(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


def test_a_signal_without_a_name_kills_nobody_else(healing: Live) -> None:
    server = healing
    (pid,) = server.engine_pids
    os.kill(pid, signal.SIGRTMIN + 7)
    until(lambda: server.engine_pids not in ([], [pid]), what="a new engine process")
    assert f"engine-0 was killed by signal {signal.SIGRTMIN + 7}" in server.log


def test_clients_that_leave_free_the_queue(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with live(*STAND_IN, "--max-batch-tokens", "256", env={"STAND_IN_HOLD_FILE": str(hold)}) as server:
        answers: list[httpx.Response] = []
        hold.touch()
        running = post(server, [[101, 7592, 102]], answers)
        until(lambda: server.metrics()["embert_admitted_tokens"] == 3, what="the request in flight")
        until(lambda: server.metrics()["embert_queue_texts"] == 0, what="its batch")
        leaving = [send(server, {"inputs": [[101, 7, 102]] * 8}) for _ in range(5)]
        until(lambda: server.metrics()["embert_queue_texts"] == 40, what="their texts in the queue")
        for sock in leaving:
            sock.close()
        cancelled = 'embert_cancelled_texts_total{stage="queued"}'
        until(lambda: server.metrics()[cancelled] == 40, what="all their texts to be dropped")
        assert server.metrics()["embert_queue_texts"] == 0
        hold.unlink()
        running.join(PATIENCE_S)
        assert [answer.status_code for answer in answers] == [200]


def test_a_flood_gets_200_or_429_and_the_queue_stays_bounded(narrow: Live) -> None:
    server = narrow
    refused = 'embert_rejected_total{reason="queue_full"}'
    before = server.metrics()[refused]
    with Crowd(server, clients=48) as crowd:
        crowd.wait_for(100)
        crowd.wait_for(50, "429")
        assert server.metrics()["embert_queue_tokens"] <= 64
        assert server.get("/health").status_code == 200
    assert set(crowd.answers) == {"200", "429"}
    metrics = server.metrics()
    assert metrics[refused] == before + crowd.answers["429"]
    assert metrics["embert_queue_tokens"] == metrics["embert_queue_texts"] == 0


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits(narrow: Live) -> None:
    server = narrow
    batches = 'embert_batches_total{engine="0"}'
    before = server.metrics()[batches]
    answer = server.post("/embed", {"inputs": [[101, index, 102] for index in range(1000, 1500)]})
    assert answer.status_code == 200
    wanted = np.stack([expected([101, index, 102]) for index in range(1000, 1500)])
    np.testing.assert_allclose(np.array(answer.json()), wanted, atol=1e-5)
    assert server.metrics()[batches] >= before + 1500 / 256


def _raw(data: bytes, *, half_close: bool = False) -> Callable[[Live], bytes]:
    def send(server: Live) -> bytes:
        with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=5) as sock:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            try:
                return sock.recv(65536)
            except (TimeoutError, ConnectionResetError):
                return b""

    return send


@pytest.mark.parametrize(
    ("data", "half_close", "starts"),
    [
        (b"\x16\x03\x01 this is TLS", False, b"HTTP/1.1 400"),
        (b"GET / HTTP/9.9\r\n\r\n", False, b"HTTP/1.1 400"),
        (b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", False, b"HTTP/1.1 400"),
        (b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{", True, b""),
        (b"", True, b""),
    ],
)
def test_bytes_that_are_not_http_hurt_nobody(server: Live, data: bytes, half_close: bool, starts: bytes) -> None:
    assert _raw(data, half_close=half_close)(server).startswith(starts)
    assert server.get("/readyz").status_code == 200


def test_idle_connections_keep_nobody_out(server: Live) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.ports[0]), timeout=5) for _ in range(300)]
    try:
        assert server.post("/embed", {"inputs": "still there?"}).status_code == 200
    finally:
        for sock in idle:
            sock.close()
