"""A model in an engine process: warms it up and measures its speed."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from embert.engine import Encoder, Model, PackedBatch, Task
from embert.engine.batch import cumulative
from embert.engine.encoders.self_test import tasks_never_finite
from embert.engine.errors import EncoderError
from embert.engine.models.flops import PLAIN_TOKENS, TokenCounts
from embert.engine.tasks import ALL_TASKS, task_names
from embert.server.config import ModelConfig
from embert.server.engine_worker.lanes import BatchLimits
from embert.server.engine_worker.throughput import ThroughputEstimate
from embert.server.ipc.control import ModelInfo

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LoadedModel:
    """One thread at a time runs batches on it: the one that loads it, then the device loop."""

    number: int
    name: str  # in requests
    config: ModelConfig
    model: Model
    encoder: Encoder
    throughput: ThroughputEstimate = field(init=False)
    probe: PackedBatch = field(init=False)  # the smallest batch
    full_batch_s: float = 0.0
    responses_s: float = 0.0  # recent host time for the responses of a batch
    submits_ahead: bool = field(init=False)  # a batch can wait on the device; a CPU runs one only in `wait`

    def __post_init__(self) -> None:
        self.submits_ahead = self.encoder.device != "cpu"
        self.throughput = ThroughputEstimate(self.encoder.batch_tokens)
        self.probe = _batch_of([1], self._main_task)

    @property
    def _main_task(self) -> Task:
        """Its first task, with which it is timed and probed."""
        return next(task for task in ALL_TASKS if task in self.model.tasks)

    @property
    def limits(self) -> BatchLimits:
        encoder = self.encoder
        return BatchLimits(self.throughput, encoder.batch_tokens, encoder.max_batch_tokens, self._counts)

    @property
    def _counts(self) -> TokenCounts | None:
        """The counted tokens of its texts; None if no text is long."""
        return TokenCounts(self.model.config) if self.model.max_input_length > PLAIN_TOKENS else None

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
        """Run the smallest batch and a full one, so that no client pays for one-time work.

        Their durations are the only known speed before the first request. Raises EncoderError if every request would
        fail because no vector is finite.
        """
        self._check_finite()
        budget = self.encoder.batch_tokens
        length = min(64, budget, self.model.max_input_length)
        full = _batch_of([length] * max(1, budget // length), self._main_task)
        # With our kernels for CPUs the first full batch takes at most a seventh longer than the next.
        batches = [] if self.encoder.name == "cpu" else [full]
        batches += [self.probe, self.probe.with_tasks(self.model.tasks)]
        if self.model.late_interaction is not None:
            batches.append(_batch_of([1, 1], Task.CLASSIFY).with_queries(np.array([True, False])))
        for batch in batches:
            self.run(batch)
        probe_s, self.full_batch_s = self._shortest_s(self.probe), self._shortest_s(full)
        self.throughput.calibrate(probe_s, max(0.0, self.full_batch_s - probe_s) / full.tokens)

    def run(self, batch: PackedBatch) -> None:
        self.encoder.wait(self.encoder.submit(batch))

    def info(self, load_s: float) -> ModelInfo:
        """Properties of the model for other processes, after its warm-up."""
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
            sharing=encoder.sharing,
        )

    @property
    def _longest_text_s(self) -> float:
        """Estimated duration of the longest text, from that of the largest batch."""
        longest, counts = self.model.undivided_tokens, self._counts
        counted = longest if counts is None else counts.of([longest])[0]
        return self.full_batch_s * counted / self.encoder.batch_tokens

    def _shortest_s(self, batch: PackedBatch) -> float:
        """The duration of a batch; the shortest of three if batches are submitted by their expected end."""
        lasted_s = []
        for _ in range(3 if self.submits_ahead else 1):
            started = time.monotonic()
            self.run(batch)
            lasted_s.append(time.monotonic() - started)
        return min(lasted_s)


def _batch_of(lengths: list[int], tasks: Task) -> PackedBatch:
    """A batch of texts of these lengths, all ids 0."""
    return PackedBatch(np.zeros(sum(lengths), np.int32), cumulative(np.array(lengths, np.int32))).with_tasks(tasks)
