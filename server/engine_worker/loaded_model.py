"""A model in an engine process: its encoder, warmed up, and what is known of its speed."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from embert.engine import Encoder, Model, PackedBatch, Task
from embert.engine.batch import cumulative
from embert.engine.encoders.self_test import tasks_never_finite
from embert.engine.errors import EncoderError
from embert.engine.tasks import ALL_TASKS, task_names
from embert.server.config import ModelConfig
from embert.server.engine_worker.scheduling import BatchLimits, ThroughputEstimate
from embert.server.ipc.control import ModelInfo

__all__ = ["LoadedModel"]

log = logging.getLogger(__name__)

_ANSWER_MAX_S = 0.01


@dataclass(slots=True, eq=False)
class LoadedModel:
    """One thread at a time runs batches on it: the one that loads it, then the device loop."""

    number: int
    name: str  # what clients call it
    config: ModelConfig
    model: Model
    encoder: Encoder
    throughput: ThroughputEstimate = field(init=False)
    probe: PackedBatch = field(init=False)  # the smallest batch
    full_batch_s: float = 0.0
    answer_s: float = 0.0  # recent time of the host for the answer to a batch

    def __post_init__(self) -> None:
        self.throughput = ThroughputEstimate(self.encoder.batch_tokens)
        self.probe = _batch_of([1], self._main_task)

    @property
    def _main_task(self) -> Task:
        """The task by which it is timed and probed: the first that it has."""
        return next(task for task in ALL_TASKS if task in self.model.tasks)

    @property
    def submits_ahead(self) -> bool:
        """Whether a batch can wait on the device. A CPU runs one only while it is waited for."""
        return self.encoder.device != "cpu"

    @property
    def limits(self) -> BatchLimits:
        """Of its batches."""
        return BatchLimits.of(
            self.throughput, self.encoder.batch_tokens, self.config.max_batch_requests, self.encoder.max_batch_tokens
        )

    def _check_finite(self) -> None:
        never = tasks_never_finite(self.model, self.encoder)
        if not never:
            return
        names, dtype = ", ".join(task_names(never)), self.encoder.dtype
        message = (
            f"{self.model.model_id}: no vector of the self-test is finite ({names}); its weights hold NaN or "
            f"infinities, or overflow in {dtype}"
        )
        if never == self.model.tasks:
            raise EncoderError(message)
        log.warning("%s", message)

    def warm_up(self) -> None:
        """Run the smallest batch and the largest, so that no client pays for one-time work.

        Their durations are the only known speed before the first request. Raises EncoderError where every request would
        fail, because no vector is finite.
        """
        self._check_finite()
        budget = self.encoder.batch_tokens
        full = _batch_of([min(64, budget)] * max(1, budget // 64), self._main_task)
        for batch in (full, self.probe, self.probe.wanting(self.model.tasks)):
            self.run(batch)
        probe_s, self.full_batch_s = self._shortest_s(self.probe), self._shortest_s(full)
        self.throughput.calibrate(probe_s, max(0.0, self.full_batch_s - probe_s) / full.tokens)

    def note_answer(self, seconds: float) -> None:
        """Learn from an answer. A pause of the machine counts little."""
        self.answer_s += 0.2 * (min(seconds, _ANSWER_MAX_S) - self.answer_s)

    def run(self, batch: PackedBatch) -> None:
        """Run a batch of the server's own."""
        self.encoder.wait(self.encoder.submit(batch))

    def info(self, load_s: float) -> ModelInfo:
        """What other processes need to know of the model, after its warm-up."""
        encoder = self.encoder
        return ModelInfo(
            encoder=encoder.name,
            device=encoder.device,
            device_name=encoder.device_name,
            dtype=encoder.dtype,
            choice=getattr(encoder, "choice", ""),
            max_batch_tokens=encoder.max_batch_tokens,
            width=encoder.width,
            hidden_size=encoder.hidden_size,
            load_s=load_s,
            full_batch_s=self.full_batch_s,
            longest_text_s=self._longest_text_s,
        )

    @property
    def _longest_text_s(self) -> float:
        """About how long the longest text takes, from the duration of the largest batch.

        By count, attention takes length / (6 · hidden size) of the time of all else in a layer.
        """
        longest = self.model.max_input_length
        share = longest / self.encoder.batch_tokens
        return self.full_batch_s * share * (1 + longest / (6 * self.encoder.hidden_size))

    def _shortest_s(self, batch: PackedBatch) -> float:
        """The duration of a batch; the shortest of three where batches are submitted by their expected end."""
        lasted_s = []
        for _ in range(3 if self.submits_ahead else 1):
            started = time.monotonic()
            self.run(batch)
            lasted_s.append(time.monotonic() - started)
        return min(lasted_s)


def _batch_of(lengths: list[int], tasks: Task) -> PackedBatch:
    """A batch of texts of so many tokens each, all of id 0."""
    return PackedBatch(np.zeros(sum(lengths), np.int32), cumulative(np.array(lengths, np.int32))).wanting(tasks)
