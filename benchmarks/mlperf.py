"""BERT's shapes at the lengths of MLPerf's offline scenario, in float16 and in int8.

    python -m benchmarks.mlperf [--seconds 1.5] [--shapes large base minilm]

Samples have 178 tokens on average and at most 384, as SQuAD's have with MLPerf's limit: lengths are drawn from a
log-normal distribution cut to 30 … 384. Weights are random. Batches hold up to 16 384 tokens, two in flight, vectors of
the first token are copied to the host; the reference scenario's start and end logits cost as little. Bursts are those
of benchmarks.encoder.gpu_timing, sustained figures follow a second and a half of load.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encoder.gpu_timing import BURST_MS, REST_S, WAKE_UP_MS
from benchmarks.lib import record
from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder

# Hidden size, heads, inner size, layers.
SHAPES = {"large": (1024, 16, 4096, 24), "base": (768, 12, 3072, 12), "minilm": (384, 12, 1536, 6)}
MEAN, SHORTEST, LONGEST = 178, 30, 384  # tokens of a sample
TOKENS = 16384  # of a batch
BATCHES = 12  # different ones


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.mlperf", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of load, before and while it is timed; 0: bursts only"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["large"])
    options = parser.parse_args(argv)
    rows = [row for shape in options.shapes for row in model(shape, options.seconds)]
    record.print_table(
        ["shape", "dtype", "samples/s, bursts", "sustained", "tokens a sample", "worst cosine to float16"],
        [[str(value) for value in row.values()] for row in rows],
    )
    print(record.write("mlperf", {"model": rows}))


def lengths(samples: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of this many samples, MEAN on average."""
    drawn = np.exp(np.random.default_rng(seed).standard_normal(samples) * 0.38)
    scale = float(MEAN)
    for _ in range(20):  # cutting moves the mean
        cut = np.clip(np.rint(drawn * scale), SHORTEST, LONGEST)
        scale *= MEAN / cut.mean()
    return cut.astype(np.int64)


def batches() -> list[PackedBatch]:
    """Fill each batch with samples at random ids."""
    random = np.random.default_rng(1)
    left = list(lengths(BATCHES * TOKENS // MEAN * 2))
    packed = []
    for _ in range(BATCHES):
        taken = [0]
        while taken[-1] + left[-1] <= TOKENS:
            taken.append(taken[-1] + int(left.pop()))
        packed.append(PackedBatch(random.integers(1000, 30000, taken[-1]).astype(np.int32), np.array(taken, np.int32)))
    return packed


def random_model(folder: Path, shape: str) -> Path:
    """A folder with the shape and random weights in float32, LayerNorms that are not identities."""
    import safetensors.torch
    import transformers

    hidden, heads, inner, layers = SHAPES[shape]
    config = transformers.BertConfig(
        hidden_size=hidden, num_attention_heads=heads, intermediate_size=inner, num_hidden_layers=layers
    )
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in transformers.BertModel(config).named_parameters()}
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {}
    for name, size in shapes.items():
        drawn = torch.randn(size, generator=generator, device="cuda") * 0.02
        tensors[name] = (drawn * 5 + 1 if name.endswith("LayerNorm.weight") else drawn).cpu()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config.architectures = ["BertModel"]
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def model(shape: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Samples a second of float16 and of int8, interleaved: medians of five bursts and of two loads."""
    work = batches()
    samples = sum(each.sequences for each in work)
    tokens = sum(len(each.ids) for each in work)
    with tempfile.TemporaryDirectory() as folder:
        loaded = engine.load_model(str(random_model(Path(folder), shape)), pooling="cls")
        encoders = {dtype: CudaEncoder(loaded, dtype=dtype, max_batch_tokens=TOKENS) for dtype in ("float16", "int8")}
    vectors = {dtype: encoder.encode(work[0]) for dtype, encoder in encoders.items()}
    bursts = _interleaved(encoders, 5, lambda encoder: _burst(encoder, work))
    loads = _interleaved(encoders, 2 if seconds else 0, lambda encoder: _sustained(encoder, work, seconds))
    for dtype, encoder in encoders.items():
        encoder.close()
        yield {
            "shape": shape,
            "dtype": dtype,
            "burst": round(statistics.median(bursts[dtype])),
            "sustained": round(statistics.median(loads[dtype])) if seconds else 0,
            "tokens": round(tokens / samples, 1),
            "worst_cosine": round(float((vectors[dtype] * vectors["float16"]).sum(1).min()), 5),
        }


def _interleaved(
    encoders: Mapping[str, CudaEncoder], rounds: int, run: Callable[[CudaEncoder], float]
) -> dict[str, list[float]]:
    """Results of each encoder's runs, one of each in every turn: a GPU's speed changes in the meantime."""
    results: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(rounds):
        for name, encoder in encoders.items():
            results[name].append(run(encoder))
    return results


def _stream(encoder: CudaEncoder, work: Sequence[PackedBatch]) -> Generator[int]:
    """Runs batches for ever, two in flight; yields each one's samples when it is done."""
    flying = []
    index = 0
    while True:
        batch = work[index % len(work)]
        flying.append((encoder.submit(batch), batch.sequences))
        index += 1
        if len(flying) == 2:
            ticket, count = flying.pop(0)
            encoder.wait(ticket)
            try:
                yield count
            except GeneratorExit:
                for ticket, _ in flying:
                    encoder.wait(ticket)
                return


def _burst(encoder: CudaEncoder, work: Sequence[PackedBatch]) -> float:
    """Samples a second after a rest and as long a wake-up as any burst has."""
    time.sleep(REST_S)
    stream = _stream(encoder, work)
    start = time.perf_counter()
    while time.perf_counter() < start + WAKE_UP_MS / 1e3:
        next(stream)
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + BURST_MS / 1e3:
        count += next(stream)
    lasted = time.perf_counter() - start
    stream.close()
    return count / lasted


def _sustained(encoder: CudaEncoder, work: Sequence[PackedBatch], seconds: float) -> float:
    stream = _stream(encoder, work)
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        next(stream)
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        count += next(stream)
    lasted = time.perf_counter() - start
    stream.close()
    return count / lasted


if __name__ == "__main__":
    main()
