"""The CUDA encoder against its rivals on one GPU, from token ids, FP16.

    python -m benchmarks.encoder.gpu [--models base large mpnet minilm=FOLDER] [--compile base:passage]

embert is timed as a server uses it: numpy in, numpy out, two batches in flight, wall clock from one batch's answer to
the answer of the last of those that follow. The rivals are timed on the device alone, with inputs already there:
transformers padded (sdpa) by events around the call; the same in batches of 32 sorted by length, as
sentence-transformers does; the packed torch model (varlen attention, no padding) as a replayed CUDA graph; with
--compile the first and the last through torch.compile too (the packed one with max-autotune). Everyone takes turns
round by round; embert has a process of its own; figures are medians. Before timing, vectors are compared. Models
without a folder have random weights, stored in FP32 as most models are. The packed model is of BERT: varlen attention
has no relative positions, so beside MPNet is transformers alone.

A GPU at its power limit lowers its clock, within milliseconds and by as much as a third. So everything is timed in
bursts of equal time: a rest, a hundredth of a second to wake up, then a twentieth; a batch at least of each.
--sustained names workloads that are also timed after a second without a pause.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from benchmarks.encoder.extension import use_build
from benchmarks.lib import record
from benchmarks.rivals.packed_torch import PackedBert
from embert import engine
from embert.engine.encoders.base import PackedBatch
from embert.engine.encoders.cuda import CudaEncoder

SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "narrow": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
MAX_TOKENS = 32768
REST_S = 0.3  # before a burst
WAKE_UP_MS = 10.0  # of a burst, before it is timed
BURST_MS = 50.0
SUSTAINED_S = 1.0  # of load, before it is timed for as long again


def lengths_of(workload: str) -> npt.NDArray[np.int64]:
    """The lengths of a workload's texts, the same in every run."""
    random = np.random.default_rng(0)
    if workload == "query":
        return random.integers(8, 25, 512)
    if workload == "passage":
        return np.clip(random.lognormal(np.log(92), 0.5, 256), 16, 256).astype(np.int64)
    if workload == "uniform512":
        return random.integers(1, 513, 64)
    count, length = workload.split("x")
    return np.full(int(count), int(length))


THROUGHPUT = ["query", "passage", "uniform512", "128x128", "32x512"]
LATENCY = ["1x16", "1x32", "1x64", "1x128", "1x256", "1x512", "8x32", "32x32"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.gpu")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["base", "large"],
        help="base, large, narrow (MiniLM-L6's shape), mpnet, in FP32 or as base/float16; or name=FOLDER",
    )
    parser.add_argument("--workloads", nargs="+", default=[*THROUGHPUT, *LATENCY])
    parser.add_argument(
        "--compile",
        nargs="*",
        default=[],
        help="MODEL:WORKLOAD for which torch.compile is a rival too; it takes minutes",
    )
    parser.add_argument("--sustained", nargs="*", default=["passage"], help="workloads to time under lasting load too")
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    peak = gemm_peak()
    print(f"8192³ FP16 matrix product (torch): {peak:.0f} TFLOP/s\n", flush=True)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "gemm_peak_tflops": peak,
        "rounds": options.rounds,
        "rows": [],
    }
    suffix = "" if options.pooling == "mean" else f"-{options.pooling}"
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(name, Path(scratch))
            for row in run_model(name.partition("=")[0], folder, options, peak):
                figures["rows"].append(row)
                path = record.write(
                    f"encoder-gpu{suffix}", figures
                )  # each time: a run that is cut short leaves what it has
    ratios = [row["ratio"] for row in figures["rows"]]
    print(f"\ngeometric mean of the ratios to the best rival: {statistics.geometric_mean(ratios):.2f}\nwritten: {path}")


def run_model(name: str, folder: Path, options: argparse.Namespace, peak: float) -> Iterator[dict[str, Any]]:
    """All workloads of one model: compare, time, print, and yield each one's figures."""
    ours = Embert(folder, options.pooling)
    ready, (weights, _, total) = ours.started
    print(f"\n{name}: ready in {ready:.2f} s; weights {weights >> 20} MiB, beyond them {(total - weights) >> 20} MiB")
    is_bert = engine.load_model(str(folder)).config.architecture == "bert"
    attention = "sdpa" if is_bert else "eager"  # what transformers has of MPNet
    model: Any = transformers.AutoModel.from_pretrained(
        folder, add_pooling_layer=False, dtype=torch.float16, attn_implementation=attention
    )
    model = model.cuda().eval()
    packed = PackedBert(model, options.pooling) if is_bert else None
    for workload in options.workloads:
        lengths = lengths_of(workload)
        batch = random_batch(lengths)
        with torch.inference_mode():
            runners: dict[str, Callable[[], Any]] = {
                "transformers": padded_runner(model, batch, len(lengths), options.pooling),
                "sorted by 32": padded_runner(model, batch, 32, options.pooling),
            }
            if packed is None:
                theirs = runners["sorted by 32"]().float()
                unsorted = np.argsort(np.argsort(-lengths, kind="stable"))
                vectors = torch.nn.functional.normalize(theirs)[unsorted].cpu().numpy()
            else:
                runners["packed"], vectors = packed.graph(batch, compiled=False)
            compare(ours, batch, vectors)
            if packed is not None and f"{name}:{workload}" in options.compile:
                torch._dynamo.reset()
                compiled = torch.compile(model, dynamic=False)
                runners["transformers compiled"] = padded_runner(compiled, batch, len(lengths), options.pooling)
                runners["packed compiled"], _ = packed.graph(batch, compiled=True)
            times: dict[str, list[float]] = {who: [] for who in ["embert", *runners]}
            for _ in range(options.rounds):
                for who in times:
                    each = ours.ask("burst", batch) if who == "embert" else device_burst(runners[who])
                    times[who].append(float(each))
            latency, submit_us = ours.ask("alone", batch)
            sustained = {}
            if workload in options.sustained:
                for who in times:
                    sustained[who] = ours.ask("sustained", batch) if who == "embert" else device_sustained(runners[who])
        ms = {who: statistics.median(values) for who, values in times.items()}
        tflops = useful_flops(model.config, lengths) / ms["embert"] * 1e-9
        best = min(value for who, value in ms.items() if who != "embert")
        tokens = int(lengths.sum())
        row = {
            "model": name,
            "workload": workload,
            "tokens": tokens,
            "ms": ms,
            "sustained_ms": sustained,
            "alone_ms": latency,
            "submit_us": submit_us,
            "tokens_per_s": tokens / ms["embert"] * 1e3,
            "useful_tflops": tflops,
            "share_of_peak": tflops / peak,
            "ratio": best / ms["embert"],
        }
        print(
            f"{name:7s} {workload:11s} {tokens:6d} tokens: "
            + ", ".join(f"{who} {value:.3f}" for who, value in ms.items())
            + f" ms; submit {submit_us:.0f} us, to the answer {latency:.3f} ms; {tflops:.0f} useful TFLOP/s; "
            + f"{best / ms['embert']:.2f}x the best rival",
            flush=True,
        )
        if sustained:
            best = min(value for who, value in sustained.items() if who != "embert")
            print(
                f"{name:7s} {workload:11s} sustained: "
                + ", ".join(f"{who} {value:.3f}" for who, value in sustained.items())
                + f" ms; {tflops * ms['embert'] / sustained['embert']:.0f} useful TFLOP/s; "
                + f"{best / sustained['embert']:.2f}x the best rival",
                flush=True,
            )
        yield row
    ours.close()


def model_folder(name: str, scratch: Path) -> Path:
    """A folder given by name=FOLDER; else one with random weights of a known shape, in FP32 unless name/dtype says."""
    if "=" in name:
        return Path(name.partition("=")[2])
    # A model folder needs a tokenizer, though none is used here.
    (scratch / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    shape, _, stored = name.partition("/")
    model: Any
    if shape == "mpnet":
        of_mpnet = transformers.MPNetConfig(vocab_size=30527, max_position_embeddings=514)
        model = transformers.MPNetModel(of_mpnet, add_pooling_layer=False)
    else:
        model = transformers.BertModel(transformers.BertConfig(**SHAPES[shape]), add_pooling_layer=False)
    model.to(getattr(torch, stored or "float32")).save_pretrained(scratch)
    return scratch


def random_batch(lengths: npt.NDArray[np.int64]) -> PackedBatch:
    """Random ids of these lengths."""
    ids = np.random.default_rng(1).integers(1000, 30000, int(lengths.sum())).astype(np.int32)
    return PackedBatch(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


class Embert:
    """The CUDA encoder in a process of its own. `build` is the file of its extension, empty for the installed one."""

    def __init__(self, folder: Path, pooling: str, build: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(str(folder), pooling, theirs, build), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen
        self.started: tuple[float, tuple[int, int, int]] = self._pipe.recv()

    def ask(self, what: str, batch: PackedBatch) -> Any:
        """Run serve's `what` on a batch."""
        self._pipe.send((what, batch))
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def serve(folder: str, pooling: str, pipe: Connection, build: str = "") -> None:
    """Load the encoder, tell how long that took and the memory it uses, then answer until None is asked."""
    if build:
        use_build(build)
    start = time.perf_counter()
    ours = CudaEncoder(engine.load_model(folder, pooling=pooling), max_batch_tokens=MAX_TOKENS)
    pipe.send((time.perf_counter() - start, ours.memory))
    while (asked := pipe.recv()) is not None:
        what, batch = asked
        if what == "burst":
            pipe.send(pipelined_burst(ours, batch))
        elif what == "sustained":
            until = time.perf_counter() + SUSTAINED_S
            while time.perf_counter() < until:
                pipelined(ours, batch, 20)
            pipe.send(pipelined(ours, batch, max(20, int(SUSTAINED_S * 1e3 / pipelined(ours, batch, 20)))))
        elif what == "alone":
            timed = [one(ours, batch) for _ in range(20)]
            pipe.send(tuple(statistics.median(values) for values in zip(*timed, strict=True)))
        else:
            pipe.send(ours.encode(batch))
    ours.close()


def pipelined(ours: CudaEncoder, batch: PackedBatch, times: int, before: int = 1) -> float:
    """Milliseconds from one batch's answer to the next one's, two in flight, once `before` of them are answered."""
    ticket = ours.submit(batch)
    start = 0.0
    for i in range(before + times):
        following = ours.submit(batch) if i < before + times - 1 else ticket
        ours.wait(ticket)
        if i == before - 1:
            start = time.perf_counter()
        ticket = following
    return (time.perf_counter() - start) / times * 1e3


def pipelined_burst(ours: CudaEncoder, batch: PackedBatch) -> float:
    """Milliseconds a batch, in a burst."""
    each = pipelined(ours, batch, 4)
    time.sleep(REST_S)
    return pipelined(ours, batch, in_burst(BURST_MS, each), in_burst(WAKE_UP_MS, each))


def one(ours: CudaEncoder, batch: PackedBatch) -> tuple[float, float]:
    """Milliseconds from submit to the answer with nothing else in flight, and microseconds that submit itself takes."""
    start = time.perf_counter()
    ticket = ours.submit(batch)
    submitted = time.perf_counter()
    ours.wait(ticket)
    return (time.perf_counter() - start) * 1e3, (submitted - start) * 1e6


def device_burst(run: Callable[[], object]) -> float:
    """Milliseconds a call, in a burst."""
    each = device_ms(run, 4)
    time.sleep(REST_S)
    device_ms(run, in_burst(WAKE_UP_MS, each))
    return device_ms(run, in_burst(BURST_MS, each))


def in_burst(lasts_ms: float, each_ms: float) -> int:
    """How many batches a part of a burst has."""
    return max(1, round(lasts_ms / each_ms))


def device_sustained(run: Callable[[], object]) -> float:
    """Milliseconds a call, after a second without a pause."""
    until = time.perf_counter() + SUSTAINED_S
    while time.perf_counter() < until:
        each = device_ms(run, 20)
    return device_ms(run, max(20, int(SUSTAINED_S * 1e3 / each)))


def device_ms(run: Callable[[], object], times: int) -> float:
    """Milliseconds on the device, by events around several calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def padded_runner(model: Any, batch: PackedBatch, size: int, pooling: str) -> Callable[[], object]:
    """The transformers model on padded batches of `size` sequences of like length."""
    lengths = np.diff(batch.cu_seqlens)
    order = np.argsort(-lengths, kind="stable")
    padded = []
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        ids = np.zeros((len(rows), int(lengths[rows].max())), np.int64)
        for i, row in enumerate(rows):
            ids[i, : lengths[row]] = batch.ids[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        mask = np.arange(ids.shape[1]) < lengths[rows][:, None]
        padded.append((torch.tensor(ids, device="cuda"), torch.tensor(mask, device="cuda")))

    def run() -> object:
        vectors = []
        for ids, mask in padded:
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = pooling == "mean"
            vectors.append((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) if mean else states[:, 0])
        return torch.cat(vectors)

    run()
    return run


def compare(ours: Embert, batch: PackedBatch, theirs: npt.NDArray[np.float32]) -> None:
    """End the program when the rival computes something else."""
    cosine = float((ours.ask("vectors", batch) * theirs).sum(axis=1).min())
    if cosine < 0.999:
        raise SystemExit(f"embert and the packed torch model disagree: cosine {cosine:.6f}")


def useful_flops(config: Any, lengths: npt.NDArray[np.int64]) -> float:
    """FLOPs of real tokens: the four matrix products of a layer and attention, whether pooling reads them or not."""
    hidden, inner = config.hidden_size, config.intermediate_size
    products = 2 * (4 * hidden * hidden + 2 * hidden * inner) * int(lengths.sum())
    return float(config.num_hidden_layers * (products + 4 * hidden * int((lengths**2).sum())))


def gemm_peak() -> float:
    """TFLOP/s of torch's own 8192³ product of random FP16 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    device_ms(lambda: a @ b, 3)
    time.sleep(REST_S)
    return 2 * 8192**3 / device_ms(lambda: a @ b, 20) * 1e-9


def driver_version() -> str:
    """The NVIDIA driver's version, as its module says."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().split("\n")[0].strip() if path.is_file() else "unknown"


if __name__ == "__main__":
    main()
