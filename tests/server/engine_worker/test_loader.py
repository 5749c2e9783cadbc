"""Models load side by side, but for what a GPU does for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from embert.server.engine_worker import process
from embert.server.engine_worker.process import Loader, LoadProgress
from embert.server.ipc.control import ModelFailed, ModelReady, Progress


class Encoders:
    """Each load waits, in `load_encoder`, until it is let go."""

    device = "cpu"

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.changed = threading.Condition()
        self.free = False

    def load(self, model: int, **_: Any) -> SimpleNamespace:
        with self.changed:
            self.begun.append(model)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.free)
        return SimpleNamespace()


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 2), ("auto", 2), ("x:0", 2), ("cuda:0", 1)])
def test_loads_on_a_gpu_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, device: str, at_once: int) -> None:
    encoders = Encoders()
    both_read, ended, ready = threading.Semaphore(0), threading.Event(), []
    config = SimpleNamespace(pooling=None, dtype="auto", max_batch_tokens=None, encoder="auto", min_agreement=0.0)

    def receive(message: Any) -> None:
        if isinstance(message, Progress) and message.doing == "reading the model":
            both_read.release()
        elif isinstance(message, ModelReady):
            ready.append(message.model)
        assert not isinstance(message, ModelFailed), message

    def loaded(number: int, *_: Any) -> Any:
        return SimpleNamespace(number=number, warm_up=lambda: None, info=lambda _: None, encoder=encoders)

    monkeypatch.setattr(process, "load_model", lambda folder, **_: folder)
    monkeypatch.setattr(process, "load_encoder", encoders.load)
    monkeypatch.setattr(process, "LoadedModel", loaded)
    monkeypatch.setattr("embert.server.observability.gc_tuning.after_startup", ended.set)
    control: Any = SimpleNamespace(send=receive)
    loop: Any = SimpleNamespace(add=lambda _: None)
    made = Loader(device, control, loop)
    models: Any = [SimpleNamespace(number=n, folder=n, name="", model_id="", config=config) for n in range(2)]
    made.start(models)
    for _ in models:
        both_read.acquire()
    with encoders.changed:
        assert encoders.changed.wait_for(lambda: len(encoders.begun) >= at_once, 60)
        if at_once == 1:
            assert not encoders.changed.wait_for(lambda: len(encoders.begun) > 1, 0.2)
        encoders.free = True
        encoders.changed.notify_all()
    assert ended.wait(60)
    assert sorted(ready) == [0, 1]


def test_progress_is_reported_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = 100.0, list[str]()
    monkeypatch.setattr("embert.server.engine_worker.process.time", SimpleNamespace(monotonic=lambda: now))
    progress = LoadProgress(steps.append)
    for gigabytes in range(15):
        now += 0.4
        progress(gigabytes * 10**9, 15_200_000_000)
    assert steps == [f"loading the weights, {gigabytes}.0 of 15.2 GB" for gigabytes in (2, 5, 8, 11, 14)]
