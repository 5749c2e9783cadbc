"""Forwards that fail and encoders that are lost: only the request at fault gets an error."""

from __future__ import annotations

from tests.server.engine_worker.harness import BUDGET, LOST, Harness, rows, vector_of


def test_a_lost_encoder_fails_its_request_and_ends_the_process(engine: Harness) -> None:
    bad, *_ = engine.send([[LOST]])
    parts = engine.receive(1)
    assert [part.error for part in parts[bad]] == ["backend"]
    engine.wait_until(lambda: engine.exits == [70])


def test_the_shared_counters_hold_what_runs(engine: Harness) -> None:
    engine.hold()
    first, second, _ = engine.send([[1] * BUDGET], [[2] * BUDGET], [[3] * 9])
    engine.wait_until(lambda: engine.counters.running(0) == {first, second})  # one runs, one is handed over
    engine.release()
    engine.receive(1)
    engine.wait_until(lambda: engine.counters.running(0) == {second})
    engine.release(2)
    engine.receive(2)
    assert engine.counters.running(0) == set()


def test_isolated_requests_run_by_themselves(engine: Harness) -> None:
    engine.occupy()
    isolated = engine.send([[2], [2, 2]], [[3]], isolated=True)
    others = [*engine.send([[4]], [[5]]), *engine.send([[6] * BUDGET], [[7] * BUDGET])]  # full ones are handed over
    engine.wait_until(lambda: engine.queued() == 7)
    engine.release(20)
    parts = engine.receive(8)
    assert rows(parts[isolated[0]][0]) == [vector_of([2]), vector_of([2, 2])]
    assert set(parts) >= {*isolated, *others}
    for batch in engine.encoder.batches[1:]:
        assert set(batch.ids.tolist()) in ({2}, {3}) or not {2, 3} & set(batch.ids.tolist())
    engine.wait_until(lambda: not engine.loop._queue._running)


def test_nothing_is_submitted_next_to_an_isolated_request(engine: Harness) -> None:
    engine.hold()
    (isolated,) = engine.send([[2]], isolated=True)
    engine.wait_until_running()
    engine.send([[6] * BUDGET], [[7] * BUDGET])
    engine.wait_until(lambda: engine.queued() == 2)
    assert engine.counters.running(0) == {isolated}
    engine.release(3)
    engine.receive(3)
    assert [batch.tokens for batch in engine.encoder.batches] == [1, BUDGET, BUDGET]


def test_an_isolated_request_whose_client_leaves_is_not_run(engine: Harness) -> None:
    engine.occupy()
    isolated = engine.send([[2]], [[3]], [[4]], isolated=True)
    engine.wait_until(lambda: engine.queued() == 3)
    engine.release()
    engine.wait_until_running()  # the first of them
    engine.send(cancelled=isolated[1:2])
    engine.wait_until(lambda: len(engine.loop._queue._disconnected) == 1)
    engine.release(2)
    assert set(engine.receive(3)) == {1, isolated[0], isolated[2]}
    assert not any(3 in batch.ids for batch in engine.encoder.batches)
    engine.wait_until(lambda: not engine.loop._queue._running and not engine.loop._queue._disconnected)


def test_a_batch_of_several_requests_on_a_lost_encoder_is_left_to_be_sent_again(engine: Harness) -> None:
    engine.occupy()
    together = engine.send([[LOST]], [[2]])
    engine.wait_until(lambda: engine.queued() == 2)
    engine.release(2)
    engine.wait_until(lambda: engine.exits == [70])
    assert engine.counters.running(0) == set(together)
