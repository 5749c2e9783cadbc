"""The device loop: batches bound late, results to the right requests, nothing run for clients that left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embert.engine import Task, TaskOutput
from embert.server.engine_worker import batches
from embert.server.engine_worker.batches import Responder
from embert.server.engine_worker.lanes import Request
from embert.server.ipc.channel import EncodeRequest, PartialResult
from tests.server.engine_worker.harness import BUDGET, FAILS, NOT_FINITE, Harness, rows, vector_of


def test_an_idle_encoder_runs_at_once_and_a_busy_one_gathers(engine: Harness) -> None:
    """Late binding: the first text runs by itself at once; all that come while it runs go together afterwards."""
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
    assert rows(parts[small][0]) == [vector_of([7, 7])]
    assert all(batch.tokens <= BUDGET for batch in engine.encoder.batches)


def test_token_vectors_and_text_vectors_share_a_batch(engine: Harness) -> None:
    engine.occupy()
    whole, *_ = engine.send([[4, 5]])
    tokens, *_ = engine.send([[6, 7, 8], [9]], task=Task.TOKENS)
    both, *_ = engine.send([[2, 3]], task=Task.TOKENS | Task.EMBED)
    engine.wait_until(lambda: engine.queued() == 4)
    engine.release(2)
    parts = engine.receive(5)
    assert engine.encoder.batches[-1].sequences == 4
    assert rows(parts[whole][0]) == [vector_of([4, 5])]
    assert [row[0] for row in rows(parts[tokens][0])] == [6, 7, 8, 9]
    assert {each.task for each in parts[both][0].rows} == {Task.EMBED, Task.TOKENS}
    assert [np.frombuffer(each.values, np.float32).tolist()[0] for each in parts[both][0].rows] == [5, 2]


def test_pairs_and_texts_share_a_batch_and_keep_their_token_types(engine: Harness) -> None:
    engine.occupy()
    pairs, *_ = engine.send([[6, 7, 8], [9, 5]], task=Task.CLASSIFY, token_types=[[0, 1, 1], [0, 1]])
    texts, *_ = engine.send([[2, 3]])
    single, *_ = engine.send([[4, 4]], task=Task.CLASSIFY)
    engine.wait_until(lambda: engine.queued() == 4)
    engine.release(2)
    parts = engine.receive(5)
    shared = engine.encoder.batches[-1]
    assert shared.sequences == 4
    assert shared.token_types is not None
    assert shared.token_types.sum() == 3
    logits = [np.frombuffer(parts[each][0].rows[0].values, np.float32).tolist() for each in (pairs, single)]
    assert logits == [[21.0, 15.0, 14.0, 5.0], [8.0, 0.0]]
    assert rows(parts[texts][0]) == [vector_of([2, 3])]


def test_options_are_those_of_each_request(engine: Harness) -> None:
    engine.occupy()
    cut, *_ = engine.send([[2], [3]], dimensions=2, prompt_tokens=1)
    engine.send([[4]], normalize=False)
    engine.wait_until(lambda: engine.queued() == 3)
    engine.release(2)
    parts = engine.receive(4)
    batch = engine.encoder.batches[1]
    assert batch.dimensions is not None
    assert batch.normalize is not None
    assert batch.prompt_tokens is not None
    assert engine.encoder.batches[0].prompt_tokens is None
    assert batch.prompt_tokens.tolist() == [1, 1, 0]
    assert batch.dimensions.tolist() == [2, 2, 0]
    assert batch.normalize.tolist() == [True, True, False]
    assert np.frombuffer(parts[cut][0].rows[0].values, np.float32).reshape(2, 2).tolist() == [[2, 1], [3, 1]]


def test_a_text_longer_than_the_budget_is_refused_and_not_queued(engine: Harness) -> None:
    bad, *_ = engine.send([[1] * (BUDGET + 1)])
    parts = engine.receive(1)
    assert parts[bad][0].error == "backend"
    assert engine.queued() == 0


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


def test_messages_are_small_and_weights_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_MESSAGE_ROW_BYTES", 100)
    sent: list[list[PartialResult]] = []
    dropped: list[Any] = []
    responder = Responder(lambda _, parts: sent.append(parts), dropped.append)
    messages = [EncodeRequest(id_, Task.SPARSE, b"", b"", b"", 0, True, 60.0, 0.0) for id_ in range(4)]
    slices = [Request(message.id, [1], channel="x", message=message).piece(0, 1) for message in messages]
    counts = np.array([0, 20, 30, 80, 90], np.int32)  # prefix sums: the third text has 50 weights
    rows = TaskOutput(np.ones((90, 1), np.float32), counts, np.arange(90, dtype=np.int32))
    responder.send_rows(slices, {Task.SPARSE: rows}, 1.0, 2.0, most_weights=40)
    assert [[(part.id, part.error, part.weights) for part in parts] for parts in sent] == [
        [(0, "", 0), (1, "", 0)],
        [(2, "weights", 50), (3, "", 0)],
    ]
    assert dropped == [2]
