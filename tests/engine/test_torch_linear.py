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
os.sched_getaffinity = lambda pid: set(range(4))
torch.set_num_threads(4)
model = engine.load_model(pooling="cls")
config = dataclasses.replace(model.config, layers=2)  # all but the last are alike
Checkpoint._check_surplus = lambda *_: None  # the file has all six
model = dataclasses.replace(model, config=config, max_input_length=512)
encoder = TorchEncoder(model, dtype="bfloat16", portable=True)
print("loaded", flush=True)
random = np.random.default_rng(0)
for most in [1, 2, 5, 20, 200] * 4:
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


def test_no_kernel_is_made_after_loading() -> None:
    """oneDNN's own log tells. A kernel made later would be made again and again, because the caches are too small.

    The most kernels are those of bfloat16, one pooled row, and more threads than short texts have.
    """
    check_no_kernel_is_made_after_loading(ENCODE)
