"""After how many seconds a forward counts as hung, and an outage as final."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from embert.server.config import ServeConfig
from embert.server.ipc.control import ModelInfo
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.supervisor.child import Child
from embert.server.supervisor.hangs import GIVE_UP_AFTER_S, HangDetector, Outages

INFO = ModelInfo("torch", "cpu", "a test", "float32", "", 2048, 384, 384, 1.0, 0.001, 0.01)


@pytest.mark.parametrize(
    ("bound_s", "full_batch_s", "longest_text_s", "limit_s"),
    [
        (None, 0.001, 0.01, 5),  # a GPU
        (None, 0.2, 1.0, 20),
        (None, 2.0, 9.0, 30),
        (None, 2.0, 60.0, 180),  # a few cores, and texts of thousands of tokens
        (None, 0.5, 60.0, 180),
        (12.0, 2.0, 60.0, 12),
        (12.0, 0.001, 0.01, 5),
    ],
)
def test_the_limit(bound_s: float | None, full_batch_s: float, longest_text_s: float, limit_s: float) -> None:
    engine = Child("engine", 0)
    info = msgspec.structs.replace(INFO, full_batch_s=full_batch_s, longest_text_s=longest_text_s)
    HangDetector(ServeConfig(engine_timeout=bound_s), cast("Any", None)).add_limit(engine, info)
    assert engine.hang_limit_s == limit_s


def test_of_several_models_the_slowest_sets_the_limit() -> None:
    engine, hangs = Child("engine", 0), HangDetector(ServeConfig(), cast("Any", None))
    for full_batch_s in (0.001, 0.2, 0.01):
        hangs.add_limit(engine, msgspec.structs.replace(INFO, full_batch_s=full_batch_s))
    assert engine.hang_limit_s == 20


def test_a_drain_is_not_a_hang() -> None:
    """However long the server has run, and though an engine that frees its memory shows no sign of life."""
    config, counters = ServeConfig(start_timeout=16.0), SharedCounters.create(1, 1)
    engine, hangs = Child("engine", 0, started=1000.0, ready=True), HangDetector(config, counters)
    counters.engine_alive[0] = 2000.0
    assert hangs.reason(engine, 2001.0) is None
    assert "no sign of life" in str(hangs.reason(engine, 2100.0))
    engine.draining = True
    assert hangs.reason(engine, 2100.0) is None
    engine.draining = engine.ready = False
    assert "--start-timeout" in str(hangs.reason(engine, 2100.0))


@pytest.mark.parametrize(
    ("slowest_start_s", "limit_s"), [(0.0, 600.0), (2.0, GIVE_UP_AFTER_S), (200.0, 400.0)], ids=["none yet", "2", "200"]
)
def test_an_outage_may_last_as_long_as_a_start_takes(slowest_start_s: float, limit_s: float) -> None:
    engines = [Child("engine", index, slowest_start_s=slowest_start_s) for index in range(2)]
    outages = Outages(start_timeout_s=600.0)
    assert outages.exceeded_s("engine", engines, 1e9) is None
    outages.note_loss(engines[0], engines)
    outages.restart_clocks(1000.0)
    assert outages.exceeded_s("engine", engines, 1000.0 + limit_s) is None
    assert outages.exceeded_s("engine", engines, 1001.0 + limit_s) == limit_s + 1
    engines[1].ready = True
    assert outages.exceeded_s("engine", engines, 1001.0 + limit_s) is None


def test_the_pause_before_a_start_doubles() -> None:
    child = Child("engine", 0)
    assert [child.start_later() for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
