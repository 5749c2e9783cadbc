"""The device loop in virtual time: a simulated GPU, what the host's steps take, and clients that ask again and again.

Time passes only in the steps that take some. Everything is in one thread, so a run is the same each time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from embert.engine import Encoder, Model, PackedBatch, Task, TaskOutput, load_model
from embert.engine.models.flops import TokenCounts
from embert.server.config import ModelConfig, ServeConfig
from embert.server.engine_worker.lanes import Slice
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.loop import EngineLoop
from embert.server.engine_worker.scheduler import Batch
from embert.server.ipc.channel import Channel, EncodeRequest, Submit
from embert.server.ipc.control import StartEngine
from embert.server.ipc.shared_counters import SharedCounters

BATCH_TOKENS = 16384
LENGTHS = np.clip(np.random.default_rng(0).lognormal(4.5, 0.5, (64, 32)), 16, 256).astype(np.int32)  # of texts
TEXTS = 32  # of a request that is one of many


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of a full batch of a model, in seconds."""

    device_s: float
    submit_s: float  # of the host's time
    responses_s: float
    slice_s: float = 0.0  # of the host's time, for the response to each slice

    def of(self, tokens: int) -> float:
        return 0.0001 + (self.device_s - 0.0001) * tokens / BATCH_TOKENS


class Clock:
    """Stands in for the module `time`. Events happen when their time has come."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (moment, next(self._numbers), event))

    def until(self, moment: float) -> None:
        while self.events and self.events[0][0] <= moment:
            at, _, event = heapq.heappop(self.events)
            self.now = max(self.now, at)
            event()
        self.now = max(self.now, moment)


@dataclass(eq=False)
class Job:
    """A batch on the device."""

    left_s: float
    ended: float | None = None


class Device:
    """Runs the batches of a model one after the other, and those of several models likewise, or side by side."""

    def __init__(self, clock: Clock, *, side_by_side: bool) -> None:
        self._clock, self._side_by_side = clock, side_by_side
        self._streams: defaultdict[str, deque[Job]] = defaultdict(deque)
        self._now = clock.now

    def submit(self, model: str, seconds: float) -> Job:
        self._advance(self._clock.now)
        job = Job(seconds)
        self._streams[model if self._side_by_side else ""].append(job)
        return job

    def wait(self, job: Job) -> None:
        self._advance(self._clock.now)
        while job.ended is None:
            self._advance(self._now + min(each[0].left_s for each in self._streams.values() if each))
        self._clock.until(job.ended)

    def _advance(self, to: float) -> None:
        while self._now < to:
            heads = [stream[0] for stream in self._streams.values() if stream]
            passes = min([to - self._now, *(job.left_s * len(heads) for job in heads)])
            self._now += passes
            for job in heads:
                job.left_s -= passes / len(heads)
            for stream in self._streams.values():
                if stream and stream[0].left_s < 1e-12:
                    stream.popleft().ended = self._now


class Gpu(Encoder):
    """One model on the device."""

    device, device_name, dtype, choice = "cuda:0", "none", "float16", ""
    width = hidden_size = 4
    max_batch_tokens = batch_tokens = BATCH_TOKENS

    def __init__(
        self, name: str, speed: Speed, clock: Clock, device: Device, slower: float, counts: TokenCounts | None
    ) -> None:
        self.name, self.speed, self.tokens, self._in_flight = name, speed, 0, 0
        self._clock, self._device, self._slower, self._counts = clock, device, slower, counts

    def submit(self, batch: PackedBatch) -> Any:
        self._clock.sleep(self.speed.submit_s)
        self._in_flight += 1
        assert self._in_flight <= 2
        lengths = np.diff(batch.cu_seqlens).tolist()
        tokens = batch.tokens if self._counts is None else sum(self._counts.of(lengths))
        return batch, self._device.submit(self.name, self._slower * self.speed.of(tokens))

    def wait(self, ticket: Any) -> dict[Task, TaskOutput]:
        batch, job = ticket
        self._device.wait(job)
        self._in_flight -= 1
        self.tokens += batch.tokens
        return {}

    def close(self) -> None:
        pass


class HttpProcess:
    """Stands in for the channel to it."""

    def fileno(self) -> int:
        return 3


@dataclass
class Run:
    """Measurements of a run."""

    tokens_per_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    waited_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of each request
    pieces: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # slices of each finished request
    slices: list[int] = field(default_factory=list)  # of each batch


class VirtualEngine:
    """The loop, its queue and its scheduler are real."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        speeds: dict[str, Speed],
        *,
        side_by_side: bool = False,
        slower: float = 1.0,
        low_priority: tuple[str, ...] = (),
        long_text: int = 0,
    ) -> None:
        """`slower`: what batches take, as a multiple of what they are expected to.

        With `long_text` each request of a flood is one text of this many tokens; attention takes its part of the time.
        """
        self._clock, self._names, self._low_priority = Clock(), list(speeds), low_priority
        for module in ("loop", "work_queue"):
            monkeypatch.setattr(f"embert.server.engine_worker.{module}.time", self._clock)
        counters = SharedCounters.create(1, 1, len(speeds))
        config = ServeConfig(workers=1)
        start = StartEngine(config, [], False, self._names, -1, 0, "", f"{folder}/engine", counters.fd, 1)
        self._loop = EngineLoop(start)
        device = Device(self._clock, side_by_side=side_by_side)
        self._long_text, config_of_texts = long_text, load_model().config
        counts = TokenCounts(config_of_texts) if long_text else None
        self._gpus = {name: Gpu(name, speed, self._clock, device, slower, counts) for name, speed in speeds.items()}
        for number, (name, gpu) in enumerate(self._gpus.items()):
            gpu.max_batch_tokens = max(BATCH_TOKENS, long_text)
            longest = max(512, long_text)
            described = SimpleNamespace(
                model_id=name, max_input_length=longest, tasks=Task.EMBED, config=config_of_texts
            )
            model = cast("Model", described)
            loaded = LoadedModel(number, name, ModelConfig(), model, gpu)
            loaded.throughput.calibrate(gpu.speed.of(0), (gpu.speed.of(BATCH_TOKENS) - gpu.speed.of(0)) / BATCH_TOKENS)
            self._loop.add(loaded)
        monkeypatch.setattr(self._loop._responder, "send_rows", self._respond)
        monkeypatch.setattr(self._loop._queue, "wait_for_batch", self._wait_for_batch)
        self._channel = cast("Channel", HttpProcess())
        self._ids = count(1)
        self._open: dict[int, list[Any]] = {}  # texts without a response, the model, when it was sent, pieces so far
        self._floods: dict[str, float] = {}
        self._seconds = self._until = 0.0
        self._run = Run()

    def run(
        self,
        *,
        floods: dict[str, int],
        asked: tuple[str, float] | None = None,
        short: tuple[str, float] | None = None,
        seconds: float = 2.0,
    ) -> Run:
        """Run clients that send again 2 ms after a response, a number for each model, and others now and then.

        `asked`: a model without such clients, and its requests of four texts a second; `short`: any model, and requests
        of one text of 16 tokens a second, which the results call "short".
        """
        began = self._clock.now
        self._seconds, self._until = seconds, began + seconds
        self._floods = dict.fromkeys(floods, 0.002)
        for name, clients in floods.items():
            for number in range(clients):
                self._clock.at(began + 1e-4 * number, lambda name=name: self._send(name, TEXTS))  # type: ignore[misc]
        for each, texts in ((asked, 4), (short, 1)):
            if each is not None:
                name, rate = each
                gaps = np.random.default_rng(0).exponential(1 / rate, round(0.9 * rate * seconds))
                for moment in np.cumsum(gaps).tolist():
                    self._clock.at(began + moment, lambda name=name, texts=texts: self._send(name, texts))  # type: ignore[misc]
        self._clock.at(self._until, self._look)
        self._loop.run()
        self._loop.close()
        return self._run

    def rates(self) -> list[float]:
        """Tokens a second of each model, as HTTP processes learn them."""
        return self._loop._health.status().tokens_per_s

    def _look(self) -> None:
        self._loop._metrics.write()
        for name, gpu in self._gpus.items():
            self._run.tokens_per_s[name] = gpu.tokens / self._seconds
            self._run.busy_s[name] = self._loop._metrics.of(name)._busy._value.get()

    def _send(self, name: str, texts: int) -> None:
        if self._clock.now > self._until:
            return
        number = next(self._ids)
        lengths = LENGTHS[number % len(LENGTHS), :texts] if texts > 1 else np.array([16], np.int32)
        if texts > 1 and self._long_text:
            texts, lengths = 1, np.array([self._long_text], np.int32)
        asked = name if len(lengths) > 1 or lengths[0] != 16 else "short"
        request = EncodeRequest(
            number,
            Task.EMBED,
            bytes(4 * int(lengths.sum())),
            lengths.tobytes(),
            b"",
            0,
            True,
            self._clock.now + 600,
            self._clock.now,
            name in self._low_priority,
            model=self._names.index(name),
        )
        self._open[request.id] = [texts, asked, self._clock.now, 0]
        self._loop._queue.submit(self._channel, Submit([request], []))

    def _respond(self, slices: list[Slice], *_: Any) -> None:
        speed = self._gpus[self._names[cast("int", slices[0].request.model)]].speed
        tokens = sum(piece.tokens for piece in slices)
        self._clock.sleep(speed.responses_s * tokens / BATCH_TOKENS + speed.slice_s * len(slices))
        self._run.slices.append(len(slices))
        for piece in slices:
            waits = self._open[piece.request.message.id]
            name = waits[1]
            waits[0] -= piece.stop - piece.start
            waits[3] += 1
            if not waits[0]:
                del self._open[piece.request.message.id]
                self._run.waited_s[name].append(self._clock.now - waits[2])
                self._run.pieces[name].append(waits[3])
                if name in self._floods:
                    again = self._clock.now + self._floods[name]
                    self._clock.at(again, lambda name=name: self._send(name, TEXTS))  # type: ignore[misc]

    def _wait_for_batch(self, *_: Any) -> Batch | None:
        while (batch := self._loop._queue._next_batch()) is None and self._clock.events:
            self._clock.until(self._clock.events[0][0])
        return batch
