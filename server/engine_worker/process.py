"""The engine process: loads the models of a device, reports to the supervisor and runs the loop."""

from __future__ import annotations

import logging
import signal
import sys
import threading

from embert.server.engine_worker.loaded_model import LoadedModel, Loader
from embert.server.engine_worker.loop import EngineLoop
from embert.server.engine_worker.nvml import report_gpu
from embert.server.ipc.control import ControlConnection, ModelFailed, ModelReady, Progress, StartEngine
from embert.server.ipc.signals import DRAIN_SIGNALS
from embert.server.observability import gc_tuning
from embert.server.observability.logs import configure_logging, exit_now
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.metrics import use_memory

log = logging.getLogger(__name__)


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
    loader = _loader(start, control, loop)
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


def _loader(start: StartEngine, control: ControlConnection, loop: EngineLoop) -> Loader:
    """Returns a loader that adds models to the loop. The process ends if none can be loaded."""
    on_gpu = threading.Event()
    loaded = threading.Event()

    def on_ready(model: LoadedModel, took_s: float) -> None:
        loop.add(model)
        loaded.set()
        device = model.encoder.device
        if device.startswith("cuda") and not on_gpu.is_set():
            on_gpu.set()
            threading.Thread(target=report_gpu, args=(device,), name="gpu", daemon=True).start()
        control.send(ModelReady(model.number, model.info(took_s)))

    def on_end() -> None:
        if not loaded.is_set():
            exit_now(1)
        gc_tuning.after_startup()

    return Loader(
        start.device,
        on_step=lambda model, doing: control.send(Progress(doing, model)),
        on_ready=on_ready,
        on_failed=lambda model, message: control.send(ModelFailed(model, message)),
        on_lost=loop.give_up,
        on_end=on_end,
    )


def _end_process(error: threading.ExceptHookArgs) -> None:
    """End the process: an engine without one of its threads would look alive and send nothing."""
    what = error.exc_type, error.exc_value, error.exc_traceback
    log.critical("internal error in a thread; exiting", exc_info=what)  # type: ignore[arg-type]
    exit_now(70)


if __name__ == "__main__":
    main()
