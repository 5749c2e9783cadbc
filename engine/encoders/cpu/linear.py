"""A linear layer on a CPU, fused with the activation or the residual that follows it.

oneDNN's packed weights are used where they work. On Zen 5 they run float32 2.3 times as fast as `F.linear`, whose MKL
uses only AVX2 on AMD, and exact GELU costs 5 % instead of a separate pass. Limited to AVX2 (ONEDNN_MAX_CPU_ISA), one
core needs 7.8 ms instead of 9.2 for a text of 16 tokens of MiniLM, and the same for a batch of 20; in bfloat16 3.3 ms
instead of 4.2, and 6 % less for the batch. torch reaches them through undocumented operators of its compiler. So
`choose_products` tests them on real weights when a model is loaded, and `F.linear` replaces them where they are absent,
fail, or give other results. Our own AVX-512 kernels (kernels.py) replace both where they run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu.kernels import Activation, has_avx512, linear_avx512
from embert.engine.encoders.cpu.threads import threads_for_products

__all__ = [
    "Linear",
    "LinearOneDnn",
    "LinearPlain",
    "Products",
    "activated",
    "choose_products",
    "kernel_rows",
    "limit_kernel_caches",
    "make_linear",
    "packed_works",
    "row_counts",
]


# Our name → oneDNN's operation and algorithm. The algorithm "none" of gelu is the erf form.
FUSED = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}


def limit_kernel_caches(products: int) -> None:
    """Bound the kernel caches: `row_counts(1024)` on one thread and on all threads, and few rows on two.

    `products` are the different matrix products of a forward. Call this before the first product.

    oneDNN and torch's layer above it together keep about 0.6 MB for every product, number of rows and number of
    threads they meet, in two entries of oneDNN's cache. With their own limits of 1024 entries a server of MiniLM grew
    to 1.8 GB. With fewer entries than there are kernels, kernels would be made again and again (see `kernel_rows`).
    """
    every, few = (len(list(row_counts(most))) for most in (1024, 128))
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, str(2 * (2 * every + few) * products))


def kernel_rows(rows: int) -> int:
    """`rows` rounded up to one of few numbers, so that every kernel is made only once.

    oneDNN makes a kernel for each number of rows, and packed batches keep bringing new numbers. Without rounding, new
    kernels cost 5 % of the throughput of mixed work, and fragmented the heap: 300 MB were unusable after some minutes.
    Steps are shorter for a single short text, whose time grows with its rows: 18 of them take 2.7 ms of products in
    MiniLM, 24 take 3.3.
    """
    step = 4 if 8 < rows <= 32 else 8 if rows <= 128 else 16 if rows <= 256 else 32 if rows <= 1024 else 128
    return -(-rows // step) * step


def row_counts(most: int) -> Iterator[int]:
    """Every value of `kernel_rows` for 1 … `most` rows."""
    rows = 0
    while rows < most:
        rows = kernel_rows(rows + 1)
        yield rows


class Linear(Protocol):
    """activation(x · weightᵀ + bias). Without an activation, a residual may be added, or a gate multiplied."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, in] → [T, out]. `residual` and `gate` are [T, out] and are not changed; at most one is given."""
        ...


class LinearOneDnn:
    """oneDNN, with the weight in the layout of its kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, activation: Activation = "none") -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._operation, self._algorithm = FUSED[activation]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See Linear."""
        threads_for_products(x, len(self._bias))
        fused = torch.ops.mkldnn._linear_pointwise
        if residual is not None:
            y: torch.Tensor = fused.binary(x, residual, self._weight, self._bias, "add")
        elif gate is not None:
            y = fused.binary(x, gate, self._weight, self._bias, "mul")
        else:
            y = fused.default(x, self._weight, self._bias, self._operation, [], self._algorithm)
        return y


class LinearPlain:
    """torch's own operators, which run everywhere."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, activation: Activation = "none") -> None:
        self._weight = weight
        self._bias = bias
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See Linear."""
        threads_for_products(x, len(self._bias))
        y = F.linear(x, self._weight, self._bias)
        if residual is not None:
            return y.add_(residual)
        if gate is not None:
            return y.mul_(gate)
        return activated(y, self._activation)


def activated(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of each element; `y` may be changed."""
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    if activation == "silu":
        return F.silu(y, inplace=True)
    return y.relu_() if activation == "relu" else y


# Our own kernels; oneDNN's, with a weight in its layout; torch's own operators.
Products = Literal["avx512", "packed", "plain"]


def choose_products(weight: torch.Tensor, bias: torch.Tensor, activation: Activation, *, portable: bool) -> Products:
    """The fastest kernels that run here, tested on one linear layer. `portable` excludes our own."""
    if weight.dtype == torch.float32 and has_avx512() and not portable:
        return "avx512"
    return "packed" if packed_works(weight, bias, activation) else "plain"


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor, activation: Activation = "none", *, products: Products
) -> Linear:
    """`weight` is [out, in] and `bias` [out], both in the dtype to compute in."""
    if products == "avx512":
        return linear_avx512(weight, bias, activation)
    return (LinearOneDnn if products == "packed" else LinearPlain)(weight, bias, activation)


def packed_works(weight: torch.Tensor, bias: torch.Tensor, activation: Activation) -> bool:
    """Whether oneDNN's operators run these weights here, with torch's own results."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    x = torch.linspace(-1, 1, 3 * weight.shape[1]).reshape(3, -1).to(weight.dtype)
    other = torch.linspace(-1, 1, 3 * weight.shape[0]).reshape(3, -1).to(weight.dtype)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 0.05
    try:
        packed = LinearOneDnn(weight, bias, activation)
        plain = LinearPlain(weight, bias, activation)
        return all(
            torch.allclose(packed(x, *more).float(), plain(x, *more).float(), rtol=tolerance, atol=tolerance)
            for more in ((), (other,), (None, other))
        )
    except (AttributeError, RuntimeError):  # no such operator in this torch; it does not run here
        return False
