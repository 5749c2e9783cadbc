"""The engine process's threads, over its real socket, with an encoder that can be held and made to fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine import Model, PackedBatch, Task
from embert.engine.errors import EncoderError, EncoderLost
from embert.server.config import ServeConfig
from embert.server.ipc.control import StartEngine
from embert.server.ipc.messages import EMBED, TOKENS, EncodeRequest, Part, Submit, decode_results, encode
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.worker.loop import EngineLoop
from tests.server.wire import Wire

WIDTH = 4
FAILS, NOT_FINITE, LOST = 1001, 1002, 1003  # token ids that make a forward go wrong
BUDGET = 64


class Clock:
    """Time that passes only while the loop sleeps; `wake` cleared, it sleeps until it is set."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.slept_s: list[float] = []
        self.asleep, self.wake = threading.Event(), threading.Event()
        self.wake.set()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.asleep.set()
        assert self.wake.wait(60)
        self.now += seconds


class Recorder:
    """Vectors are [sum of ids, length, first id, 1]; remembers its batches, and waits to be let go."""

    name, device, device_name, dtype, choice = "recorder", "cuda:0", "a test", "float32", "asked for"
    width = hidden_size = WIDTH
    max_batch_tokens = BUDGET

    def __init__(self) -> None:
        self.batches: list[PackedBatch] = []
        self.let_go = threading.Semaphore(0)
        self.free = True
        self.entered = threading.Semaphore(0)

    def submit(self, batch: PackedBatch, task: Task = Task.EMBED) -> tuple[PackedBatch, Task]:
        self.batches.append(batch)
        return batch, task

    def wait(self, ticket: tuple[PackedBatch, Task]) -> npt.NDArray[np.float32]:
        batch, task = ticket
        self.entered.release()
        if not self.free:
            assert self.let_go.acquire(timeout=60)
        if LOST in batch.ids:
            raise EncoderLost("the device is gone")
        if FAILS in batch.ids:
            raise EncoderError("a kernel failed")
        if task is Task.TOKENS:
            return np.repeat(batch.ids[:, None], WIDTH, axis=1).astype(np.float32)
        rows = [
            _vector(batch.ids[start:stop].tolist())
            for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
        ]
        return np.array(rows, np.float32).reshape(-1, WIDTH)

    def encode(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        return self.wait((batch, task))

    def close(self) -> None:
        pass


def _vector(ids: Sequence[int]) -> list[float]:
    return [np.nan if NOT_FINITE in ids else float(sum(ids)), float(len(ids)), float(ids[0]), 1.0]


class Harness:
    """An engine process in threads, and an API process's socket."""

    def __init__(self, folder: Path) -> None:
        self.encoder = Recorder()
        self.exits: list[int] = []
        self.counters = SharedCounters.create(1, 1)
        start = StartEngine(ServeConfig(), "", "m", str(folder), 0, "cpu", f"{folder}/engine", self.counters.fd, 1)
        model = cast("Model", SimpleNamespace(model_id="m"))
        self.loop = EngineLoop(start, model, self.encoder, exit_process=self.exits.append)
        self.loop.listen()
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        self.wire = Wire.connect(start.endpoint)
        self._ids = 0

    def send(
        self, *requests: list[list[int]], task: int = EMBED, cancelled: Sequence[int] = (), **how: Any
    ) -> list[int]:
        """Send these requests, each a list of token lists, in one message; returns their ids."""
        messages = [self._request(texts, task, **how) for texts in requests]
        self.wire.send(encode(Submit(messages, list(cancelled))))
        return [message.id for message in messages]

    def _request(
        self,
        texts: list[list[int]],
        task: int,
        dimensions: int = 0,
        normalize: bool = True,
        patience_s: float = 60.0,
        alone: bool = False,
    ) -> EncodeRequest:
        self._ids += 1
        ids = np.array([token for text in texts for token in text], np.int32)
        lengths = np.array([len(text) for text in texts], np.int32)
        now = time.monotonic()
        return EncodeRequest(
            self._ids,
            task,
            ids.tobytes(),
            lengths.tobytes(),
            dimensions,
            normalize,
            now + patience_s,
            now,
            alone=alone,
        )

    def receive(self, texts: int) -> dict[int, list[Part]]:
        """Parts by request, until they answer this many texts (an error answers one)."""
        parts: dict[int, list[Part]] = {}
        deadline = time.monotonic() + 60
        while texts > 0:
            message = self.wire.next(deadline - time.monotonic())
            assert message is not None, f"{texts} texts without an answer after 60 s"
            for part in decode_results(message).parts:
                parts.setdefault(part.id, []).append(part)
                texts -= 1 if part.error else part.texts
        return parts

    def hold(self) -> None:
        """Make the next forwards wait for `release`."""
        self.encoder.free = False

    def wait_until_running(self) -> None:
        assert self.encoder.entered.acquire(timeout=60)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def release(self, forwards: int = 1) -> None:
        for _ in range(forwards):
            self.encoder.let_go.release()

    def queued(self) -> int:
        return self.loop._queue.texts()

    def close(self) -> None:
        self.encoder.free = True
        self.release(100)
        self.loop._queue.drain()
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        if not self.exits:
            self.loop.close()
        self.wire.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def rows(part: Part) -> list[list[float]]:
    return np.frombuffer(part.vectors, np.float32).reshape(-1, WIDTH).tolist()


def test_vectors_go_to_the_texts_they_belong_to(engine: Harness) -> None:
    texts = [[[index, index + 1], [index] * (1 + index % 5)] for index in range(1, 9)]
    ids = engine.send(*texts)
    parts = engine.receive(16)
    for id_, request in zip(ids, texts, strict=True):
        found = {part.first_text: rows(part) for part in parts[id_]}
        assert [row for first in sorted(found) for row in found[first]] == [_vector(text) for text in request]


def test_an_idle_encoder_waits_for_nobody_and_a_busy_one_gathers(engine: Harness) -> None:
    """Late binding: the first text runs alone at once; all that come while it runs go together afterwards."""
    engine.hold()
    engine.send([[1, 2]])
    engine.wait_until_running()
    for index in range(5):
        engine.send([[10 + index] * 3])
    engine.wait_until(lambda: engine.queued() == 5)
    assert len(engine.encoder.batches) == 1  # not full, so nothing was taken ahead
    engine.release(2)
    engine.receive(6)
    assert [batch.sequences for batch in engine.encoder.batches] == [1, 5]


def test_a_full_batch_is_handed_over_while_another_runs(engine: Harness) -> None:
    engine.hold()
    engine.send([[1] * BUDGET], [[2] * BUDGET], [[3] * BUDGET])
    engine.wait_until_running()
    engine.wait_until(lambda: len(engine.encoder.batches) == 2)
    engine.release(3)
    engine.receive(3)
    assert [batch.tokens for batch in engine.encoder.batches] == [BUDGET] * 3


def test_the_encoder_works_on_while_answers_are_made(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over = []  # batches, each time one is answered
    answer = engine.loop._responder.answer

    def counted(*arguments: Any) -> None:
        handed_over.append(len(engine.encoder.batches))
        answer(*arguments)

    monkeypatch.setattr(engine.loop._responder, "answer", counted)
    engine.hold()
    engine.send([[1, 2]])
    engine.wait_until_running()
    engine.send([[3]])
    engine.wait_until(lambda: engine.queued() == 1)
    engine.release(2)
    engine.receive(2)
    assert handed_over == [2, 2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The loop's clock."""
    made = Clock()
    monkeypatch.setattr("embert.server.worker.loop.time", made)
    return made


def test_the_next_batch_is_handed_over_shortly_before_the_running_one_ends(engine: Harness, clock: Clock) -> None:
    engine.loop._throughput.calibrate(0.09, 0.0)
    engine.hold()
    clock.wake.clear()
    engine.send([[1, 2]])
    assert clock.asleep.wait(60)
    engine.send([[10]])
    engine.send([[11]], [[12]])
    engine.wait_until(lambda: engine.queued() == 3)
    assert len(engine.encoder.batches) == 1  # gathering until then
    clock.wake.set()
    engine.wait_until(lambda: len(engine.encoder.batches) == 2)
    assert engine.encoder.batches[1].sequences == 3
    assert 0.06 < clock.slept_s[0] < 0.0895
    engine.release(2)
    engine.receive(4)


def test_an_expectation_that_is_too_long_is_given_up(engine: Harness, clock: Clock) -> None:
    # Of a machine that was busy while the encoder warmed up, say: here a batch takes no time at all.
    engine.loop._throughput.calibrate(0.09, 0.0)
    for number in range(20):
        engine.send([[number, 2]])
        engine.receive(1)
    assert len(clock.slept_s) == 13  # then it is too short to wait for
    assert engine.loop._throughput.expected_end(clock.now, 2) - clock.now < 0.002


@pytest.mark.parametrize("batch_s", [0.0008, 0.11])
def test_batches_too_short_or_too_long_for_it_are_waited_for(engine: Harness, clock: Clock, batch_s: float) -> None:
    engine.loop._throughput.calibrate(batch_s, 0.0)
    engine.hold()
    engine.send([[1] * (BUDGET - 1)], [[3, 3]])  # not both in one batch, and neither fills one
    engine.wait_until_running()
    assert clock.slept_s == []
    assert engine.queued() == 1
    assert len(engine.encoder.batches) == 1
    engine.release(2)
    engine.receive(2)


def test_a_large_request_is_split_and_lets_a_small_one_through(engine: Harness) -> None:
    engine.hold()
    large, *_ = engine.send([[5] * 16] * 40)
    engine.wait_until_running()
    engine.wait_until(lambda: len(engine.encoder.batches) == 2)  # one runs, one full batch is ahead
    small, *_ = engine.send([[7, 7]])
    engine.wait_until(lambda: engine.queued() == 33)
    engine.release(3)
    engine.wait_until(lambda: len(engine.encoder.batches) >= 3)
    assert 7 in engine.encoder.batches[2].ids
    engine.release(20)
    parts = engine.receive(41)
    assert sum(part.texts for part in parts[large]) == 40
    assert rows(parts[small][0]) == [_vector([7, 7])]
    assert all(batch.tokens <= BUDGET for batch in engine.encoder.batches)


def test_what_a_client_no_longer_wants_is_not_run(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    gone, kept = engine.send([[2, 2]], [[3, 3]])
    engine.send(cancelled=[gone])
    engine.wait_until(lambda: engine.queued() == 1)
    engine.release(2)
    parts = engine.receive(2)
    assert gone not in parts
    assert kept in parts
    assert not any(2 in batch.ids for batch in engine.encoder.batches)


def test_a_request_past_its_deadline_is_answered_and_not_run(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    late, *_ = engine.send([[2, 2], [2, 2]], patience_s=-1.0)
    engine.wait_until(lambda: engine.queued() == 2)
    engine.release()
    parts = engine.receive(2)
    assert [part.error for part in parts[late]] == ["deadline"]
    assert not any(2 in batch.ids for batch in engine.encoder.batches)


def test_a_failing_request_fails_alone(engine: Harness) -> None:
    """The batch it was in is halved until it is alone; its neighbours get their vectors."""
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    good, bad, fine = engine.send([[2, 3]], [[4], [FAILS]], [[5], [6]])
    engine.wait_until(lambda: engine.queued() == 5)
    engine.encoder.free = True
    engine.release()
    parts = engine.receive(5)
    assert rows(parts[good][0]) == [_vector([2, 3])]
    assert rows(parts[fine][0]) == [_vector([5]), _vector([6])]
    assert [(part.error, part.message) for part in parts[bad]] == [("backend", "a kernel failed")]


def test_a_vector_that_is_not_finite_fails_its_request_alone(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    good, bad = engine.send([[2]], [[NOT_FINITE], [3]])
    engine.wait_until(lambda: engine.queued() == 3)
    engine.encoder.free = True
    engine.release()
    parts = engine.receive(3)
    assert rows(parts[good][0]) == [_vector([2])]
    assert [part.error for part in parts[bad]] == ["backend"]
    assert "not finite" in parts[bad][0].message


def test_a_lost_encoder_answers_and_ends_the_process(engine: Harness) -> None:
    bad, *_ = engine.send([[LOST]])
    parts = engine.receive(1)
    assert [part.error for part in parts[bad]] == ["backend"]
    engine.wait_until(lambda: engine.exits == [70])


def test_token_vectors_and_text_vectors_do_not_share_a_batch(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    whole, *_ = engine.send([[4, 5]])
    tokens, *_ = engine.send([[6, 7, 8], [9]], task=TOKENS)
    engine.wait_until(lambda: engine.queued() == 3)
    engine.release(3)
    parts = engine.receive(4)
    assert rows(parts[whole][0]) == [_vector([4, 5])]
    assert [row[0] for row in rows(parts[tokens][0])] == [6, 7, 8, 9]


def test_each_request_says_how_its_vectors_are_cut_and_scaled(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    cut, *_ = engine.send([[2], [3]], dimensions=2)
    engine.send([[4]], normalize=False)
    engine.wait_until(lambda: engine.queued() == 3)
    engine.release(2)
    parts = engine.receive(4)
    batch = engine.encoder.batches[1]
    assert batch.dimensions is not None
    assert batch.normalize is not None
    assert batch.dimensions.tolist() == [2, 2, 0]
    assert batch.normalize.tolist() == [True, True, False]
    assert np.frombuffer(parts[cut][0].vectors, np.float32).reshape(2, 2).tolist() == [[2, 1], [3, 1]]


def test_a_text_longer_than_the_budget_is_refused_and_not_queued(engine: Harness) -> None:
    bad, *_ = engine.send([[1] * (BUDGET + 1)])
    parts = engine.receive(1)
    assert parts[bad][0].error == "backend"
    assert engine.queued() == 0


def test_the_shared_counters_tell_what_runs_until_it_has_run(engine: Harness) -> None:
    engine.hold()
    first, second, _ = engine.send([[1] * BUDGET], [[2] * BUDGET], [[3, 3]])
    engine.wait_until_running()
    assert engine.counters.running(0) == {first, second}  # one runs, one is handed over
    engine.release()
    engine.receive(1)
    engine.wait_until(lambda: engine.counters.running(0) == {second})
    engine.release(2)
    engine.receive(2)
    assert engine.counters.running(0) == set()


def test_who_may_have_lost_an_engine_is_alone_on_the_encoder(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    suspects = engine.send([[2], [2, 2]], [[3]], alone=True)
    others = [*engine.send([[4]], [[5]]), *engine.send([[6] * BUDGET], [[7] * BUDGET])]  # full ones are handed over
    engine.wait_until(lambda: engine.queued() == 7)
    engine.release(20)
    parts = engine.receive(8)
    assert rows(parts[suspects[0]][0]) == [_vector([2]), _vector([2, 2])]
    assert set(parts) >= {*suspects, *others}
    for batch in engine.encoder.batches[1:]:
        assert set(batch.ids.tolist()) in ({2}, {3}) or not {2, 3} & set(batch.ids.tolist())
    engine.wait_until(lambda: not engine.loop._queue._running)


def test_nothing_is_handed_over_beside_who_may_have_lost_an_engine(engine: Harness) -> None:
    engine.hold()
    (suspect,) = engine.send([[2]], alone=True)
    engine.wait_until_running()
    engine.send([[6] * BUDGET], [[7] * BUDGET])
    engine.wait_until(lambda: engine.queued() == 2)
    assert engine.counters.running(0) == {suspect}
    engine.release(3)
    engine.receive(3)
    assert [batch.tokens for batch in engine.encoder.batches] == [1, BUDGET, BUDGET]


def test_a_suspect_whose_client_leaves_is_not_run(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    suspects = engine.send([[2]], [[3]], [[4]], alone=True)
    engine.wait_until(lambda: engine.queued() == 3)
    engine.release()
    engine.wait_until_running()  # the first of them
    engine.send(cancelled=suspects[1:2])
    engine.wait_until(lambda: len(engine.loop._queue._disconnected) == 1)
    engine.release(2)
    assert set(engine.receive(3)) == {1, suspects[0], suspects[2]}
    assert not any(3 in batch.ids for batch in engine.encoder.batches)
    engine.wait_until(lambda: not engine.loop._queue._running and not engine.loop._queue._disconnected)


def test_what_was_with_others_on_a_lost_encoder_is_left_to_be_sent_again(engine: Harness) -> None:
    engine.hold()
    engine.send([[1]])
    engine.wait_until_running()
    together = engine.send([[LOST]], [[2]])
    engine.wait_until(lambda: engine.queued() == 2)
    engine.release(2)
    engine.wait_until(lambda: engine.exits == [70])
    assert engine.counters.running(0) == set(together)


@pytest.mark.parametrize("token", [1, FAILS, NOT_FINITE])
def test_clients_that_leave_running_requests_leave_nothing_behind(engine: Harness, token: int) -> None:
    """However their batch ends."""
    engine.hold()
    for _ in range(3):
        left = engine.send([[token]])
        engine.wait_until_running()
        engine.send(cancelled=left)
        engine.wait_until(lambda: len(engine.loop._queue._disconnected) == 1)
        engine.release()
        engine.receive(1)
        engine.wait_until(lambda: not engine.loop._queue._running and not engine.loop._queue._disconnected)
