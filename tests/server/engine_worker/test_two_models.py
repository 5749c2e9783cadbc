"""Two models on one device: batches of one model each, the time shared equally, and neither waits for the other's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from embert.engine import PackedBatch, Task, TaskOutput
from tests.server.engine_worker.harness import FAILS, Harness, Recorder, rows, vector_of


class Doubled(Recorder):
    """Another model: its vectors are twice the other's."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def submit(self, batch: PackedBatch) -> PackedBatch:
        self.order.append("second")
        return super().submit(batch)

    def wait(self, ticket: PackedBatch) -> dict[Task, TaskOutput]:
        response = super().wait(ticket)
        return {task: TaskOutput(2 * each.values, each.offsets) for task, each in response.items()}


class TwoModels(Harness):
    """A third one is the server's, too, and not loaded here."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, models=3)
        self.order: list[str] = []  # of the batches
        submit = self.encoder.submit

        def noted(batch: PackedBatch) -> PackedBatch:
            self.order.append("first")
            return submit(batch)

        self.encoder.submit = noted  # type: ignore[method-assign]
        self.second = self.add(1, Doubled(self.order))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoModels]:
    harness = TwoModels(tmp_path)
    yield harness
    harness.close()


def test_each_request_runs_on_its_model(two: TwoModels) -> None:
    texts = [[index, index + 1] for index in range(1, 9)]
    first = two.send(*[[text] for text in texts])
    second = two.send(*[[text] for text in texts], model=1)
    parts = two.receive(16)
    for text, one, other in zip(texts, first, second, strict=True):
        assert rows(parts[one][0]) == [vector_of(text)]
        assert rows(parts[other][0]) == [[2 * value for value in vector_of(text)]]


def test_a_failed_batch_of_one_model_is_run_again_in_halves_on_it(two: TwoModels) -> None:
    two.occupy()
    bad, good = two.send([[FAILS, 2]], [[7, 8]], model=1)
    two.wait_until(lambda: two.queued() == 2)
    two.release(2)
    two.encoder.free = True
    parts = two.receive(3)
    assert parts[bad][0].error == "backend"
    assert rows(parts[good][0]) == [[2 * value for value in vector_of([7, 8])]]


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
    # 10 tokens of its own, and as long for the other model's: 20 s.
    (early,) = two.send([[5] * 10], patience_s=15.0)
    assert two.receive(1)[early][0].error == "cannot_meet_deadline"
    (enough,) = two.send([[5] * 10], patience_s=25.0)
    two.encoder.free = True
    two.release(10)
    assert not two.receive(4)[enough][0].error


def test_an_idle_engine_probes_each_of_its_models(two: TwoModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embert.server.engine_worker.loop.PROBE_INTERVAL_S", 0.001)
    two.loop._server.wake()
    two.wait_until(lambda: len(two.order) >= 4)
    assert two.order[:2].count("first") == two.order[2:4].count("first") == 1
