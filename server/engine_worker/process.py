"""The engine process: loads the models of a device, reports to the supervisor and runs the loop."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from embert.engine import load_encoder, load_model
from embert.engine.errors import EncoderLost, EngineError
from embert.engine.weights.checkpoint import on_bytes_read
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.loop import EngineLoop
from embert.server.engine_worker.nvml import report_gpu
from embert.server.ipc.control import ControlConnection, ModelFailed, ModelReady, Progress, StartEngine, StartModel
from embert.server.ipc.signals import DRAIN_SIGNALS
from embert.server.observability import gc_tuning
from embert.server.observability.logs import configure_logging, exit_now
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.metrics import use_memory

log = logging.getLogger(__name__)

PROGRESS_S = 1.0  # between reports of one model


def main() -> None:
    """`python -m embert.server.engine_worker.process FD`: instructions come over the inherited socket FD."""
    sys.setswitchinterval(0.001)  # the receiving thread and the device loop must not wait long for each other
    gc_tuning.before_imports()
    control = ControlConnection.from_fd(int(sys.argv[1]))
    start = control.receive()
    if not isinstance(start, StartEngine):
        raise SystemExit("embert.server.engine_worker.process is started by `embert serve`")
    name = f"engine-{start.index}"
    configure_logging(name, start.config.log_format, start.config.log_level)
    for number in DRAIN_SIGNALS:
        signal.signal(number, _ignore_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    use_memory(MetricMemory(start.memory_fd), name)
    threading.excepthook = _end_process
    loop = EngineLoop(start)
    loop.listen()
    loader = Loader(start.device, control, loop)
    following = control, lambda model: loader.start([model])
    threading.Thread(target=loop.follow, args=following, name="control", daemon=True).start()
    loader.start(start.models, one_by_one=start.one_by_one)
    try:
        loop.run()
    except Exception:  # a bug: other threads would keep this process alive without its loop
        log.critical("internal error; exiting", exc_info=True)
        exit_now(70)
    loop.close()


def _ignore_signal(number: int, frame: object) -> None:
    """Goes on: systemd signals all processes at once, and the HTTP processes still need results."""
    del frame
    log.info("received %s; the supervisor stops this process after the last response", signal.Signals(number).name)


def _end_process(error: threading.ExceptHookArgs) -> None:
    """End the process: an engine without one of its threads would look alive and send nothing."""
    what = error.exc_type, error.exc_value, error.exc_traceback
    log.critical("internal error in a thread; exiting", exc_info=what)  # type: ignore[arg-type]
    exit_now(70)


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
    """Loads the models of an engine process in parallel, adds them to the loop and reports to the supervisor.

    A model that cannot be loaded is reported and skipped; the others go on. If the device is lost, all its models are.
    The process ends if none can be loaded.
    """

    def __init__(self, device: str, control: ControlConnection, loop: EngineLoop) -> None:
        self._device, self._control, self._loop = device, control, loop
        # CPU encoders load at the same time; allocation and graph capture on a GPU are serialized. Several models on a
        # GPU have a device with a number, never "auto".
        self._gpu_lock: AbstractContextManager[object] = contextlib.nullcontext()
        if device.startswith("cuda"):
            self._gpu_lock = threading.Lock()
        self._left = 0
        self._has_model = self._reports_gpu = False
        self._lock = threading.Lock()  # guards the three fields above

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
                self._loop.give_up(error)
                return
            except EngineError as error:
                self._failed(model, str(error))
            except MemoryError:
                self._failed(model, f"not enough memory to load {model.model_id}")
            except BaseException as error:  # one sentence for any error: a panic in Rust is a BaseException
                log.debug("loading failed", exc_info=True)
                self._failed(model, f"{model.model_id} cannot be loaded: {type(error).__name__}: {error}")
            else:
                self._add(loaded, time.monotonic() - began)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if not self._has_model:
            exit_now(1)
        gc_tuning.after_startup()

    def _add(self, model: LoadedModel, took_s: float) -> None:
        self._loop.add(model)
        device = model.encoder.device
        with self._lock:
            reports_now = device.startswith("cuda") and not self._reports_gpu
            self._has_model, self._reports_gpu = True, self._reports_gpu or reports_now
        if reports_now:
            threading.Thread(target=report_gpu, args=(device,), name="gpu", daemon=True).start()
        self._control.send(ModelReady(model.number, model.info(took_s)))

    def _failed(self, model: StartModel, message: str) -> None:
        self._control.send(ModelFailed(model.number, message))

    def _load(self, start: StartModel) -> LoadedModel:
        config = start.config

        def on_step(doing: str) -> None:
            self._control.send(Progress(doing, start.number))

        on_step("reading the model")
        model = load_model(start.folder, pooling=config.pooling, model_id=start.model_id)
        with self._gpu_lock:
            on_step("loading the weights")
            reporting = on_bytes_read.set(LoadProgress(on_step))
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
            on_step("running its first batches")
            loaded.warm_up()
        return loaded


if __name__ == "__main__":
    main()
