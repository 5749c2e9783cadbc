"""What encoders newer than BERT ask of the kernels, beside the same without it and beside what it replaces.

    python -m benchmarks.kernels.newer [--tokens 1024 16384] [--lengths 512 8192] [--rest 0.3] [--rounds 5]

Products: QKV that turns queries and keys, inner products that gate, and the residual of pre-norm models; beside the
plain product of the same size, and beside the plain product with a kernel after it, as other GPUs run it. Attention: a
window of 64 keys on each side, and tiles of 128 queries; beside all keys, tiles of 64 queries, the portable kernel, and
torch's flash attention. Results are compared before anything is timed. FP16, Hopper.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.device_timer import LAUNCHES, Recorded, Timing, take_turns
from benchmarks.lib import record

FLOAT16 = 1
NONE, GELU, SILU = 0, 1, 4
HEAD = 64
WINDOW = 64
ROTATED_BYTES = 200_000_000  # of inputs and outputs in rotation: more than the cache holds
MAX_ERROR = 1e-3  # relative; one rounding to FP16 is 2e-4, and a kernel after the product rounds twice

Launch = Callable[[Any, int], None]  # on a Bench, for its i-th set of inputs


@dataclass(frozen=True, slots=True)
class Kernels:
    """Microseconds of the ways to compute one thing, ours first."""

    name: str
    tokens: int
    flops: float  # of what is asked for
    moved: float  # bytes that ours must read or write
    us: Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    options = _parser().parse_args(argv)
    timing = Timing(options.rest, options.rounds, sustained=False)
    measured: list[Kernels] = []
    for tokens in options.tokens:
        measured += _products(tokens, timing)
    for length in options.lengths:
        measured += _attention(max(options.tokens), length, options.heads, timing)
    record.print_table(
        ["kernel", "tokens", "way", "us", "TFLOP/s", "TB/s", "times ours"],
        [
            [
                each.name,
                str(each.tokens),
                way,
                f"{us:.1f}",
                f"{each.flops / us / 1e6:.0f}",
                f"{each.moved / us / 1e6:.2f}",
                f"{us / next(iter(each.us.values())):.2f}",
            ]
            for each in measured
            for way, us in each.us.items()
        ],
    )
    figures = {"gpu": torch.cuda.get_device_name(), **vars(options), "kernels": [asdict(each) for each in measured]}
    print(f"\nwritten: {record.write('kernels-newer', figures)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.newer", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192], help="of texts, for attention")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds before each burst")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def _products(tokens: int, timing: Timing) -> Iterator[Kernels]:
    for hidden in (768, 1024):
        yield _turned(tokens, hidden, timing)
    for name, hidden, inner, activation in (
        ("nomic's gates", 768, 3072, SILU),
        ("ModernBERT-base's gates", 768, 1152, GELU),
        ("ModernBERT-large's gates", 1024, 2624, GELU),
    ):
        yield _gated(name, tokens, hidden, inner, activation, timing)
    for hidden, inner in ((768, 768), (768, 1152)):
        yield _residual(tokens, hidden, inner, timing)


def _turned(tokens: int, hidden: int, timing: Timing) -> Kernels:
    of = _Operands(tokens, 3 * hidden, hidden, 3 * hidden)
    angles = torch.rand(8192, HEAD // 2, device="cuda") * 2 * math.pi
    table = torch.stack([angles.cos(), angles.sin()], dim=-1).contiguous()
    positions = torch.randint(0, 8192, (tokens,), device="cuda", dtype=torch.int32)
    turns = (HEAD, HEAD, 2 * hidden, table.data_ptr(), positions.data_ptr())
    turned = of.launch(head_size=HEAD, turned=HEAD, turned_columns=2 * hidden, table=turns[3], positions=turns[4])
    plain = of.launch()

    def apart(bench: Any, i: int) -> None:
        plain(bench, i)
        bench.turn(FLOAT16, of.y[i].data_ptr(), tokens, 3 * hidden, *turns)

    return of.measured(
        f"QKV {hidden}, turned",
        {"turned": turned, "then turned": apart},
        {"plain": plain},
        timing,
        8.0 * tokens * HEAD // 2,
    )


def _gated(name: str, tokens: int, hidden: int, inner: int, activation: int, timing: Timing) -> Kernels:
    of = _Operands(tokens, 2 * inner, hidden, inner)
    gates = torch.empty(tokens, 2 * inner, device="cuda", dtype=torch.float16)
    product = of.launch(to=gates)

    def apart(bench: Any, i: int) -> None:
        product(bench, i)
        bench.gate(FLOAT16, activation, gates.data_ptr(), tokens, inner, of.y[i].data_ptr())

    gated = of.launch(out=inner, activation=activation, gated=True)
    return of.measured(name, {"gated": gated, "then gated": apart}, {"plain": product}, timing)


def _residual(tokens: int, hidden: int, inner: int, timing: Timing) -> Kernels:
    of = _Operands(tokens, hidden, inner, hidden)
    residual = torch.randn(tokens, hidden, device="cuda", dtype=torch.float16)
    sums = torch.empty(tokens * 8 * 8, 2, device="cuda")
    with_sums = of.launch(residual=residual, y_sums=sums)
    return of.measured(
        f"pre-norm residual {inner} to {hidden}",
        {"with sums": with_sums, "without": of.launch(residual=residual)},
        {"no residual": of.launch()},
        timing,
        2.0 * tokens * hidden,
    )


class _Operands:
    """Weights of a product, and several sets of x and y in rotation."""

    def __init__(self, tokens: int, w_rows: int, in_: int, out: int) -> None:
        self.tokens, self.w_rows, self.in_, self.out = tokens, w_rows, in_, out
        sets = min(LAUNCHES, max(2, math.ceil(ROTATED_BYTES / (2 * tokens * (in_ + out)))))
        self.x = [torch.randn(tokens, in_, device="cuda", dtype=torch.float16) for _ in range(sets)]
        self.y = [torch.zeros(tokens, out, device="cuda", dtype=torch.float16) for _ in range(sets)]
        self.weight = torch.randn(w_rows, in_, device="cuda", dtype=torch.float16) * in_**-0.5
        self.bias = torch.randn(w_rows, device="cuda")

    def launch(
        self,
        out: int = 0,
        activation: int = NONE,
        to: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        y_sums: torch.Tensor | None = None,
        **more: Any,
    ) -> Launch:
        """A launch of our product; it is made at the first one."""
        product: list[Any] = []

        def run(bench: Any, i: int) -> None:
            if not product:
                weight, bias = self.weight.data_ptr(), self.bias.data_ptr()
                of = (weight, bias, out or self.w_rows, self.in_, activation)
                product.append(bench.product("hopper", "", FLOAT16, *of, **more))
            y = (self.y[i] if to is None else to).data_ptr()
            rest = 0 if residual is None else residual.data_ptr()
            sums = 0 if y_sums is None else y_sums.data_ptr()
            product[0].run(bench, self.x[i].data_ptr(), rest, self.tokens, y, y_sums=sums)

        return run

    def measured(
        self, name: str, ways: Mapping[str, Launch], others: Mapping[str, Launch], timing: Timing, more: float = 0.0
    ) -> Kernels:
        """Times of ways to one result, which must agree, and of others. `more`: bytes beside x, W and y."""
        _agree(name, ways, self.y[0])
        us = _timed({**ways, **others}, len(self.x), timing)
        moved = 2.0 * (self.tokens * (self.in_ + self.out) + self.w_rows * self.in_) + more
        return Kernels(name, self.tokens, 2.0 * self.tokens * self.w_rows * self.in_, moved, us)


def _attention(tokens: int, length: int, heads: int, timing: Timing) -> Iterator[Kernels]:
    texts = max(1, tokens // length)
    rows, hidden = texts * length, heads * HEAD
    sets = min(LAUNCHES, max(2, math.ceil(ROTATED_BYTES / (8 * rows * hidden))))
    qkv = [torch.randn(rows, 3 * hidden, device="cuda", dtype=torch.float16) for _ in range(sets)]
    context = [torch.zeros(rows, hidden, device="cuda", dtype=torch.float16) for _ in range(sets)]
    of_tiles = [(text * length, length, query, 0) for text in range(texts) for query in range(0, length, 64)]
    tiles = torch.from_numpy(np.array(of_tiles, np.int32)).cuda()
    work = (tiles.data_ptr(), len(of_tiles), 0, 0)

    def ours(hopper: bool = True, window: int = 0, longest: int = 0) -> Launch:
        def run(bench: Any, i: int) -> None:
            at = (qkv[i].data_ptr(), rows, *work, heads, HEAD, context[i].data_ptr(), hopper)
            bench.attention(FLOAT16, *at, window=window, longest=longest)

        return run

    def flash(bench: Any, i: int) -> None:
        stream = torch.cuda.ExternalStream(bench.stream)  # type: ignore[no-untyped-call]
        backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION
        with torch.inference_mode(), torch.cuda.stream(stream), torch.nn.attention.sdpa_kernel(backend):
            q, k, v = qkv[i].view(texts, length, 3, heads, HEAD).permute(2, 0, 3, 1, 4)
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            context[i].view(texts, length, heads, HEAD).copy_(found.transpose(1, 2))

    moved = 8.0 * rows * hidden
    name = f"attention, {texts} texts of {length}"
    seen = np.minimum(np.arange(length), WINDOW) + np.minimum(np.arange(length)[::-1], WINDOW) + 1
    near = {"window": ours(window=WINDOW), "portable": ours(False, WINDOW)}
    _agree(f"{name}, window", near, context[0])
    us = _timed({**near, "all keys": ours()}, sets, timing)
    yield Kernels(f"{name}, window {WINDOW}", rows, 4.0 * texts * hidden * float(seen.sum()), moved, us)
    every = {"128 queries": ours(longest=1 << 20), "64 queries": ours(), "portable": ours(False), "torch flash": flash}
    _agree(name, every, context[0])
    yield Kernels(name, rows, 4.0 * rows * length * hidden, moved, _timed(every, sets, timing))


def _agree(name: str, ways: Mapping[str, Launch], result: torch.Tensor) -> None:
    """End the program where two ways differ."""
    wanted: torch.Tensor | None = None
    for way, launch in ways.items():
        result.fill_(math.nan)
        torch.cuda.synchronize()
        launch(_bench(), 0)
        torch.cuda.synchronize()
        found = result.float()
        wanted = found if wanted is None else wanted
        error = float((found - wanted).norm() / wanted.norm())
        if not error <= MAX_ERROR:
            raise SystemExit(f"{name}: {way} and {next(iter(ways))} differ by {error:.1e}")


def _timed(ways: Mapping[str, Launch], sets: int, timing: Timing) -> dict[str, float]:
    def recorded(launch: Launch) -> Recorded:
        bench = _bench()
        return Recorded(bench, lambda i: launch(bench, i % sets))

    return take_turns({way: recorded(launch) for way, launch in ways.items()}, timing)


def _bench() -> Any:
    return importlib.import_module("embert.engine._cuda_testing").Bench()


if __name__ == "__main__":
    main()
