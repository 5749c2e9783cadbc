"""The encoder's matrix products (GEMMs) next to those of cuBLASLt and CUTLASS, on the GPU.

y[tokens, out] = epilogue(x[tokens, in] · weight[out, in]ᵀ + bias), FP16. Each result is compared with torch's in FP32
before anything is timed, with interleaved rounds. cuBLASLt is called as the portable encoder calls it: a product with
bias (and residual), then a kernel for the erf GELU. It can fuse only the tanh GELU, which is timed through torch.
CUTLASS is the fastest of its schedules and swizzles.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.kernels.device_timer import LAUNCHES, Recorded, Timing, time_interleaved
from benchmarks.rivals import cutlass
from embert.engine.encoders.cuda.encoder import _cublaslt_library

FLOAT16 = 1
ACTIVATIONS = {"bias": 0, "residual": 0, "GELU": 1}
ROTATED_BYTES = 200_000_000  # of inputs and outputs in rotation: more than the cache holds
MAX_ERROR = 1e-3  # relative; one rounding to FP16 is 2e-4


@dataclass(frozen=True, slots=True)
class Shape:
    """One matrix product of the encoder."""

    in_: int
    out: int
    epilogue: str = "bias"  # "bias"; "GELU" and "residual" include a bias
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.in_}x{self.out}, {self.epilogue}".lstrip()


# BERT-base: QKV, attention out, FFN in and out; BERT-large: FFN in and out, QKV, attention out; MiniLM: FFN in and out.
BERT = tuple(
    Shape(in_, out)
    for in_, out in (
        (768, 2304), (768, 768), (768, 3072), (3072, 768),
        (1024, 4096), (4096, 1024), (1024, 3072), (1024, 1024),
        (384, 1536), (1536, 384),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of one product by library, and how many kernels each launches for it."""

    shape: Shape
    tokens: int
    us: dict[str, float]
    kernels: dict[str, float]
    cutlass: str = ""  # its fastest schedule

    @property
    def flops(self) -> float:
        """FLOPs of the product, without its epilogue."""
        return 2.0 * self.tokens * self.shape.in_ * self.shape.out

    @property
    def moved(self) -> float:
        """Bytes that must be read or written."""
        of_outputs = 2 if self.shape.epilogue == "residual" else 1
        rows = self.shape.in_ + of_outputs * self.shape.out
        return 2.0 * (self.tokens * rows + self.shape.in_ * self.shape.out)

    def ratio(self, rival: str) -> float | None:
        """Return the rival's time over embert's; None where either was not measured."""
        return self.us[rival] / self.us["embert"] if {rival, "embert"} <= self.us.keys() else None


def geometric_mean(measured: Sequence[Measured], rival: str, most_in: int | None = None) -> float | None:
    """Return the geometric mean of the ratios to a rival, of products with K up to `most_in`; None without any."""
    ratios = [each.ratio(rival) for each in measured if most_in is None or each.shape.in_ <= most_in]
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known else None


def cutlass_kernels(is_hopper: bool) -> list[cutlass.Kernel]:
    """Return CUTLASS's kernels; where there are none, print why."""
    if not is_hopper:
        print("without CUTLASS: its kernels here are for compute capability 9.0", flush=True)
        return []
    try:
        return cutlass.load()
    except cutlass.Missing as missing:
        print(f"without CUTLASS: {missing}", flush=True)
        return []


def measure(shape: Shape, tokens: int, kernels: Sequence[cutlass.Kernel], timing: Timing) -> Measured:
    """Time one product in every library. A rival with a wrong result is skipped; embert's ends the program."""
    operands = _Operands(shape, tokens)
    recorded: dict[str, Recorded] = {}
    for who, make in _contestants(shape, operands):
        try:
            recorded[who] = operands.recorded(who, *make())
        except RuntimeError as error:
            print(f"without {who} for {shape}: {error}", flush=True)
    fastest = ""
    for epilogue in _cutlass_epilogues(shape):
        who = "CUTLASS" if epilogue != "tanh GELU" else "CUTLASS tanh GELU"
        best = _fastest(who, [kernel for kernel in kernels if kernel.epilogue == epilogue], operands)
        if best is not None:
            name, recorded[who] = best
            fastest = fastest or name
    us = time_interleaved(recorded, timing)
    return Measured(shape, tokens, us, {who: each.kernels for who, each in recorded.items()}, fastest)


@dataclass
class _Operands:
    """The matrices of a product on the device, several sets of them in rotation."""

    shape: Shape
    tokens: int
    x: list[torch.Tensor] = field(init=False)  # [tokens, in]
    y: list[torch.Tensor] = field(init=False)  # [tokens, out]
    residual: list[torch.Tensor] = field(init=False)  # [tokens, out]
    weight: torch.Tensor = field(init=False)  # [out, in]
    bias: torch.Tensor = field(init=False)  # [out]
    exact_bias: torch.Tensor = field(init=False)  # the same in FP32, as embert's products take it

    def __post_init__(self) -> None:
        in_, out = self.shape.in_, self.shape.out
        sets = min(LAUNCHES, max(2, math.ceil(ROTATED_BYTES / (2 * self.tokens * (in_ + out)))))
        self.x = [_random(self.tokens, in_) for _ in range(sets)]
        self.y = [_random(self.tokens, out) for _ in range(sets)]
        self.residual = [_random(self.tokens, out) for _ in range(sets)] if self.shape.epilogue == "residual" else []
        self.weight = _random(out, in_) * in_**-0.5
        self.bias = _random(out)
        self.exact_bias = self.bias.float()
        torch.cuda.synchronize()

    def at(self, i: int) -> tuple[int, int, int]:
        """Return the addresses of x, residual (or 0) and y for launch `i`."""
        i %= len(self.x)
        return self.x[i].data_ptr(), self.residual[i].data_ptr() if self.residual else 0, self.y[i].data_ptr()

    def recorded(self, who: str, bench: Any, launch: Callable[[int], None]) -> Recorded:
        """Check what a launch computes, then record it. Raises RuntimeError for a rival whose result is wrong."""
        self.y[0].fill_(math.nan)
        torch.cuda.synchronize()
        launch(0)
        torch.cuda.synchronize()
        wanted = self._wanted("tanh" if "tanh" in who else "none")
        error = float((self.y[0].float() - wanted).norm() / wanted.norm())
        if not error <= MAX_ERROR:
            message = f"{who} and torch disagree on {self.shape}, {self.tokens} tokens: relative error {error:.1e}"
            raise SystemExit(message) if who == "embert" else RuntimeError(message)
        return Recorded(bench, launch)

    def _wanted(self, gelu: str) -> torch.Tensor:
        wanted = torch.addmm(self.exact_bias, self.x[0].float(), self.weight.float().T)
        if self.shape.epilogue == "GELU":
            return torch.nn.functional.gelu(wanted, approximate=gelu)
        return wanted + self.residual[0].float() if self.residual else wanted


Made = tuple[Any, Callable[[int], None]]  # a Bench, and a launch on its stream


def _contestants(shape: Shape, operands: _Operands) -> Iterator[tuple[str, Callable[[], Made]]]:
    yield "embert", lambda: _own_provider("hopper", shape, operands)
    yield "cuBLASLt", lambda: _own_provider("cublaslt", shape, operands)
    if shape.epilogue == "GELU":
        yield "cuBLASLt tanh GELU", lambda: _torch_gelu(operands)


def _own_provider(provider: str, shape: Shape, operands: _Operands) -> Made:
    bench = _bench()
    weight, bias = operands.weight.data_ptr(), operands.exact_bias.data_ptr()
    activation = ACTIVATIONS[shape.epilogue]
    product = bench.product(provider, _cublaslt_library(), FLOAT16, weight, bias, shape.out, shape.in_, activation)

    def launch(i: int) -> None:
        x, residual, y = operands.at(i)
        product.run(bench, x, residual, operands.tokens, y)

    return bench, launch


def _torch_gelu(operands: _Operands) -> Made:
    bench = _bench()
    stream = torch.cuda.ExternalStream(bench.stream)  # type: ignore[no-untyped-call]
    weight, sets = operands.weight.T, len(operands.x)

    def launch(i: int) -> None:
        i %= sets
        with torch.inference_mode(), torch.cuda.stream(stream):
            torch.ops.aten._addmm_activation.out(operands.bias, operands.x[i], weight, use_gelu=True, out=operands.y[i])

    return bench, launch


def _cutlass_epilogues(shape: Shape) -> tuple[str, ...]:
    return ("erf GELU", "tanh GELU") if shape.epilogue == "GELU" else (shape.epilogue,)


def _fastest(who: str, kernels: Sequence[cutlass.Kernel], operands: _Operands) -> tuple[str, Recorded] | None:
    candidates: list[tuple[float, str, Recorded]] = []
    for kernel in kernels:
        for swizzle in cutlass.SWIZZLES:
            try:
                recorded = operands.recorded(who, *_cutlass(kernel, swizzle, operands))
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                continue
            candidates.append((recorded.quick_us(), f"{kernel.schedule}, swizzle {swizzle}", recorded))
    return min(candidates, key=lambda one: one[0])[1:] if candidates else None


def _cutlass(kernel: cutlass.Kernel, swizzle: int, operands: _Operands) -> Made:
    bench = _bench()
    stream, weight, bias = bench.stream, operands.weight.data_ptr(), operands.bias.data_ptr()
    rows, out, in_ = operands.tokens, operands.shape.out, operands.shape.in_

    def launch(i: int) -> None:
        x, residual, y = operands.at(i)
        kernel(stream, x, weight, bias, residual, y, rows=rows, out=out, in_=in_, swizzle=swizzle)

    return bench, launch


def _bench() -> Any:
    return importlib.import_module("embert.engine._cuda_testing").Bench()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)
