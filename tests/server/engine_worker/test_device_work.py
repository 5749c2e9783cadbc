"""The device loop in virtual time: rates of several models, and waits.

`small` takes the device less time than its responses take the host, as MiniLM-L6 does on an H100; `large` is BERT-base.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.engine_worker.virtual import Run, Speed, VirtualEngine

SPEEDS = {
    "small": Speed(device_s=0.0009, submit_s=0.00035, responses_s=0.001),
    "large": Speed(device_s=0.0057, submit_s=0.00045, responses_s=0.0014),
    "asked": Speed(device_s=0.0009, submit_s=0.0002, responses_s=0.0005),
}
LARGE_S = SPEEDS["large"].device_s

Simulate = Callable[..., Run]


@pytest.fixture
def simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """One run of a new engine."""

    def run(
        *floods: str,
        asked: tuple[str, float] | None = None,
        seconds: float = 1.5,
        side_by_side: bool = False,
        slower: float = 1.0,
        low_priority: tuple[str, ...] = (),
    ) -> Run:
        engine = VirtualEngine(
            tmp_path, monkeypatch, SPEEDS, side_by_side=side_by_side, slower=slower, low_priority=low_priority
        )
        return engine.run(floods=dict.fromkeys(floods, 48), asked=asked, seconds=seconds)

    return run


@pytest.mark.parametrize(("slower", "side_by_side"), [(0.8, False), (1.3, True)])
def test_two_models_together_are_as_fast_as_one(simulate: Simulate, side_by_side: bool, slower: float) -> None:
    single = {
        name: simulate(name, side_by_side=side_by_side, slower=slower).tokens_per_s[name] for name in ("small", "large")
    }
    both = simulate("small", "large", side_by_side=side_by_side, slower=slower)
    shares = {name: both.tokens_per_s[name] / single[name] for name in single}
    assert sum(shares.values()) >= 1.0
    assert min(shares.values()) >= 0.35
    busy_s = {name: both.busy_s[name] for name in single}
    assert max(busy_s.values()) <= 0.52 * sum(busy_s.values())


@pytest.mark.parametrize(("slower", "side_by_side"), [(0.8, False), (1.3, True)])
def test_an_interactive_request_waits_for_hardly_more_than_one_batch_of_low_priority(
    simulate: Simulate, side_by_side: bool, slower: float
) -> None:
    """The one that runs; or the next one, if that was submitted a moment ago."""
    own_s = max(simulate(asked=("asked", 20)).waited_s["asked"])
    run = simulate("large", asked=("asked", 50), low_priority=("large",), side_by_side=side_by_side, slower=slower)
    assert len(run.waited_s["asked"]) >= 60
    assert max(run.waited_s["asked"]) <= 1.75 * LARGE_S * slower + own_s
    assert run.tokens_per_s["large"] * LARGE_S * slower / 16384 >= 0.94


@pytest.mark.parametrize("low_priority", [(), ("large",)])
def test_the_device_is_never_idle_under_a_flood(simulate: Simulate, low_priority: tuple[str, ...]) -> None:
    run = simulate("large", low_priority=low_priority)
    assert run.tokens_per_s["large"] * LARGE_S / 16384 >= 0.98
