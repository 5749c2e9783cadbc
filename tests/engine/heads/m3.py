"""A small model with the files of bge-m3: dense, sparse and multi-vectors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.oracles.model_cases import build, unigram, write_modules

COLUMNS = 48


def heads() -> dict[str, dict[str, torch.Tensor]]:
    """Random tensors of the two heads; half of the tokens have a weight."""
    torch.manual_seed(5)
    return {
        "sparse_linear": {"weight": torch.randn(1, 64), "bias": torch.randn(1) * 0.1},
        "colbert_linear": {"weight": torch.randn(COLUMNS, 64) * 0.2, "bias": torch.randn(COLUMNS) * 0.2},
    }


def build_m3(folder: Path) -> Path:
    """The folder of a random model."""
    folder.mkdir(exist_ok=True)
    build(folder, "xlm-roberta", vocab_size=400)
    write_modules(folder, pooling="cls")
    unigram(400).save(str(folder / "tokenizer.json"))
    for name, tensors in heads().items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder
