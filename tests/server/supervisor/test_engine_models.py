"""What the supervisor knows of an engine's models: a model that ends the process does not take the others along."""

from __future__ import annotations

from embert.server.ipc.control import ModelInfo
from embert.server.supervisor.engine_models import LOSSES_MAX, EngineModels

INFO = ModelInfo("torch", "cpu", "a test", "float32", "", 2048, 384, 384, 1.0, 0.001, 0.01)
KILLED = "was killed by SIGSEGV"


def start(models: EngineModels, *breaks: int) -> list[int]:
    """A start of the process that ends with the models in `breaks`, if it loads them; what it loaded, in order."""
    numbers, one_by_one = models.begin()
    if not one_by_one:
        for number in numbers:
            models.loads(number)
    loaded: list[int] = []
    for number in numbers:
        models.loads(number)
        if number in breaks:
            models.lost(KILLED)
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
        assert starts <= LOSSES_MAX + 2
    assert models.states[0].state == models.states[2].state == "ready"
    assert models.states[1].state == "failed"
    assert models.states[1].detail == f"the engine process {KILLED} while it loaded this model, {LOSSES_MAX} times"
    assert models.settled
    assert not models.hopeless


def test_the_models_that_were_never_at_fault_load_first() -> None:
    models = EngineModels([0, 1, 2])
    start(models, 0)
    assert start(models, 0) == []  # one by one, in their order: it is known now
    assert start(models, 0) == [1, 2]


def test_the_only_model_is_tried_for_ever() -> None:
    models = EngineModels([4])
    for _ in range(10 * LOSSES_MAX):
        assert start(models, 4) == []
    assert models.begin() == ([4], False)


def test_a_loss_when_all_had_loaded_is_nobodys_fault() -> None:
    models = EngineModels([0, 1])
    for _ in range(10):
        assert start(models) == [0, 1]
        models.lost(KILLED)
    assert models.begin() == ([0, 1], False)


def test_a_model_that_fails_with_a_reason_is_tried_again_by_the_next_start() -> None:
    models = EngineModels([0, 1])
    models.begin()
    models.loads(0)
    models.failed(0, "no weights")
    models.ready(1, INFO)
    assert (models.states[0].state, models.states[0].detail) == ("failed", "no weights")
    assert models.settled
    models.lost(KILLED)
    assert not models.settled
    assert models.begin() == ([0, 1], False)
