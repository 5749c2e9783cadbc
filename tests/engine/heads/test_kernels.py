"""Heads' kernels are made at load, like the layers': see ../test_torch_linear.py."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from tests.engine.heads.late_interaction import linear
from tests.engine.model_cases import build, unigram
from tests.engine.onednn import check_no_kernel_is_made_after_loading

ENCODE = """
import os, sys
import numpy as np
import torch
from embert import engine
from embert.engine.encoders.cpu.encoder import TorchEncoder
os.sched_getaffinity = lambda pid: set(range(2))
torch.set_num_threads(2)
models = [engine.load_model(sys.argv[1], pooling="splade"), engine.load_model(sys.argv[2])]
encoders = [TorchEncoder(model, portable=True) for model in models]
print("loaded", flush=True)
random = np.random.default_rng(0)
for model, encoder in zip(models, encoders):
    tasks = [task for task in (1, 2, 8, 16, 24, 25) if task & model.tasks == task]
    for most in [1, 2, 5, 20, 100] * 3:
        sequences = [np.full(n, 200, np.int32) for n in random.integers(1, 129, random.integers(1, most + 1))]
        while sum(map(len, sequences)) > encoder.max_batch_tokens:
            sequences.pop()
        wanted = random.choice(tasks, len(sequences)).astype(np.uint8)
        encoder.wait(encoder.submit(engine.pack(sequences, tasks=wanted)))
print("encoded", flush=True)
"""


def test_no_kernel_is_made_after_loading(tmp_path: Path) -> None:
    for head in ("ForMaskedLM", "Model"):
        folder = build(tmp_path / head, "xlm-roberta", vocab_size=2500, head=head)
        unigram(400).save(str(folder / "tokenizer.json"))
    save_file({"weight": linear()}, folder / "colbert_linear.safetensors")
    save_file({"weight": linear(1)}, folder / "sparse_linear.safetensors")
    check_no_kernel_is_made_after_loading(ENCODE, str(tmp_path / "ForMaskedLM"), str(folder))
