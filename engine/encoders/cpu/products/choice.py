"""Which kernels multiply a CPU's matrices."""

from __future__ import annotations

from typing import Literal

import torch

from embert.engine.encoders.cpu.kernels import has_avx512, linear_avx512
from embert.engine.encoders.cpu.products.linear import Activation, Linear, LinearOneDnn, LinearPlain

__all__ = ["Products", "choose_products", "make_linear", "packed_works"]

# Our own kernels; oneDNN's, with a weight in its layout; torch's own operators.
Products = Literal["avx512", "packed", "plain"]


def choose_products(weight: torch.Tensor, bias: torch.Tensor, activation: Activation, *, portable: bool) -> Products:
    """The fastest that run here, judged by one linear layer. With `portable` our own are left out."""
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
    """Whether oneDNN's operators run these weights here and agree with torch's own."""
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
