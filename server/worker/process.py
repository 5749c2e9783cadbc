"""`python -m embert.server.worker.process`: loads the model, reports to the supervisor, runs the device loop."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

from embert.engine import load_encoder, load_model
from embert.engine.errors import EngineError
from embert.server.ipc.control import ControlConnection, ModelInfo, Failed, Progress, Ready, StartEngine
from embert.server.observability import gc_tuning
from embert.server.observability.logs import configure_logging, exit_now
from embert.server.observability.metrics import use_folder
from embert.server.worker.loop import EngineLoop
from embert.server.worker.nvml import report_gpu

__all__ = ["main"]

log = logging.getLogger(__name__)


def main() -> None:
    """`python -m embert.server.worker.process FD`: one engine; its instructions come over the inherited socket FD."""
    sys.setswitchinterval(0.001)  # the receiving thread and the device loop must not wait long for each other
    gc_tuning.before_imports()
    began = time.monotonic()
    control = ControlConnection.from_fd(int(sys.argv[1]))
    start = control.receive()
    if not isinstance(start, StartEngine):
        raise SystemExit("embert.server.worker.process is started by `embert serve`")
    config = start.config
    name = f"engine-{start.index}"
    configure_logging(name, config.log_format, config.log_level)
    use_folder(Path(start.runtime_folder, "metrics"), name)
    try:
        model = load_model(start.folder, pooling=config.pooling, model_id=start.model_id)
        control.send(Progress("loading the weights"))
        encoder = load_encoder(
            model,
            device=start.device,
            dtype=config.dtype,
            max_batch_tokens=config.max_batch_tokens,
            encoder=config.encoder,
        )
        loop = EngineLoop(start, model, encoder)
        control.send(Progress("running its first batches"))
        full_batch_s = loop.warm_up()
    except EngineError as error:
        control.send(Failed(str(error)))
        raise SystemExit(1) from None
    except MemoryError:
        control.send(Failed(f"not enough memory to load {start.model_id}"))
        raise SystemExit(1) from None
    except Exception as error:  # the user gets one sentence, whatever the error is
        log.debug("loading failed", exc_info=True)
        control.send(Failed(f"{start.model_id} cannot be loaded: {type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    threading.excepthook = _end_process
    loop.listen()
    threading.Thread(target=loop.follow, args=(control, start.runtime_folder), name="control", daemon=True).start()
    if encoder.device.startswith("cuda"):
        threading.Thread(target=report_gpu, args=(encoder.device,), name="gpu", daemon=True).start()
    info = ModelInfo(
        encoder=encoder.name,
        device=encoder.device,
        device_name=encoder.device_name,
        dtype=encoder.dtype,
        choice=getattr(encoder, "choice", ""),
        max_batch_tokens=encoder.max_batch_tokens,
        width=encoder.width,
        hidden_size=encoder.hidden_size,
        load_s=time.monotonic() - began,
        full_batch_s=full_batch_s,
        longest_text_s=loop.longest_text_s(full_batch_s),
    )
    gc_tuning.after_startup()
    control.send(Ready(info))
    try:
        loop.run()
    except Exception:
        log.critical("internal error, this process ends", exc_info=True)
        exit_now(70)
    loop.close()


def _end_process(error: threading.ExceptHookArgs) -> None:
    """End the process: an engine without one of its threads would look alive and answer nobody."""
    what = error.exc_type, error.exc_value, error.exc_traceback
    log.critical("internal error in a thread, this process ends", exc_info=what)  # type: ignore[arg-type]
    exit_now(70)


if __name__ == "__main__":
    main()
