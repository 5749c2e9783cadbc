"""The CUDA encoder in its own process, timed as a server uses it: numpy in, numpy out, two batches in flight."""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.encoder.gpu_timing import BURST_MS, REST_S, SUSTAINED_S, WAKE_UP_MS, calls_in
from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder


def use_build(path: str) -> None:
    """Make the extension in this file embert.engine._cuda for the rest of this process."""
    spec = importlib.util.spec_from_file_location("embert.engine._cuda", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not an extension module: its name must end in .so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["embert.engine._cuda"] = module


MAX_TOKENS = 32768


class CudaProcess:
    """A process that holds the CUDA encoder.

    `pooling` None is the model's own. `build` is the file of the extension, empty for the installed one. Batches have
    at most `max_tokens`. `gemm` is CudaEncoder's.
    """

    def __init__(
        self, folder: Path, pooling: str | None, build: str = "", max_tokens: int = MAX_TOKENS, gemm: str = "auto"
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(str(folder), pooling, child_end, build, max_tokens, gemm), daemon=True
        )
        self._process.start()
        child_end.close()  # so that recv raises EOFError when the process exits
        self.started: tuple[float, tuple[int, int, int]]  # seconds to load, bytes of memory
        self.dtype: str
        self.started, self.dtype = self._pipe.recv()

    def ask(self, what: str, batch: PackedBatch) -> Any:
        """Return what the process measures on `batch`.

        "burst" and "sustained" are milliseconds a batch; "alone" is (milliseconds to the result of a single batch,
        microseconds that submit takes); "vectors" is float32 [B, width].
        """
        self._pipe.send((what, batch))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(folder: str, pooling: str | None, pipe: Connection, build: str, max_tokens: int, gemm: str) -> None:
    """Load the encoder, send its load time and memory, then respond to `ask` until None comes."""
    if build:
        use_build(build)
    start = time.perf_counter()
    encoder = CudaEncoder(engine.load_model(folder, pooling=pooling), max_batch_tokens=max_tokens, gemm=gemm)
    pipe.send(((time.perf_counter() - start, encoder.memory), encoder.dtype))
    while (asked := pipe.recv()) is not None:
        what, batch = asked
        if what == "burst":
            pipe.send(_burst_ms(encoder, batch))
        elif what == "sustained":
            pipe.send(_sustained_ms(encoder, batch))
        elif what == "alone":
            timed = [_alone(encoder, batch) for _ in range(20)]
            pipe.send(tuple(statistics.median(values) for values in zip(*timed, strict=True)))
        else:
            pipe.send(encoder.encode(batch))
    encoder.close()


def _pipelined_ms(encoder: CudaEncoder, batch: PackedBatch, times: int, before: int = 1) -> float:
    """Return milliseconds a batch with two in flight, over `times` batches after the first `before`."""
    ticket = encoder.submit(batch)
    start = 0.0
    for i in range(before + times):
        following = encoder.submit(batch) if i < before + times - 1 else ticket
        encoder.wait(ticket)
        if i == before - 1:
            start = time.perf_counter()
        ticket = following
    return (time.perf_counter() - start) / times * 1e3


def _burst_ms(encoder: CudaEncoder, batch: PackedBatch) -> float:
    """Return milliseconds a batch, in a burst."""
    each = _pipelined_ms(encoder, batch, 4)
    time.sleep(REST_S)
    return _pipelined_ms(encoder, batch, calls_in(BURST_MS, each), calls_in(WAKE_UP_MS, each))


def _sustained_ms(encoder: CudaEncoder, batch: PackedBatch) -> float:
    """Return milliseconds a batch, under sustained load."""
    until = time.perf_counter() + SUSTAINED_S
    while time.perf_counter() < until:
        _pipelined_ms(encoder, batch, 20)
    return _pipelined_ms(encoder, batch, max(20, int(SUSTAINED_S * 1e3 / _pipelined_ms(encoder, batch, 20))))


def _alone(encoder: CudaEncoder, batch: PackedBatch) -> tuple[float, float]:
    """Return milliseconds from submit to the result with nothing else in flight, and microseconds of submit itself."""
    start = time.perf_counter()
    ticket = encoder.submit(batch)
    submitted = time.perf_counter()
    encoder.wait(ticket)
    return (time.perf_counter() - start) * 1e3, (submitted - start) * 1e6
