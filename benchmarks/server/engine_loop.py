"""Latency of the engine process's loop in front of a simulated GPU, next to that of a perfect server.

    python -m benchmarks.server.engine_loop [--load 0.8] [--texts 32] [--tokens 104] [--seconds 8]

The loop, its scheduler and its socket are real; the encoder is simulated. A batch takes FIXED_S plus a time for each
token, one batch after the other, and its launch takes LAUNCH_S of the host's time: the figures of BERT-base on an H100.
Requests arrive at random (Poisson) and at even intervals. The perfect server is computed: it forms batches as the loop
does, at no cost and without a gap.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import select
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import record
from embert.engine import Encoder, PackedBatch, Task, TaskOutput, load_model
from embert.server.config import ModelConfig, ServeConfig
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.loop import EngineLoop
from embert.server.ipc.channel import Channel, EncodeRequest, Submit, decode_results, encode
from embert.server.ipc.control import StartEngine
from embert.server.ipc.shared_counters import SharedCounters

FIXED_S, TOKENS_PER_S = 0.12e-3, 2.9e6  # time of a batch: fixed part and rate, as BERT-base on one H100
LAUNCH_S = 0.15e-3
MAX_BATCH_TOKENS = 16384


class SimulatedGpu(Encoder):
    """An encoder whose batches only take time. See `embert.engine.encoders.base.Encoder`."""

    name, device, device_name, dtype, choice = "simulated", "cuda:0", "none", "float16", ""
    width = hidden_size = 8
    max_batch_tokens = MAX_BATCH_TOKENS

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy_s = 0.0
        self.gaps_s: list[float] = []  # from the end of a batch to the start of the next
        self.batches = 0

    def submit(self, batch: PackedBatch) -> tuple[int, float]:
        """Return the ticket: the number of texts and when they are done."""
        launched = time.monotonic() + LAUNCH_S
        while time.monotonic() < launched:
            pass
        begins = max(launched, self.free_at)
        self.gaps_s.append(begins - self.free_at)
        takes_s = batch_s(batch.tokens)
        self.free_at = begins + takes_s
        self.busy_s += takes_s
        self.batches += 1
        return batch.sequences, self.free_at

    def wait(self, ticket: tuple[int, float]) -> dict[Task, TaskOutput]:
        """Return ones, a row of EMBED for each text, when the batch is done."""
        sequences, done_at = ticket
        time.sleep(max(0.0, done_at - time.monotonic()))
        return {Task.EMBED: TaskOutput.one_each(np.ones((sequences, self.width), np.float32))}

    def close(self) -> None:
        """Nothing to release."""


def batch_s(tokens: int) -> float:
    """Return the seconds that a batch of `tokens` takes."""
    return FIXED_S + tokens / TOKENS_PER_S


@dataclass
class Run:
    """One load, sent through the loop."""

    due_s: list[float]
    texts: int
    tokens: int  # of a text
    gpu: SimulatedGpu = field(default_factory=SimulatedGpu)
    ended_s: dict[int, float] = field(default_factory=dict)

    def latencies_ms(self) -> list[float]:
        """Send each request when it is due; return the latencies, sorted."""
        with tempfile.TemporaryDirectory(prefix="embert-engine-loop-") as folder:
            loop, thread = self._loop(folder)
            channel = Channel.connect(f"{folder}/engine")
            receiver = threading.Thread(target=self._receive, args=(channel,))
            receiver.start()
            gc.freeze()
            first = time.monotonic() + 0.2
            self._send(channel, first)
            receiver.join()
            loop._queue.drain()
            thread.join()
            loop.close()
            channel.close()
        if len(self.ended_s) < len(self.due_s):
            raise SystemExit(f"{len(self.due_s) - len(self.ended_s)} of {len(self.due_s)} requests had no result")
        return sorted((self.ended_s[i] - first - due) * 1e3 for i, due in enumerate(self.due_s))

    def _loop(self, folder: str) -> tuple[EngineLoop, threading.Thread]:
        config = ServeConfig(workers=1)  # as many as have a place in the counters
        counters = SharedCounters.create(1, 1)
        start = StartEngine(config, [], False, ["simulated"], -1, 0, "cuda:0", f"{folder}/engine", counters.fd, 1)
        model = dataclasses.replace(load_model(None), model_id="simulated", max_input_length=512)
        loaded = LoadedModel(0, "simulated", ModelConfig(), model, self.gpu)
        loaded.warm_up()
        loop = EngineLoop(start)
        loop.add(loaded)
        loop.listen()
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        return loop, thread

    def _send(self, channel: Channel, first: float) -> None:
        ids = np.ones(self.texts * self.tokens, np.int32).tobytes()
        lengths = np.full(self.texts, self.tokens, np.int32).tobytes()
        for index, due in enumerate(self.due_s):
            time.sleep(max(0.0, first + due - time.monotonic()))
            now = time.monotonic()
            request = EncodeRequest(index, Task.EMBED, ids, lengths, b"", 0, True, now + 60, now)
            channel.send(encode(Submit([request], [])))

    def _receive(self, channel: Channel) -> None:
        texts = dict.fromkeys(range(len(self.due_s)), 0)
        readable = select.poll()
        readable.register(channel, select.POLLIN)
        last = time.monotonic()  # the engine sends a status every second, with or without results
        while len(self.ended_s) < len(self.due_s) and time.monotonic() - last < 5 and readable.poll(5000):
            for rows in [rows for message in channel.receive() if (rows := decode_results(message).rows)]:
                last = time.monotonic()
                for id_, count in zip(rows.ids, rows.texts, strict=True):
                    texts[id_] += count
                    if texts[id_] == self.texts:
                        self.ended_s[id_] = last


def perfect_ms(due_s: Sequence[float], tokens: int) -> list[float]:
    """Return latencies, sorted, if everything that waits is batched the moment the batch before it ends."""
    latencies: list[float] = []
    now, first = 0.0, 0
    while first < len(due_s):
        now = max(now, due_s[first])
        end = first
        while end < len(due_s) and due_s[end] <= now and (end + 1 - first) * tokens <= MAX_BATCH_TOKENS:
            end += 1
        end = max(end, first + 1)
        now += batch_s((end - first) * tokens)
        latencies += [(now - due) * 1e3 for due in due_s[first:end]]
        first = end
    return sorted(latencies)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.server.engine_loop", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--load", type=float, default=0.8, help="share of the rate of batches of one request")
    parser.add_argument("--texts", type=int, default=32, help="of a request")
    parser.add_argument("--tokens", type=int, default=104, help="of a text")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder of the JSON")
    options = parser.parse_args(argv)
    request_tokens = options.texts * options.tokens
    rate = options.load / batch_s(request_tokens)
    gaps = np.random.default_rng(0).exponential(1 / rate, round(rate * options.seconds))
    figures: dict[str, Any] = {"rate": rate, "request_ms": batch_s(request_tokens) * 1e3, "arrivals": {}}
    rows = []
    for arrivals, due in (("at random", np.cumsum(gaps)), ("evenly", np.arange(len(gaps)) / rate)):
        run = Run(due.tolist(), options.texts, options.tokens)
        latencies = {"the loop": run.latencies_ms(), "perfect": perfect_ms(due.tolist(), request_tokens)}
        gap_ms = statistics.median(run.gpu.gaps_s[1:]) * 1e3
        loop_detail = f"{run.gpu.batches} batches, gap {gap_ms:.2f} ms, busy {run.gpu.busy_s / due[-1]:.0%}"
        quantiles = {who: [float(np.quantile(ms, q)) for q in (0.5, 0.9, 0.99)] for who, ms in latencies.items()}
        figures["arrivals"][arrivals] = {**quantiles, "gap_ms": gap_ms, "batches": run.gpu.batches}
        for who, values in quantiles.items():
            rows.append(
                [f"{arrivals}, {who}", *(f"{ms:.2f}" for ms in values), loop_detail if who == "the loop" else ""]
            )
    request = f"{options.texts} texts of {options.tokens} tokens, {batch_s(request_tokens) * 1e3:.2f} ms each"
    print(f"{rate:.0f} requests/s of {request}\n")
    record.print_table(["requests", "p50 ms", "p90 ms", "p99 ms", ""], rows)
    print(f"\nwritten: {record.write('hand-over', figures, options.output)}")


if __name__ == "__main__":
    main()
