"""Fair share in virtual time: the number of slices of a request, and waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from embert.engine import load_model
from embert.engine.models.flops import TokenCounts
from embert.server.engine_worker.batches import LEAD_SHARE
from embert.server.engine_worker.work_queue import WorkQueue
from tests.server.engine_worker.virtual import BATCH_TOKENS, Speed, VirtualEngine

MINILM = Speed(device_s=0.0009, submit_s=0.00035, responses_s=0.0004, slice_s=20e-6)


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(percent / 100 * len(values)))]


@pytest.mark.parametrize(("clients", "low_priority"), [(16, ()), (256, ()), (256, ("m",))])
def test_requests_of_32_passages_run_in_at_most_three_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: int, low_priority: tuple[str, ...]
) -> None:
    """The real loop before a simulated GPU: each piece is a slice of a batch, and a message to an HTTP process."""
    engine = VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}, low_priority=low_priority)
    run = engine.run(floods={"m": clients}, short=("m", 200), seconds=0.3)
    assert len(run.pieces["m"]) > clients
    assert max(run.pieces["m"]) <= 3
    assert sum(run.pieces["m"]) <= 1.4 * len(run.pieces["m"])
    assert percentile([*map(float, run.slices)], 50) <= 8  # as many requests as a batch holds, and short ones
    # A short text waits for the batch that runs and the one that was submitted ahead.
    assert max(run.waited_s["short"]) <= 4 * MINILM.device_s + 0.001


def test_throughput_does_not_fall_as_load_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [
        VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}).run(floods={"m": clients}, seconds=0.3).tokens_per_s["m"]
        for clients in (32, 64, 256)
    ]
    assert min(rates) >= 0.98 * max(rates)


def test_short_texts_do_not_lower_the_rate_that_bounds_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one short text take their fixed time, a hundred times as long for each token."""
    engine = VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}, slower=1.2)
    engine.run(floods={}, short=("m", 300), seconds=2.0)
    (rate,) = engine.rates()
    assert rate == pytest.approx(BATCH_TOKENS / MINILM.device_s, rel=0.25)


def test_a_short_text_waits_for_the_long_one_that_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a stream of the longest texts. In a batch's last part, LEAD_SHARE, the next one is submitted already."""
    engine = VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}, long_text=32_768)
    (counted,) = TokenCounts(load_model().config).of([32_768])
    long_s = MINILM.of(counted)
    run = engine.run(floods={"m": 8}, short=("m", 50), seconds=4.0)
    assert len(run.waited_s["short"]) > 100
    assert max(run.waited_s["short"]) <= (1 + LEAD_SHARE) * long_s + 0.003
    assert len(run.waited_s["m"]) >= 0.9 * 4.0 / long_s


@pytest.mark.parametrize(("clients", "slower"), [(16, 1.0), (64, 0.8), (64, 1.25)])
def test_a_short_text_waits_for_no_batch_that_is_bound_early(
    clients: int, slower: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[float, float]:
        speed = Speed(device_s=0.0052, submit_s=0.0003, responses_s=0.0008)
        engine = VirtualEngine(tmp_path, monkeypatch, {"base": speed}, slower=slower)
        found = engine.run(floods={"base": clients}, short=("base", 100.0), seconds=1.0)
        return found.tokens_per_s["base"], percentile(found.waited_s["short"], 50)

    rate, waited_s = run()
    monkeypatch.setattr(WorkQueue, "expects_short", lambda _: False)
    early_rate, early_waited_s = run()
    assert waited_s < 0.9 * early_waited_s
    assert rate > 0.99 * early_rate
