"""Two models on one device: batches of one model each, the time shared equally, and neither waits for the other's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.engine_worker.harness import Harness, Recorder, rows, vector_of


class TwoModels(Harness):
    """A third one is the server's, too, and not loaded here."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, models=3)
        self.second = self.add(1, Recorder())


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoModels]:
    harness = TwoModels(tmp_path)
    yield harness
    harness.close()


def test_an_unknown_model_is_an_error_of_its_request(two: TwoModels) -> None:
    (lost,) = two.send([[1, 2]], model=2)
    (part,) = two.receive(1)[lost]
    assert part.error == "backend"
    assert "not loaded on this engine" in part.message
    (well,) = two.send([[1, 2]])
    assert rows(two.receive(1)[well][0]) == [vector_of([1, 2])]


def test_a_deadline_counts_the_work_of_both(two: TwoModels) -> None:
    """The other model's work counts up to this one's: the two share the device."""
    for model in (two.model, two.second):
        model.throughput.calibrate(0.0, 1.0)  # a token a second
    two.occupy()
    two.send([[3] * 20], [[4] * 20], model=1)
    two.wait_until(lambda: two.queued() == 2)
    # Its 10 tokens, and as long for the other model's: 20 s.
    (early,) = two.send([[5] * 10], patience_s=15.0)
    assert two.receive(1)[early][0].error == "cannot_meet_deadline"
    (enough,) = two.send([[5] * 10], patience_s=25.0)
    two.encoder.free = True
    two.release(10)
    assert not two.receive(4)[enough][0].error


def test_an_idle_engine_probes_each_of_its_models(two: TwoModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embert.server.engine_worker.loop.PROBE_INTERVAL_S", 0.001)
    two.loop._server.wake()
    encoders = [two.encoder, two.second.encoder]
    two.wait_until(lambda: all(isinstance(each, Recorder) and len(each.batches) >= 2 for each in encoders))
