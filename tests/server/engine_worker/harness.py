"""An engine process in threads, over its real socket, with an encoder that can be held and made to fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from embert.engine import Encoder, Model, PackedBatch, Task, TaskOutput
from embert.engine.batch import cumulative
from embert.engine.errors import EncoderError, EncoderLost
from embert.server.config import ModelConfig, ServeConfig
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.loop import EngineLoop
from embert.server.ipc.channel import EncodeRequest, PartialResult, Submit, decode_results, encode
from embert.server.ipc.control import StartEngine
from embert.server.ipc.shared_counters import SharedCounters
from tests.server.live import until
from tests.server.wire import Wire, parts_of

WIDTH = 4
FAILS, NOT_FINITE, LOST = 1001, 1002, 1003  # token ids that make a forward go wrong
BUDGET = 64
TASKS = Task.EMBED | Task.TOKENS | Task.CLASSIFY


class Clock:
    """Time that passes only while the loop sleeps; `wake` cleared, it sleeps until it is set."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.slept_s: list[float] = []
        self.asleep, self.wake = threading.Event(), threading.Event()
        self.wake.set()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.asleep.set()
        assert self.wake.wait(60)
        self.now += seconds


class Recorder(Encoder):
    """Vectors are [sum of ids, length, first id, 1]. Stores its batches, and can wait in a forward."""

    name, device, device_name, dtype, choice = "recorder", "cuda:0", "a test", "float32", "asked for"
    width = hidden_size = WIDTH
    max_batch_tokens = BUDGET

    def __init__(self) -> None:
        self.batches: list[PackedBatch] = []
        self.let_go = threading.Semaphore(0)
        self.free = True
        self.entered = threading.Semaphore(0)

    def submit(self, batch: PackedBatch) -> PackedBatch:
        self.batches.append(batch)
        return batch

    def wait(self, ticket: PackedBatch) -> dict[Task, TaskOutput]:
        batch = ticket
        self.entered.release()
        if not self.free:
            assert self.let_go.acquire(timeout=60)
        if LOST in batch.ids:
            raise EncoderLost("the device is gone")
        if FAILS in batch.ids:
            raise EncoderError("a kernel failed")
        texts = np.split(batch.ids, batch.cu_seqlens[1:-1])
        response: dict[Task, TaskOutput] = {}
        for task in batch.wanted:
            of_task = [texts[index] for index in batch.sequences_of(task)]
            if task == Task.EMBED:
                rows = [vector_of(text.tolist()) for text in of_task]
                response[task] = TaskOutput.one_each(np.array(rows, np.float32).reshape(-1, WIDTH))
            elif task == Task.CLASSIFY:
                response[task] = TaskOutput.one_each(self._logits(batch))
            else:
                offsets = cumulative(np.array([len(text) for text in of_task], np.int32))
                response[task] = TaskOutput(
                    np.repeat(np.concatenate(of_task)[:, None], WIDTH, 1).astype(np.float32), offsets
                )
        return response

    def _logits(self, batch: PackedBatch) -> npt.NDArray[np.float32]:
        """Two labels: the sum of ids, and of token types times ids."""
        types = np.zeros_like(batch.ids) if batch.token_types is None else batch.token_types
        sums = [np.add.reduceat(values, batch.cu_seqlens[:-1]) for values in (batch.ids, batch.ids * types)]
        logits: npt.NDArray[np.float32] = np.stack(sums, axis=1)[batch.sequences_of(Task.CLASSIFY)].astype(np.float32)
        return logits

    def close(self) -> None:
        pass


def vector_of(ids: Sequence[int]) -> list[float]:
    return [np.nan if NOT_FINITE in ids else float(sum(ids)), float(len(ids)), float(ids[0]), 1.0]


class Harness:
    """An engine process in threads, and an HTTP process's socket."""

    def __init__(self, folder: Path, models: int = 1) -> None:
        self.encoder = Recorder()
        self.exits: list[int] = []
        self.counters = SharedCounters.create(1, 1, models)
        config = ServeConfig(workers=1)  # as many as have a place in the counters
        names = [f"m{number}" for number in range(models)]
        start = StartEngine(config, [], False, names, -1, 0, "cpu", f"{folder}/engine", self.counters.fd, 1)
        self.loop = EngineLoop(start, exit_process=self.exits.append)
        self.model = self.add(0, self.encoder)
        self.loop.listen()
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()
        self.wire = Wire.connect(start.endpoint)
        self._ids = 0

    def add(self, number: int, encoder: Encoder) -> LoadedModel:
        """Another model, of the same tasks."""
        name = f"m{number}"
        model = cast("Model", SimpleNamespace(model_id=name, max_input_length=BUDGET, tasks=TASKS))
        loaded = LoadedModel(number, name, ModelConfig(), model, encoder)
        self.loop.add(loaded)
        return loaded

    def send(
        self, *requests: list[list[int]], task: Task = Task.EMBED, cancelled: Sequence[int] = (), **how: Any
    ) -> list[int]:
        """Send these requests, each a list of token lists, in one message; returns their ids."""
        messages = [self._request(texts, task, **how) for texts in requests]
        self.wire.send(encode(Submit(messages, list(cancelled))))
        return [message.id for message in messages]

    def _request(
        self,
        texts: list[list[int]],
        task: int,
        dimensions: int = 0,
        normalize: bool = True,
        patience_s: float = 60.0,
        isolated: bool = False,
        token_types: Sequence[Sequence[int]] = (),
        model: int = 0,
        low_priority: bool = False,
        prompt_tokens: int = 0,
    ) -> EncodeRequest:
        self._ids += 1
        ids = np.array([token for text in texts for token in text], np.int32)
        lengths = np.array([len(text) for text in texts], np.int32)
        now = time.monotonic()
        return EncodeRequest(
            self._ids,
            task,
            ids.tobytes(),
            lengths.tobytes(),
            np.array([each for types in token_types for each in types], np.int32).tobytes(),
            dimensions,
            normalize,
            now + patience_s,
            now,
            low_priority,
            isolated,
            model=model,
            prompt_tokens=prompt_tokens,
        )

    def receive(self, texts: int) -> dict[int, list[PartialResult]]:
        """Results by request, until there are this many texts (an error counts as one)."""
        parts: dict[int, list[PartialResult]] = {}
        deadline = time.monotonic() + 200
        while texts > 0:
            message = self.wire.next(deadline - time.monotonic())
            assert message is not None, f"{texts} texts without a response after 200 s"
            for part in parts_of(decode_results(message)):
                parts.setdefault(part.id, []).append(part)
                texts -= 1 if part.error else part.texts
        return parts

    def hold(self) -> None:
        """Make the next forwards wait for `release`."""
        self.encoder.free = False

    def occupy(self) -> None:
        """Run a batch of one text, and hold it and all others until they are released."""
        self.hold()
        self.send([[1]])
        self.wait_until_running()

    def wait_until_running(self) -> None:
        assert self.encoder.entered.acquire(timeout=60)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until(condition)

    def release(self, encode_batches: int = 1) -> None:
        for _ in range(encode_batches):
            self.encoder.let_go.release()

    def queued(self) -> int:
        return self.loop._queue.texts()

    def close(self) -> None:
        self.encoder.free = True
        self.release(100)
        self.loop._queue.drain()
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        if not self.exits:
            self.loop.close()
        self.wire.close()


def rows(part: PartialResult) -> list[list[float]]:
    return np.frombuffer(part.rows[0].values, np.float32).reshape(-1, WIDTH).tolist()
