"""BERT-large at the lengths of MLPerf's offline scenario, in float16 and in int8, and the products it consists of.

    python -m benchmarks.mlperf [--seconds 1.5] [--rows 16384 32768] [--shapes large base minilm] [--products 0]

Samples have 178 tokens on average and at most 384, as SQuAD's have with MLPerf's limit: lengths are drawn from a
log-normal distribution cut to 30 … 384. Weights are random. Batches hold up to 16 384 tokens, two in flight, vectors of
the first token are copied to the host; the reference scenario's start and end logits cost as little. Bursts are those
of benchmarks.encoder.gpu_timing, sustained figures follow a second and a half of load. BERT-base's and MiniLM's shapes
run at the same lengths.

Products are beside torch's own: `_int_mm` (cuBLASLt's int8, INT32 out, no epilogue), `_scaled_mm` (cuBLASLt's FP8) and
FP16. Ours have their epilogues; quantizing x is timed apart. The feed-forward part is both products and quantizing its
rows, whose inner rows pass in 8 bits.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encoder.gpu_timing import BURST_MS, REST_S, WAKE_UP_MS, device_burst, device_sustained
from benchmarks.kernels.device_timer import Recorded, Timing
from benchmarks.lib import record
from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder

# Hidden size, heads, inner size, layers.
SHAPES = {"large": (1024, 16, 4096, 24), "base": (768, 12, 3072, 12), "minilm": (384, 12, 1536, 6)}
MEAN, SHORTEST, LONGEST = 178, 30, 384  # tokens of a sample
TOKENS = 16384  # of a batch
BATCHES = 12  # different ones
NONE, GELU = 0, 1
EPSILON = 1e-12
# In, out, activation, whether there is a residual.
PRODUCTS = ((1024, 4096, GELU, False), (4096, 1024, NONE, True), (1024, 3072, NONE, False), (1024, 1024, NONE, True))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.mlperf", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="of load, before and while it is timed")
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 32768], help="of the products")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["large"])
    parser.add_argument("--products", type=int, default=len(PRODUCTS), help="how many of the products; 0: none")
    parser.add_argument("--bursts", action="store_true", help="nothing sustained")
    parser.add_argument("--no-model", action="store_true")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {}
    if options.products:
        figures["products"] = [
            each for rows in options.rows for each in products(rows, options.products, options.bursts)
        ]
        _print_products(figures["products"])
        figures["feed_forward"] = [
            each for rows in options.rows for each in feed_forwards(rows, options.shapes, options.bursts)
        ]
        record.print_table(
            ["rows", "shape", "us, bursts", "us, sustained"],
            [[str(value) for value in each.values()] for each in figures["feed_forward"]],
        )
    if not options.no_model:
        figures["model"] = [
            each for shape in options.shapes for each in model(shape, 0 if options.bursts else options.seconds)
        ]
        record.print_table(
            ["shape", "dtype", "samples/s, bursts", "sustained", "tokens a sample", "worst cosine to float16"],
            [[str(value) for value in each.values()] for each in figures["model"]],
        )
    print(record.write("mlperf", figures))


def lengths(samples: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of so many samples, MEAN on average."""
    drawn = np.exp(np.random.default_rng(seed).standard_normal(samples) * 0.38)
    scale = float(MEAN)
    for _ in range(20):  # cutting moves the mean
        cut = np.clip(np.rint(drawn * scale), SHORTEST, LONGEST)
        scale *= MEAN / cut.mean()
    return cut.astype(np.int64)


def batches() -> list[PackedBatch]:
    """As many samples as fit in each, at random ids."""
    random = np.random.default_rng(1)
    left = list(lengths(BATCHES * TOKENS // MEAN * 2))
    made = []
    for _ in range(BATCHES):
        taken = [0]
        while taken[-1] + left[-1] <= TOKENS:
            taken.append(taken[-1] + int(left.pop()))
        made.append(PackedBatch(random.integers(1000, 30000, taken[-1]).astype(np.int32), np.array(taken, np.int32)))
    return made


def random_model(folder: Path, shape: str) -> Path:
    """A folder with the shape and random weights in float32, LayerNorms that are no identities."""
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
    config.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"architectures": ["BertModel"]})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(
            {"word_embedding_dimension": hidden, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        )
    )
    return folder


def model(shape: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Samples a second of float16 and of int8, interleaved: medians of five bursts and of two loads."""
    work = batches()
    samples = sum(each.sequences for each in work)
    tokens = sum(len(each.ids) for each in work)
    with tempfile.TemporaryDirectory() as folder:
        loaded = engine.load_model(str(random_model(Path(folder), shape)))
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
    """What each encoder's runs give, one of each in every turn: a GPU's speed changes in the meantime."""
    found: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(rounds):
        for name, encoder in encoders.items():
            found[name].append(run(encoder))
    return found


def _stream(encoder: CudaEncoder, work: Sequence[PackedBatch]) -> Generator[int]:
    """Runs batches for ever, two in flight; yields each one's samples when it is done."""
    flying = []
    at = 0
    while True:
        batch = work[at % len(work)]
        flying.append((encoder.submit(batch), batch.sequences))
        at += 1
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


def products(rows: int, count: int, bursts: bool) -> Iterator[dict[str, Any]]:
    """Microseconds of each product, ours and torch's, in bursts and sustained."""
    for in_, out, activation, adds in PRODUCTS[:count]:
        us = {}
        for name, recorded in _ours(rows, in_, out, activation, adds).items():
            us[name] = (
                recorded.us(Timing(REST_S, 3, sustained=False)),
                math.nan if bursts else recorded.us(Timing(REST_S, 1, sustained=True)),
            )
        for name, run in _theirs(rows, in_, out):
            us[name] = device_burst(run) * 1e3, math.nan if bursts else device_sustained(run) * 1e3
        yield {"rows": rows, "in": in_, "out": out, "residual": adds, "us": us}


def feed_forwards(rows: int, shapes: Sequence[str], bursts: bool) -> Iterator[dict[str, Any]]:
    """Microseconds of int8's feed-forward part: quantizing x, and both products."""
    testing = importlib.import_module("embert.engine._cuda_testing")
    device = torch.device("cuda")
    for shape in shapes:
        hidden, _, inner, _ = SHAPES[shape]
        x = torch.randn(rows, hidden, dtype=torch.float16, device=device)
        sums = torch.stack([torch.zeros(rows, 8, device=device), torch.full((rows, 8), 128.0, device=device)], 2)
        matrices = [torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device) for n, k in
                    ((inner, hidden), (hidden, inner))]  # fmt: skip
        vectors = [(torch.rand(n, device=device) * 1e-3, torch.randn(n, device=device) * 0.2) for n in (inner, hidden)]
        norm = torch.ones(hidden, device=device), torch.zeros(hidden, device=device)
        data = torch.empty(rows, inner, dtype=torch.int8, device=device)
        scales, between = torch.empty(rows, device=device), torch.empty(rows, inner, dtype=torch.float16, device=device)
        y, y_stats = torch.empty_like(x), torch.empty(rows, 16, device=device)
        torch.cuda.synchronize()
        bench = testing.Bench()
        bench.dependent_launch(True)
        both = bench.int8_feed_forward(
            *[[each.data_ptr() for each in (matrix, *its)] for matrix, its in zip(matrices, vectors, strict=True)],
            hidden, inner, GELU, [each.data_ptr() for each in norm * 2], EPSILON, data.data_ptr(), scales.data_ptr(),
        )  # fmt: skip
        pointers = [each.data_ptr() for each in (between, y, y_stats)]
        recorded = Recorded(bench, _launching(both, bench, x.data_ptr(), sums.data_ptr(), 1, rows, *pointers))
        yield {
            "rows": rows,
            "shape": shape,
            "burst": round(recorded.us(Timing(REST_S, 3, sustained=False)), 1),
            "sustained": math.nan if bursts else round(recorded.us(Timing(REST_S, 1, sustained=True)), 1),
        }


def _launching(both: Any, bench: Any, *arguments: int) -> Callable[[int], None]:
    def run(_: int) -> None:
        both.run(bench, *arguments)

    return run


class _Operands:
    """What our products read and write, on the device, and how each is launched on a Bench."""

    def __init__(self, rows: int, in_: int, out: int, activation: int, adds: bool) -> None:
        device = torch.device("cuda")
        self._size, self._activation, self._adds = (rows, in_, out), activation, adds
        self._weight = torch.randint(-127, 128, (out, in_), dtype=torch.int8, device=device)
        self._half = torch.randn(out, in_, dtype=torch.float16, device=device) / in_**0.5
        self._scales, self._bias = torch.rand(out, device=device) * 1e-3, torch.randn(out, device=device)
        self._gamma, self._beta = torch.ones(max(in_, out), device=device), torch.zeros(max(in_, out), device=device)
        self._x = torch.randn(rows, in_, dtype=torch.float16, device=device)
        self._residual = torch.randn(rows, out, dtype=torch.float16, device=device)
        self._sums = torch.stack([torch.zeros(rows, 8, device=device), torch.full((rows, 8), 128.0, device=device)], 2)
        self._data = torch.empty(rows, in_, dtype=torch.int8, device=device)
        self._row_scales = torch.empty(rows, device=device)
        self._y, self._y_sums = (
            torch.empty(rows, out, dtype=torch.float16, device=device),
            torch.empty(rows, 16, device=device),
        )
        torch.cuda.synchronize()

    def quantize(self, bench: Any) -> Callable[[int], None]:
        """Quantizing x, after its LayerNorm where a layer has one there."""
        rows, in_, _ = self._size
        normed = in_ <= 1024 and not self._adds

        def run(_: int) -> None:
            bench.quantize(
                self._x.data_ptr(), self._sums.data_ptr() if normed else 0, 1, self._gamma.data_ptr(),
                self._beta.data_ptr(), rows, in_, EPSILON, self._data.data_ptr(), self._row_scales.data_ptr(),
            )  # fmt: skip

        return run

    def int8(self, bench: Any) -> Callable[[int], None]:
        """The product of rows that are quantized already."""
        rows, in_, out = self._size
        adds, weight = self._adds, self._weight.data_ptr()
        self.quantize(bench)(0)
        product = bench.int8_product(
            weight, self._scales.data_ptr(), self._bias.data_ptr(), out, in_, self._activation,
            self._gamma.data_ptr() if adds else 0, self._beta.data_ptr() if adds else 0, adds, EPSILON,
            self._data.data_ptr(), self._row_scales.data_ptr(),
        )  # fmt: skip

        def run(_: int) -> None:
            product.run(
                bench, 0, 0, self._residual.data_ptr() if adds else 0, self._sums.data_ptr() if adds else 0, 1, rows,
                self._y.data_ptr(), self._y_sums.data_ptr() if adds else 0,
            )  # fmt: skip

        return run

    def float16(self, bench: Any) -> Callable[[int], None]:
        """The product in float16."""
        rows, in_, out = self._size
        product = bench.product(
            "hopper", "", 1, self._half.data_ptr(), self._bias.data_ptr(), out, in_, self._activation
        )
        residual = self._residual.data_ptr() if self._adds else 0
        return lambda _: product.run(bench, self._x.data_ptr(), residual, rows, self._y.data_ptr())


def _ours(rows: int, in_: int, out: int, activation: int, adds: bool) -> dict[str, Recorded]:
    """Our products and what quantizes their rows."""
    testing = importlib.import_module("embert.engine._cuda_testing")
    operands = _Operands(rows, in_, out, activation, adds)
    ways = {"int8": operands.int8, "float16": operands.float16}
    if not adds or in_ <= out:  # inner rows come in 8 bits
        ways["quantize"] = operands.quantize
    made = {}
    for name, start in ways.items():
        bench = testing.Bench()
        bench.dependent_launch(True)
        made[name] = Recorded(bench, start(bench))
    return made


def _theirs(rows: int, in_: int, out: int) -> Iterator[tuple[str, Callable[[], object]]]:
    device = torch.device("cuda")
    a = torch.randint(-127, 128, (rows, in_), dtype=torch.int8, device=device)
    b = torch.randint(-127, 128, (out, in_), dtype=torch.int8, device=device)
    yield "torch int8", lambda: torch._int_mm(a, b.t())
    x, w = (torch.randn(n, in_, device=device).to(torch.float8_e4m3fn) for n in (rows, out))
    one = torch.ones((), device=device)
    yield (
        "torch FP8",
        lambda: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True),
    )
    half_x, half_w = (torch.randn(n, in_, device=device, dtype=torch.float16) for n in (rows, out))
    yield "torch FP16", lambda: half_x @ half_w.t()


def _print_products(measured: Sequence[dict[str, Any]]) -> None:
    lines = []
    for each in measured:
        operations = 2e-6 * each["rows"] * each["in"] * each["out"]  # T, over microseconds
        for name, (burst, sustained) in each["us"].items():
            lines.append(
                [
                    f"{each['rows']}x{each['in']}x{each['out']}",
                    name,
                    f"{burst:.1f}",
                    f"{operations / burst:.0f}",
                    f"{sustained:.1f}",
                    f"{operations / sustained:.0f}",
                ]
            )
    record.print_table(["product", "way", "us, bursts", "TOP/s", "us, sustained", "TOP/s"], lines)


if __name__ == "__main__":
    main()
