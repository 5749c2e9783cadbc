"""Each kernel of the CUDA encoder next to the hardware's limit, and each matrix product next to cuBLASLt and CUTLASS.

    python -m benchmarks.kernels.roofline [--tokens 4096 16384 65536] [--rest 0.3] [--rounds 5] [--sustained]

A kernel's floor (its roofline) is the larger of two times: its bytes at the speed of a copy, and its FLOPs at the speed
of the fastest product, both measured in the same run. Kernels are timed as CUDA graphs of ten launches, over inputs in
rotation so that the cache holds none of them: in bursts with a rest before each, or with --sustained after a second of
the same work, at the GPU's power limit. Kernels have BERT-base's shapes unless options say otherwise; products with a
bias only have those of BERT-base, BERT-large and MiniLM. CUTLASS takes part where nvcc and the headers of the package
nvidia-cutlass are installed; compiling it takes a few minutes, once.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import gemm
from benchmarks.kernels.device_timer import LAUNCHES, Recorded, Timing
from benchmarks.kernels.gemm import Measured, Shape
from benchmarks.lib import record

FLOAT16 = 1
GELU = 1
MEAN = 1
ROTATED_BYTES = 200_000_000
SMALL_K = 1024  # geometric means are of all products, and of those up to this K
RIVALS = ("cuBLASLt", "CUTLASS", "cuBLASLt tanh GELU", "CUTLASS tanh GELU")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's time, and the work that it cannot avoid."""

    kernel: str
    tokens: int
    us: float
    moved: float  # bytes
    flops: float = 0.0


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    testing = importlib.import_module("embert.engine._cuda_testing")
    gpu, capability, _ = importlib.import_module("embert.engine._cuda").device_info(0)
    timing = Timing(options.rest, options.rounds, options.sustained)
    hidden, inner = options.hidden, options.inner
    layer = (
        Shape(hidden, 3 * hidden, "bias", "QKV"),
        Shape(hidden, hidden, "residual", "attention out"),
        Shape(hidden, inner, "GELU", "FFN in"),
        Shape(inner, hidden, "residual", "FFN out"),
    )
    rivals = gemm.cutlass_kernels(capability == 90)
    kernels: list[Kernel] = []
    measured: list[Measured] = []
    for tokens in options.tokens:
        kernels += _kernels(testing, options, tokens, timing, capability == 90)
        of_layer = [gemm.measure(shape, tokens, rivals, timing) for shape in layer]
        bias_only = [gemm.measure(shape, tokens, rivals, timing) for shape in gemm.BERT]
        measured += of_layer + bias_only
        bytes_a_us = max(kernel.moved / kernel.us for kernel in kernels if kernel.kernel == "copy")
        peak = max(each.flops / us for each in measured for us in each.us.values())
        print(f"\n{tokens} tokens; copy {bytes_a_us / 1e6:.2f} TB/s; fastest product yet {peak / 1e6:.0f} TFLOP/s\n")
        _print_floors([kernel for kernel in kernels if kernel.tokens == tokens], of_layer, bytes_a_us, peak)
        print()
        _print_products(of_layer + bias_only)
        figures = {
            "gpu": gpu,
            **vars(options),
            "copy_tb_a_s": bytes_a_us / 1e6,
            "peak_tflops": peak / 1e6,
            "kernels": [asdict(kernel) for kernel in kernels],
            "products": [asdict(each) for each in measured],
            "geometric_means": _means([each for each in measured if each.shape in gemm.BERT]),
        }
        # After each size, so that an interrupted run leaves its results.
        path = record.write("kernels-sustained" if options.sustained else "kernels", figures)
    print("\nTimes as long as ours, geometric means over the products with a bias only:\n")
    means = figures["geometric_means"]
    record.print_table(
        ["products", "rival", *(f"{tokens} tokens" for tokens in options.tokens), "all"],
        [
            [
                name,
                rival,
                *(_times(means[name][rival][str(tokens)]) for tokens in options.tokens),
                _times(of_all["all"]),
            ]
            for name, of_name in means.items()
            for rival, of_all in of_name.items()
        ],
    )
    print(f"\nwritten: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.roofline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--inner", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds before each burst")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sustained", action="store_true", help="a second of load before each burst instead of a rest")
    return parser


def _kernels(
    testing: Any, options: argparse.Namespace, tokens: int, timing: Timing, is_hopper: bool
) -> Iterator[Kernel]:
    """Time a copy and every kernel that is not a matrix product."""
    hidden, inner, heads, length = options.hidden, options.inner, options.heads, options.length
    wide = max(3 * hidden, inner)
    sets = min(LAUNCHES, max(2, math.ceil(ROTATED_BYTES / (2 * tokens * hidden))))
    big, out = ([_random(tokens, wide) for _ in range(sets)] for _ in range(2))
    small = [_random(tokens, hidden) for _ in range(sets)]
    words, places, kinds = _random(30000, hidden), _random(512, hidden), _random(2, hidden)
    vector = torch.randn(hidden, device="cuda")  # FP32, as the encoder keeps biases and LayerNorms
    ids = _integers(np.random.default_rng(0).integers(0, 30000, tokens))
    positions, zeros = _integers(np.arange(tokens) % length), _integers(np.zeros(tokens))
    sequences = tokens // length
    starts = np.arange(sequences) * length
    cu_seqlens, cuts = _integers(np.append(starts, sequences * length)), _integers(np.zeros(sequences))
    queries = range(0, length, 64 if length > 32 else length)
    tiles = _integers(np.array([(start, length, query, 0) for start in starts for query in queries]))
    work = (tiles.data_ptr(), len(tiles), 0, 0) if length > 32 else (0, 0, tiles.data_ptr(), len(tiles))
    vectors = torch.empty(sequences, hidden, device="cuda")
    torch.cuda.synchronize()
    gamma = beta = vector.data_ptr()

    def timed(name: str, launch: Callable[[Any, int], None], moved: float, flops: float = 0.0) -> Kernel:
        bench = testing.Bench()
        us = Recorded(bench, lambda i: launch(bench, i % sets)).us(timing)
        return Kernel(name, tokens, us, moved, flops)

    def embed(bench: Any, i: int) -> None:
        tables = (words.data_ptr(), places.data_ptr(), kinds.data_ptr(), gamma, beta)
        of_tokens = (ids.data_ptr(), zeros.data_ptr(), positions.data_ptr())
        bench.embed(FLOAT16, *tables, *of_tokens, tokens, hidden, 1e-12, out[i].data_ptr(), 0, False)

    def layernorm(bench: Any, i: int) -> None:
        x, y = small[i].data_ptr(), out[i].data_ptr()
        bench.layernorm(FLOAT16, x, gamma, beta, tokens, hidden, 1e-12, y)

    def activate(bench: Any, i: int) -> None:
        bench.activate(FLOAT16, GELU, tokens, inner, out[i].data_ptr())

    def attention(bench: Any, i: int) -> None:
        qkv, context = big[i].data_ptr(), out[i].data_ptr()
        bench.attention(FLOAT16, qkv, tokens, *work, heads, hidden // heads, context, is_hopper)

    def pool(bench: Any, i: int) -> None:
        x, at = small[i].data_ptr(), cu_seqlens.data_ptr()
        bench.pool(FLOAT16, MEAN, x, at, cuts.data_ptr(), sequences, hidden, vectors.data_ptr())

    def copy(bench: Any, i: int) -> None:
        bench.copy(out[i].data_ptr(), big[i].data_ptr(), 2 * tokens * wide)

    row = 2 * tokens * hidden  # bytes
    yield timed("copy", copy, 4 * tokens * wide)
    yield timed("embedding + LayerNorm", embed, 2 * row)
    yield timed("LayerNorm", layernorm, 2 * row)
    yield timed("GELU", activate, 4 * tokens * inner)
    yield timed(f"attention, length {length}", attention, 4 * row, 4.0 * tokens * length * hidden)
    yield timed("mean pooling", pool, row)


def _print_floors(kernels: Sequence[Kernel], layer: Sequence[Measured], bytes_a_us: float, peak: float) -> None:
    rows = [(kernel.kernel, kernel.us, kernel.moved, kernel.flops) for kernel in kernels]
    rows += [(str(each.shape), each.us["embert"], each.moved, each.flops) for each in layer if "embert" in each.us]
    table = []
    for name, us, moved, flops in rows:
        floor = max(moved / bytes_a_us, flops / peak)
        rates = f"{moved / us / 1e6:.2f}", f"{flops / us / 1e6:.0f}" if flops else "-"
        table.append([name, f"{us:.1f}", f"{floor:.1f}", f"{us / floor:.2f}", *rates])
    record.print_table(["kernel", "us", "floor us", "times the floor", "TB/s", "TFLOP/s"], table)


def _print_products(measured: Sequence[Measured]) -> None:
    """Print TFLOP/s of the products, and the number of kernels where a library launches more than one."""

    def rate(each: Measured, who: str) -> str:
        if who not in each.us:
            return "-"
        kernels = f" ({each.kernels[who]:.0f} kernels)" if each.kernels[who] > 1 else ""
        return f"{each.flops / each.us[who] / 1e6:.0f}{kernels}"

    record.print_table(
        ["TFLOP/s of", "embert", *RIVALS, "CUTLASS's schedule", "to cuBLASLt", "to CUTLASS"],
        [
            [
                str(each.shape),
                *(rate(each, who) for who in ("embert", *RIVALS)),
                each.cutlass or "-",
                _times(each.ratio("cuBLASLt")),
                _times(each.ratio("CUTLASS")),
            ]
            for each in measured
        ],
    )


def _means(measured: Sequence[Measured]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return geometric means of the rivals' times over embert's: by products, rival, and tokens or "all"."""
    by_tokens = {str(each.tokens): [one for one in measured if one.tokens == each.tokens] for each in measured}
    groups = {**by_tokens, "all": list(measured)}
    return {
        name: {
            rival: {key: gemm.geometric_mean(group, rival, most_in) for key, group in groups.items()}
            for rival in ("cuBLASLt", "CUTLASS")
        }
        for name, most_in in (("all", None), (f"K <= {SMALL_K}", SMALL_K))
    }


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def _integers(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


if __name__ == "__main__":
    main()
