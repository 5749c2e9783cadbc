"""A model in an engine process: loads it, warms it up and measures its speed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from embert.engine import Encoder, Model, PackedBatch, Task, load_encoder, load_model
from embert.engine.batch import cumulative
from embert.engine.encoders.self_test import tasks_never_finite
from embert.engine.errors import EncoderError, EncoderLost, EngineError
from embert.engine.models.flops import PLAIN_TOKENS, TokenCounts
from embert.engine.tasks import ALL_TASKS, task_names
from embert.engine.weights.checkpoint import on_bytes_read
from embert.server.config import ModelConfig
from embert.server.engine_worker.lanes import BatchLimits
from embert.server.engine_worker.throughput import ThroughputEstimate
from embert.server.ipc.control import ModelInfo, StartModel

log = logging.getLogger(__name__)

PROGRESS_S = 1.0


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
        """Run the smallest batch and the largest, so that no client pays for one-time work.

        Their durations are the only known speed before the first request. Raises EncoderError if every request would
        fail because no vector is finite.
        """
        self._check_finite()
        budget = self.encoder.batch_tokens
        length = min(64, budget, self.model.max_input_length)
        full = _batch_of([length] * max(1, budget // length), self._main_task)
        for batch in (full, self.probe, self.probe.wanting(self.model.tasks)):
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
        longest, counts = self.model.max_input_length, self._counts
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
    return PackedBatch(np.zeros(sum(lengths), np.int32), cumulative(np.array(lengths, np.int32))).wanting(tasks)


class LoadProgress:
    """Reports the part of a model's weights that has been read, at most once in PROGRESS_S."""

    def __init__(self, on_step: Callable[[str], None]) -> None:
        self._on_step, self._reported = on_step, time.monotonic()

    def __call__(self, read_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._reported >= PROGRESS_S:
            self._reported = now
            self._on_step(f"loading the weights, {read_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB")


class Loader:
    """Loads the models of an engine process in parallel.

    A model that cannot be loaded is reported and skipped; the others go on. If the device is lost, all its models are.
    The callbacks run in the loading threads.
    """

    def __init__(
        self,
        device: str,
        on_step: Callable[[int, str], None],
        on_ready: Callable[[LoadedModel, float], None],
        on_failed: Callable[[int, str], None],
        on_lost: Callable[[Exception], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_step` gets a model's number and the current step, `on_ready` a model and its loading time in seconds.

        `on_failed` gets a number and a sentence, `on_lost` the error if the device is lost. `on_end` runs whenever no
        model is loading any more.
        """
        self._device = device
        self._on_step, self._on_ready, self._on_failed = on_step, on_ready, on_failed
        self._on_lost, self._on_end = on_lost, on_end
        # CPU encoders load at the same time; allocation and graph capture on a GPU are serialized. Several models on a
        # GPU have a device with a number, never "auto".
        self._gpu_lock: AbstractContextManager[object] = contextlib.nullcontext()
        if device.startswith("cuda"):
            self._gpu_lock = threading.Lock()
        self._left = 0
        self._lock = threading.Lock()  # guards `_left`

    def start(self, models: Sequence[StartModel], *, one_by_one: bool = False) -> None:
        """Load each model in a separate thread, or `one_by_one` in their order."""
        groups = [models] if one_by_one else [[model] for model in models]
        with self._lock:
            self._left += len(groups)
        for group in groups:
            name = f"load-{group[0].number}"
            threading.Thread(target=self._load_all, args=(group,), name=name, daemon=True).start()

    def _load_all(self, models: Sequence[StartModel]) -> None:
        for model in models:
            began = time.monotonic()
            try:
                loaded = self._load(model)
            except EncoderLost as error:
                self._on_lost(error)
                return
            except EngineError as error:
                self._on_failed(model.number, str(error))
            except MemoryError:
                self._on_failed(model.number, f"not enough memory to load {model.model_id}")
            except BaseException as error:  # the user gets one sentence for any error; a Rust panic is no Exception
                log.debug("loading failed", exc_info=True)
                message = f"{model.model_id} cannot be loaded: {type(error).__name__}: {error}"
                self._on_failed(model.number, message)
            else:
                self._on_ready(loaded, time.monotonic() - began)
        with self._lock:
            self._left -= 1
            ended = not self._left
        if ended:
            self._on_end()

    def _load(self, start: StartModel) -> LoadedModel:
        config = start.config
        self._on_step(start.number, "reading the model")
        model = load_model(start.folder, pooling=config.pooling, model_id=start.model_id)
        with self._gpu_lock:
            self._on_step(start.number, "loading the weights")
            reporting = on_bytes_read.set(LoadProgress(partial(self._on_step, start.number)))
            try:
                encoder = load_encoder(
                    model,
                    device=self._device,
                    dtype=config.dtype,
                    max_batch_tokens=config.max_batch_tokens,
                    encoder=config.encoder,
                    min_agreement=config.min_agreement,
                )
            finally:
                on_bytes_read.reset(reporting)
            loaded = LoadedModel(start.number, start.name, config, model, encoder)
            self._on_step(start.number, "running its first batches")
            loaded.warm_up()
        return loaded
