"""The next batch is submitted while the last one runs: a full one at once, any other shortly before its end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.engine_worker.harness import BUDGET, FAILS, Clock, Harness


def test_the_next_batch_is_submitted_shortly_before_the_running_one_ends(engine: Harness, clock: Clock) -> None:
    engine.model.throughput.calibrate(0.09, 0.0)
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
    engine.model.throughput.calibrate(0.09, 0.0)
    for number in range(20):
        engine.send([[number, 2]])
        engine.receive(1)
    assert 10 <= len(clock.slept_s) <= 13  # then it is too short to wait for
    assert engine.model.throughput.expected_s(2) < 0.002


@pytest.mark.parametrize("batch_s", [0.0008, 0.11])
def test_batches_too_short_or_too_long_for_it_are_waited_for(engine: Harness, clock: Clock, batch_s: float) -> None:
    engine.model.throughput.calibrate(batch_s, 0.0)
    engine.hold()
    engine.send([[1] * (BUDGET - 1)], [[3, 3]])  # not both in one batch, and neither fills one
    engine.wait_until_running()
    assert clock.slept_s == []
    assert engine.queued() == 1
    assert len(engine.encoder.batches) == 1
    engine.release(2)
    engine.receive(2)


def test_the_encoder_never_holds_more_than_two_batches(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    held = most = 0
    submit, wait = engine.encoder.submit, engine.encoder.wait

    def submitted(batch: Any) -> Any:
        nonlocal held, most
        held += 1
        most = max(most, held)
        return submit(batch)

    def waited(ticket: Any) -> Any:
        nonlocal held
        try:
            return wait(ticket)
        finally:
            held -= 1

    monkeypatch.setattr(engine.encoder, "submit", submitted)
    monkeypatch.setattr(engine.encoder, "wait", waited)
    engine.hold()
    half = BUDGET // 2
    sent = [[[number] * half] for number in range(1, 21)]
    for failing in (4, 5, 12):
        sent[failing] = [[FAILS] * half]
    engine.send(*sent)
    engine.release(100)
    parts = engine.receive(20)
    assert sum(bool(each[0].error) for each in parts.values()) == 3
    assert (held, most) == (0, 2)


@pytest.mark.parametrize("with_interactive", [False, True])
def test_full_batches_of_low_priority_wait_only_while_interactive_requests_come(
    engine: Harness, clock: Clock, monkeypatch: pytest.MonkeyPatch, with_interactive: bool
) -> None:
    engine.model.throughput.calibrate(0.0, 0.009)
    if with_interactive:
        monkeypatch.setattr("embert.server.engine_worker.work_queue.INTERACTIVE_MEMORY_S", 600.0)
        engine.send([[1, 1]])
        engine.receive(1)
    before = len(engine.encoder.batches)
    engine.hold()
    engine.send(*[[[number] * BUDGET] for number in range(1, 4)], low_priority=True)
    engine.wait_until_running()
    if with_interactive:
        engine.wait_until(lambda: engine.queued() == 2)
        assert len(engine.encoder.batches) == before + 1
    else:
        engine.wait_until(lambda: len(engine.encoder.batches) == before + 2)
    engine.encoder.free = True
    engine.release(3)
    engine.receive(3)
