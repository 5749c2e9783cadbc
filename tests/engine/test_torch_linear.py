"""The CPU encoder on torch's operators makes few kernels, all at load, so its memory does not grow later."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch

from embert.engine import Model, pack
from embert.engine.encoders.cpu import runs
from embert.engine.encoders.cpu.encoder import TorchEncoder
from embert.engine.encoders.cpu.linear import AdaptedLinear
from embert.engine.encoders.cpu.runs import kernel_rows, row_counts
from tests.engine.onednn import check_no_kernel_is_made_after_loading

ENCODE = """
import dataclasses, os, sys
import numpy as np
import torch
from embert import engine
from embert.engine.weights.checkpoint import Checkpoint
from embert.engine.encoders.cpu import runs
from embert.engine.encoders.cpu.linear import AdaptedLinear
from embert.engine.encoders.cpu.encoder import TorchEncoder
dtype, pooling, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.sched_getaffinity = lambda pid: set(range(threads))
torch.set_num_threads(threads)
model = engine.load_model(pooling=pooling)
config = dataclasses.replace(model.config, layers=2)  # all but the last are alike
Checkpoint._check_surplus = lambda *_: None  # the file has all six
model = dataclasses.replace(model, config=config, max_input_length=512)
encoder = TorchEncoder(model, dtype=dtype, portable=True)
print("loaded", flush=True)
random = np.random.default_rng(0)
for most in [1, 2, 5, 20, 200] * 12:
    lengths = random.integers(1, 40, random.integers(1, most + 1)).tolist() + [256] * int(random.integers(0, 3))
    lengths += random.integers(60, 257, random.integers(0, 4)).tolist()
    sequences = [np.full(length, 2000, np.int32) for length in lengths]
    while sum(map(len, sequences)) > encoder.max_batch_tokens:
        sequences.pop()
    encoder.encode(engine.pack(sequences))
print("encoded", flush=True)
"""


class Watched:
    """A model that records how many threads torch's loops have."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.threads: list[int] = []

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        return cast("torch.Tensor", self.model(*arguments))


def test_short_texts_have_two_threads(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    encoder = TorchEncoder(default_model, portable=True)
    watched = Watched(encoder._transformer)
    monkeypatch.setattr(encoder, "_transformer", watched)
    monkeypatch.setattr(encoder, "_threads", 3)
    try:
        for length in (1, 12, 40, 41, 128):
            encoder.encode(pack([np.full(length, 2000, np.int32)]))
    finally:
        encoder.close()
        torch.set_num_threads(before)
    assert watched.threads == [2, 2, 2, 3, 3]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    runs.allow_threads(2)
    yield
    runs.allow_threads(1)
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_large_operators_have_all_threads_and_small_ones_one() -> None:
    runs.threads_for_elements(16 * 384)
    assert torch.get_num_threads() == 1
    runs.threads_for_elements(512 * 384)
    assert torch.get_num_threads() == 2
    runs.threads_for_products(torch.empty(1, 384), 384)
    assert torch.get_num_threads() == 1
    runs.threads_for_products(torch.empty(8, 384), 384)
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as other:
        other.submit(runs.threads_for_elements, 512 * 384).result()
        assert other.submit(torch.get_num_threads).result() == 1, "another thread has not been allowed any"


def test_a_short_text_has_two_threads_in_its_products_only(
    default_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {"products": set(), "norms": set()}
    normed, multiplied = torch.layer_norm, AdaptedLinear.__call__

    def norm(*arguments: Any) -> torch.Tensor:
        seen["norms"].add(torch.get_num_threads())
        return normed(*arguments)

    def multiply(self: AdaptedLinear, *arguments: Any, **more: Any) -> torch.Tensor:
        y = multiplied(self, *arguments, **more)
        seen["products"].add(torch.get_num_threads())
        return y

    monkeypatch.setattr(torch, "layer_norm", norm)
    monkeypatch.setattr(AdaptedLinear, "__call__", multiply)
    before = torch.get_num_threads()
    encoder = TorchEncoder(default_model, prepared=False, portable=True)
    monkeypatch.setattr(encoder, "_threads", 2)
    try:
        encoder.encode(pack([np.full(16, 2000, np.int32)]))
        assert torch.get_num_threads() == 2, "heads have all threads"
    finally:
        encoder.close()
        runs.allow_threads(1)
        torch.set_num_threads(before)
    assert seen["norms"] == {1}
    assert seen["products"] == {2}


def test_numbers_of_rows() -> None:
    for rows in range(1, 2000):
        assert rows <= kernel_rows(rows) <= max(rows + 7, 1.13 * rows)
    assert list(row_counts(300)) == sorted({kernel_rows(rows) for rows in range(1, 301)})
    assert list(row_counts(1)) == [8]


@pytest.mark.parametrize(("dtype", "pooling", "threads"), [("float32", "mean", 2), ("bfloat16", "cls", 4)])
def test_no_kernel_is_made_after_loading(dtype: str, pooling: str, threads: int) -> None:
    """oneDNN's own log tells. A kernel made later would be made again and again, because the caches are too small.

    The most kernels are those of bfloat16, one pooled row, and more threads than short texts have.
    """
    check_no_kernel_is_made_after_loading(ENCODE, dtype, pooling, str(threads))
