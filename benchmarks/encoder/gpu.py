"""The CUDA encoder next to its rivals on one GPU, from token ids, FP16 or the dtype that the encoder chooses.

    python -m benchmarks.encoder.gpu [--models base large mpnet minilm=FOLDER modernbert nomic-v1.5 gte-multilingual
        qwen3-0.6b embeddinggemma embeddinggemma-2] [--compile base:passage] [--gemm cublaslt]

embert is timed as a server uses it: numpy in, numpy out, two batches in flight, by wall clock from result to result, in
its own process. The rivals are timed on the device alone, with inputs already there: transformers (sdpa) on one
padded batch; transformers on padded batches of 32 sorted by length, as sentence-transformers runs it; packed torch
(varlen attention, no padding) as a replayed CUDA graph. --compile adds the first and the last through torch.compile,
the packed one with max-autotune; of models with rotary positions the packed one alone. Next to MPNet stands
transformers alone: varlen attention has no relative positions. Workloads of longer texts than a model reads are left
out for it. Useful FLOPs are those of real tokens, and of the keys that a window shows.

Rounds are interleaved, and figures are medians. Vectors are compared before anything is timed. Models
without a folder have random weights, stored in FP32 as most models are. Times are bursts after a rest (gpu_timing.py);
workloads named by --sustained are timed under sustained load as well.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from benchmarks.encoder.cuda_process import MAX_TOKENS, CudaProcess
from benchmarks.encoder.gpu_timing import device_burst, device_sustained, gemm_peak
from benchmarks.encoder.gpu_workloads import LATENCY, THROUGHPUT, lengths_of, model_folder, random_batch
from benchmarks.lib import record
from benchmarks.rivals.packed_torch import Packed, PackedBert, PackedDecoder, PackedRotary
from benchmarks.rivals.padded_transformers import POOLINGS, padded_runner
from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.flops import attention_flops, product_flops

COSINE = {"float16": 0.999, "bfloat16": 0.99}  # below it a rival computes something else
SORTED = 32  # sequences of a batch, as sentence-transformers forms them
# The rival without padding, by model_type; others have none.
PACKED: dict[str, type[Packed]] = {
    "bert": PackedBert,
    "nomic_bert": PackedRotary,
    "gte": PackedRotary,
    "modernbert": PackedRotary,
    "qwen3": PackedDecoder,
    "gemma3_text": PackedDecoder,
    "embedding_gemma2": PackedDecoder,
}

Runners = dict[str, Callable[[], Any]]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    peak = gemm_peak()
    print(f"8192³ FP16 matrix product (torch): {peak:.0f} TFLOP/s\n", flush=True)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "gemm_peak_tflops": peak,
        "rounds": options.rounds,
        "rows": [],
    }
    suffix = f"-{options.pooling}" if options.pooling else ""
    suffix += "-portable" if options.gemm == "cublaslt" else ""
    suffix += f"-{options.name}" if options.name else ""
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(name, Path(scratch))
            for row in _run_model(name.partition("=")[0], folder, options, peak):
                figures["rows"].append(row)
                # After each row, so that an interrupted run leaves its results.
                path = record.write(f"encoder-gpu{suffix}", figures)
    ratios = [row["ratio"] for row in figures["rows"]]
    print(f"\ngeometric mean of the ratios to the best rival: {statistics.geometric_mean(ratios):.2f}\nwritten: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.encoder.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--models",
        nargs="+",
        default=["base", "large"],
        help="base, large, narrow (MiniLM-L6's shape), mpnet or a name of benchmarks.lib.random_model.SHAPES, in FP32 "
        "or as base/float16; or name=FOLDER",
    )
    parser.add_argument("--workloads", nargs="+", default=[*THROUGHPUT, *LATENCY])
    parser.add_argument(
        "--compile",
        nargs="*",
        default=[],
        help="MODEL:WORKLOAD for which torch.compile is a rival too; it takes minutes",
    )
    parser.add_argument(
        "--sustained", nargs="*", default=["passage"], help="workloads to time under sustained load too"
    )
    parser.add_argument("--pooling", choices=POOLINGS, help="the mean; the last token of causal models")
    parser.add_argument(
        "--gemm", choices=("auto", "cublaslt"), default="auto", help="cublaslt: the path of GPUs other than Hopper"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="", help="of the results' file, after encoder-gpu")
    return parser


def _run_model(name: str, folder: Path, options: argparse.Namespace, peak: float) -> Iterator[dict[str, Any]]:
    """Compare, time and print all workloads of one model; yield the figures of each."""
    config = engine.load_model(str(folder), pooling="mean").config
    pooling = options.pooling or ("last-token" if config.causal else "mean")
    workloads = [each for each in options.workloads if lengths_of(each).max() <= config.max_positions]
    tokens = max([MAX_TOKENS, *(int(lengths_of(each).sum()) for each in workloads)])
    ours = CudaProcess(folder, pooling, max_tokens=tokens, gemm=options.gemm)
    ready, (weights, _, total) = ours.started
    print(
        f"\n{name}: ready in {ready:.2f} s in {ours.dtype}; weights {weights >> 20} MiB, beyond them "
        f"{(total - weights) >> 20} MiB"
    )
    packs = PACKED.get(transformers.AutoConfig.from_pretrained(folder).model_type)
    attention = "eager" if packs is None else "sdpa"  # transformers has no other for MPNet
    model: Any = transformers.AutoModel.from_pretrained(
        folder, dtype=getattr(torch, ours.dtype), attn_implementation=attention
    )
    model.config.use_cache = False  # decoders would keep the keys and values of all layers
    model = model.cuda().eval()
    packed = packs(model, pooling) if packs else None
    for workload in workloads:
        lengths = lengths_of(workload)
        batch = random_batch(lengths)
        compiled = f"{name}:{workload}" in options.compile
        with torch.inference_mode():
            runners, vectors = _rivals(model, packed, batch, pooling, compiled=compiled)
            _check_vectors_agree(ours, batch, vectors)
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
        tflops = _useful_flops(config, lengths) / ms["embert"] * 1e-9
        tokens = int(lengths.sum())
        row = {
            "model": name,
            "dtype": ours.dtype,
            "workload": workload,
            "tokens": tokens,
            "ms": ms,
            "sustained_ms": sustained,
            "alone_ms": latency,
            "submit_us": submit_us,
            "tokens_per_s": tokens / ms["embert"] * 1e3,
            "useful_tflops": tflops,
            "share_of_peak": tflops / peak,
            "ratio": _ratio(ms),
        }
        _print(row)
        yield row
    ours.close()


def _rivals(
    model: Any, packed: Packed | None, batch: PackedBatch, pooling: str, *, compiled: bool
) -> tuple[Runners, npt.NDArray[np.float32]]:
    """Return the rivals' calls by name, and the vectors of the best of them, float32 [B, width], normalized."""
    lengths = np.diff(batch.cu_seqlens)
    runners: Runners = {"transformers": padded_runner(model, batch, len(lengths), pooling)}
    if len(lengths) > SORTED:
        runners["sorted by 32"] = padded_runner(model, batch, SORTED, pooling)
    if packed is None:
        rows = runners["transformers"]().float()
        unsorted = np.argsort(np.argsort(-lengths, kind="stable"))
        vectors = torch.nn.functional.normalize(rows)[unsorted].cpu().numpy()
    else:
        runners["packed"], vectors = packed.graph(batch, compiled=False)
    if packed is not None and compiled:
        if isinstance(packed, PackedBert):
            torch._dynamo.reset()
            compiled_model = torch.compile(model, dynamic=False)
            runners["transformers compiled"] = padded_runner(compiled_model, batch, len(lengths), pooling)
        runners["packed compiled"], _ = packed.graph(batch, compiled=True)
    return runners, vectors


def _check_vectors_agree(ours: CudaProcess, batch: PackedBatch, theirs: npt.NDArray[np.float32]) -> None:
    """End the program when the rival computes something else."""
    cosine = float((ours.ask("vectors", batch) * theirs).sum(axis=1).min())
    if cosine < COSINE[ours.dtype]:
        raise SystemExit(f"embert and its rival disagree: cosine {cosine:.6f}")


def _ratio(ms: dict[str, float]) -> float:
    """Return the best rival's time over embert's."""
    return min(value for who, value in ms.items() if who != "embert") / ms["embert"]


def _print(row: dict[str, Any]) -> None:
    ms, sustained = row["ms"], row["sustained_ms"]
    print(
        f"{row['model']:7s} {row['workload']:11s} {row['tokens']:6d} tokens: "
        + ", ".join(f"{who} {value:.3f}" for who, value in ms.items())
        + f" ms; submit {row['submit_us']:.0f} us, to the result {row['alone_ms']:.3f} ms; "
        + f"{row['useful_tflops']:.0f} useful TFLOP/s; {row['ratio']:.2f}x the best rival",
        flush=True,
    )
    if sustained:
        tflops = row["useful_tflops"] * ms["embert"] / sustained["embert"]
        print(
            f"{row['model']:7s} {row['workload']:11s} sustained: "
            + ", ".join(f"{who} {value:.3f}" for who, value in sustained.items())
            + f" ms; {tflops:.0f} useful TFLOP/s; {_ratio(sustained):.2f}x the best rival",
            flush=True,
        )


def _useful_flops(config: EncoderConfig, lengths: npt.NDArray[np.int64]) -> float:
    """Return the FLOPs of real tokens: all matrix products and attention in every layer, whatever pooling reads."""
    return float(product_flops(config) * int(lengths.sum()) + int(attention_flops(config, lengths).sum()))


def _driver_version() -> str:
    """Return the version of the NVIDIA driver that is loaded."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().split("\n")[0].strip() if path.is_file() else "unknown"


if __name__ == "__main__":
    main()
