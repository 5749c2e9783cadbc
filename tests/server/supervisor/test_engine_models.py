"""A model that ends the process does not take the others along."""

from __future__ import annotations

from embert.server.ipc.control import ModelInfo
from embert.server.supervisor.engine_models import (
    FORGIVEN_AFTER_S,
    FORWARD_LOSSES_MAX,
    LOAD_LOSSES_MAX,
    QUARANTINE_MAX_S,
    QUARANTINE_S,
    EngineModels,
)

INFO = ModelInfo("torch", "cpu", "a test", "float32", "", 2048, 384, 384, 1.0, 0.001, 0.01)
KILLED = "was killed by SIGSEGV"


def start(models: EngineModels, *breaks: int) -> list[int]:
    """A start of the process that ends with the models in `breaks`, if it loads them; what it loaded, in order."""
    numbers, one_by_one = models.begin()
    if not one_by_one:
        for number in numbers:
            models.loads(number, "reading")
    loaded: list[int] = []
    for number in numbers:
        models.loads(number, "reading")
        if number in breaks:
            models.lost(KILLED, 0.0)
            return loaded
        models.ready(number, INFO)
        loaded.append(number)
    return loaded


def test_a_model_that_ends_the_process_is_found_and_left_out() -> None:
    models = EngineModels([0, 1, 2])
    starts = 0
    while models.states[1].state != "failed":
        start(models, 1)
        starts += 1
        assert starts <= LOAD_LOSSES_MAX + 2
    assert models.states[0].state == models.states[2].state == "ready"
    assert models.states[1].state == "failed"
    assert models.states[1].detail == f"the engine process {KILLED} while it loaded this model, {LOAD_LOSSES_MAX} times"
    assert models.settled
    assert not models.all_failed


def test_the_models_that_were_never_at_fault_load_first() -> None:
    models = EngineModels([0, 1, 2])
    start(models, 0)
    assert start(models, 0) == []  # one by one, in their order: it is known now
    assert start(models, 0) == [1, 2]


def test_the_only_model_is_tried_for_ever() -> None:
    models = EngineModels([4])
    for _ in range(10 * LOAD_LOSSES_MAX):
        assert start(models, 4) == []
    assert models.begin() == ([4], False)


def test_a_loss_when_all_had_loaded_is_nobodys_fault() -> None:
    models = EngineModels([0, 1])
    for _ in range(10):
        assert start(models) == [0, 1]
        models.lost(KILLED, 0.0)
    assert models.begin() == ([0, 1], False)


def test_a_model_that_fails_with_a_reason_is_tried_again_by_the_next_start() -> None:
    models = EngineModels([0, 1])
    models.begin()
    models.loads(0, "reading")
    models.failed(0, "no weights")
    models.ready(1, INFO)
    assert (models.states[0].state, models.states[0].detail) == ("failed", "no weights")
    assert models.settled
    models.lost(KILLED, 0.0)
    assert not models.settled
    assert models.begin() == ([0, 1], False)


def works(models: EngineModels) -> None:
    numbers, _ = models.begin()
    for number in numbers:
        models.loads(number, "reading")
        models.ready(number, INFO)


def lose(models: EngineModels, running: int, now: float) -> tuple[int, str] | None:
    works(models)
    return models.lost(KILLED, now, running)


def test_a_model_whose_forwards_end_the_process_again_and_again_is_left_out_for_a_while() -> None:
    models = EngineModels([0, 1])
    quarantined = [lose(models, 1, now) for now in range(FORWARD_LOSSES_MAX)]
    assert quarantined[:-1] == [None] * (FORWARD_LOSSES_MAX - 1)
    assert quarantined[-1] is not None
    assert quarantined[-1][0] == 1
    works(models)
    assert models.states[0].state == "ready"
    assert models.states[1].state == "failed"
    assert "quarantined for 60 s" in models.states[1].detail
    until = FORWARD_LOSSES_MAX - 1 + QUARANTINE_S
    assert models.due(until - 0.1) == []
    assert models.due(until) == [1]
    assert models.due(until) == []
    assert not models.settled


def test_one_more_loss_after_its_return_leaves_it_out_for_twice_as_long() -> None:
    models, now, seen = EngineModels([0, 1]), 0.0, []
    for _ in range(FORWARD_LOSSES_MAX - 1):
        assert lose(models, 1, now) is None
    for _ in range(9):
        assert lose(models, 1, now) is not None
        quarantine_s = next(step for step in (60, 120, 240, 480, 960, 1920, 3600) if models.due(now + step) == [1])
        seen.append(quarantine_s)
        now += quarantine_s
    assert seen == [60, 120, 240, 480, 960, 1920, QUARANTINE_MAX_S, QUARANTINE_MAX_S, QUARANTINE_MAX_S]


def test_losses_long_ago_are_forgiven() -> None:
    models = EngineModels([0, 1])
    for number in range(20):
        assert lose(models, 1, number * (FORGIVEN_AFTER_S + QUARANTINE_S + 1)) is None


def test_the_only_model_is_never_left_out_for_its_forwards() -> None:
    models = EngineModels([7])
    assert all(lose(models, 7, now) is None for now in range(50))


def test_the_last_model_that_works_stays_whatever_it_does() -> None:
    models = EngineModels([0, 1])
    for now in range(FORWARD_LOSSES_MAX):
        lose(models, 0, now)
    assert all(lose(models, 1, now) is None for now in range(50))


def lose_in_doubt(models: EngineModels, running: int, loading: int, now: float) -> tuple[int, str] | None:
    """A start of the process that ends while it runs one model and loads another one."""
    models.begin()
    models.loads(running, "reading")
    models.ready(running, INFO)
    models.loads(loading, "reading")
    return models.lost(KILLED, now, running)


def test_a_model_that_loads_while_another_one_ends_the_process_comes_back() -> None:
    """The model at fault is quarantined in the end, and the innocent one is loaded again."""
    models = EngineModels([0, 1, 2])
    lost = [lose_in_doubt(models, 1, 0, float(now)) for now in range(LOAD_LOSSES_MAX)]
    assert lost[:-1] == [None] * (LOAD_LOSSES_MAX - 1)
    assert lost[-1] == (
        0,
        f"the engine process {KILLED} while it loaded this model, {LOAD_LOSSES_MAX} times, "
        f"once or more while it ran another one; quarantined for 60 s",
    )
    now = float(LOAD_LOSSES_MAX)
    while (quarantined := lose_in_doubt(models, 1, 2, now)) is None:
        now += 1
        assert now < LOAD_LOSSES_MAX + FORWARD_LOSSES_MAX
    assert quarantined[0] == 1
    assert models.begin()[0] == [2]
    assert models.due(now + QUARANTINE_S) == [0, 1]
    models.loads(0, "reading")
    models.ready(0, INFO)
    assert models.states[0].state == "ready"


def test_what_loads_for_too_long_counts_as_failed_until_it_is_ready() -> None:
    models = EngineModels([0, 1])
    models.begin()
    models.ready(0, INFO)
    assert models.late("not ready 600 s after its start") == [1]
    assert models.settled
    assert models.states[1].detail == "not ready 600 s after its start"
    models.ready(1, INFO)
    assert models.states[1].state == "ready"
