"""How many threads torch's loops have: those of the run for large operators, one for small ones.

A loop of several threads ends when the last one does. When other processes use the cores, that thread must wait for a
core, and each loop takes 50 to 100 µs longer. So a thread sets the number for its next operators by their size.
torch.set_num_threads takes a tenth of a microsecond.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["all_threads", "allow_threads", "allowed_threads", "threads_for_elements", "threads_for_products"]

# Thresholds for several threads: elements of an operator; multiplications of a product, by the dtype of its input.
MANY_ELEMENTS = 1 << 15
MANY_PRODUCTS = {torch.float32: 1 << 20, torch.bfloat16: 1 << 20, torch.uint8: 1 << 24}


class _Run(threading.local):
    allowed = 1


_run = _Run()


def allow_threads(count: int) -> None:
    """Set the number of threads of this thread's operators, until the next call."""
    _run.allowed = count
    torch.set_num_threads(count)


def allowed_threads() -> int:
    """How many threads this thread's operators may have."""
    return _run.allowed


def all_threads() -> None:
    """Use all allowed threads for the next operators."""
    if _run.allowed > 1:
        torch.set_num_threads(_run.allowed)


def threads_for_elements(count: int) -> None:
    """The next operators read or write `count` elements each."""
    if _run.allowed > 1:
        torch.set_num_threads(_run.allowed if count >= MANY_ELEMENTS else 1)


def threads_for_products(x: torch.Tensor, outputs: int) -> None:
    """The next operator multiplies `x` [n, columns] by a matrix of `outputs` rows."""
    if _run.allowed > 1:
        torch.set_num_threads(_run.allowed if x.numel() * outputs >= MANY_PRODUCTS[x.dtype] else 1)
