"""Loads the models of an engine process in parallel, and hands each over when it is ready.

A model that cannot be loaded is reported and skipped; the others go on. If the device is lost, all its models are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from embert.engine import load_encoder, load_model
from embert.engine.errors import EncoderLost, EngineError
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.ipc.control import StartModel

__all__ = ["Loader"]

log = logging.getLogger(__name__)


class Loader:
    """The callbacks run in the loading threads."""

    def __init__(
        self,
        device: str,
        on_step: Callable[[int, str], None],
        on_ready: Callable[[LoadedModel, float], None],
        on_failed: Callable[[int, str], None],
        on_lost: Callable[[Exception], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_step` gets a model's number and the current step, `on_ready` a model and the seconds that it took.

        `on_failed` gets a number and a sentence. `on_lost`: the device is lost. `on_end` runs whenever the last of the
        models that were loading has ended.
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
        """Load the models in threads of their own, or `one_by_one` in their order."""
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
            encoder = load_encoder(
                model,
                device=self._device,
                dtype=config.dtype,
                max_batch_tokens=config.max_batch_tokens,
                encoder=config.encoder,
                min_agreement=config.min_agreement,
            )
            loaded = LoadedModel(start.number, start.name, config, model, encoder)
            self._on_step(start.number, "running its first batches")
            loaded.warm_up()
        return loaded
