"""The CPU encoder on torch's operators makes few kernels, all at load, so its memory does not grow later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from embert.engine.encoders.cpu import runs
from tests.engine.heads.late_interaction import linear
from tests.engine.model_cases import build, unigram
from tests.server.live import ROOT

# The most kernels are those of bfloat16, one pooled row, and more threads than short texts have.
ENCODE = """
import dataclasses, os, sys
import numpy as np
import torch
from embert import engine
from embert.engine.weights.checkpoint import Checkpoint
from embert.engine.encoders.cpu.encoder import TorchEncoder
os.sched_getaffinity = lambda pid: set(range(4))
torch.set_num_threads(4)
if len(sys.argv) > 1:
    models = engine.load_model(sys.argv[1], pooling="splade"), engine.load_model(sys.argv[2])
    encoders, most_texts = [TorchEncoder(model, portable=True) for model in models], 100
else:
    model = engine.load_model(pooling="cls")
    config = dataclasses.replace(model.config, layers=2)  # all but the last are alike
    Checkpoint._check_surplus = lambda *_: None  # the file has all six
    models = (dataclasses.replace(model, config=config, max_input_length=512),)
    encoders, most_texts = [TorchEncoder(models[0], dtype="bfloat16", portable=True)], 200
print("loaded", flush=True)
random = np.random.default_rng(0)
for model, encoder in zip(models, encoders):
    longest = min(model.config.max_positions, 256)
    tasks = [task for task in (1, 2, 8, 16, 24, 25) if task & model.tasks == task] if len(sys.argv) > 1 else [1]
    for most in [1, 2, 5, 20, most_texts] * 3:
        lengths = random.integers(1, 40, random.integers(1, most + 1)).tolist() + [longest] * int(random.integers(0, 3))
        lengths += random.integers(60, longest + 1, random.integers(0, 4)).tolist()
        sequences = [np.full(length, 200, np.int32) for length in lengths]
        while sum(map(len, sequences)) > encoder.max_batch_tokens:
            sequences.pop()
        wanted = random.choice(tasks, len(sequences)).astype(np.uint8)
        encoder.wait(encoder.submit(engine.pack(sequences, tasks=wanted)))
print("encoded", flush=True)
"""


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


@pytest.mark.parametrize("heads", [False, True], ids=["default model", "heads"])
def test_no_kernel_is_made_after_loading(tmp_path: Path, heads: bool) -> None:
    """oneDNN's own log tells. A kernel made later would be made again and again, because the caches are too small."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this torch has no oneDNN")
    folders = [tmp_path / head for head in ("ForMaskedLM", "Model")] if heads else []
    for folder in folders:
        build(folder, "xlm-roberta", vocab_size=2500, head=folder.name)
        unigram(400).save(str(folder / "tokenizer.json"))
        save_file({"weight": linear()}, folder / "colbert_linear.safetensors")
        save_file({"weight": linear(1)}, folder / "sparse_linear.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", ENCODE, *map(str, folders)],
        cwd=ROOT, env=os.environ | {"ONEDNN_VERBOSE": "2"}, capture_output=True, text=True, timeout=250, check=True,
    )  # fmt: skip
    loading, _, encoding = f"\n{done.stdout}".partition("\nloaded\n")  # oneDNN may have said nothing before
    assert "encoded" in encoding
    if "inner_product" not in loading:
        pytest.skip("oneDNN's packed products do not work on this machine")
    assert "inner_product" in encoding
    assert "create:cache_miss" not in encoding
