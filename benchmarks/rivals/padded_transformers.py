"""The transformers model on the GPU, on padded batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from embert.engine.batch import PackedBatch

POOLINGS = ("mean", "cls", "last-token")


def padded_runner(model: Any, batch: PackedBatch, size: int, pooling: str) -> Callable[[], torch.Tensor]:
    """Return a call that runs `batch` as padded batches of `size` sequences of similar length, longest first.

    Its result is [B, width], not normalized, in that order. The inputs are on the GPU already, and the model has run
    once when this returns. `pooling` is one of POOLINGS.
    """
    padded = padded_batches(batch, size)

    def run() -> torch.Tensor:
        vectors = []
        for ids, mask in padded:
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
            counts = mask.sum(1)
            if pooling == "mean":
                vectors.append((states * mask[..., None]).sum(1) / counts[:, None])
            elif pooling == "last-token":
                vectors.append(states[torch.arange(len(ids), device=ids.device), counts - 1])
            else:
                vectors.append(states[:, 0])
        return torch.cat(vectors)

    run()
    return run


def padded_batches(batch: PackedBatch, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and masks [n, L] on the GPU, of at most `size` sequences of similar length each, longest first."""
    lengths = np.diff(batch.cu_seqlens)
    order = np.argsort(-lengths, kind="stable")
    padded = []
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        ids = np.zeros((len(rows), int(lengths[rows].max())), np.int64)
        for i, row in enumerate(rows):
            ids[i, : lengths[row]] = batch.ids[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        mask = np.arange(ids.shape[1]) < lengths[rows][:, None]
        padded.append((torch.tensor(ids, device="cuda"), torch.tensor(mask, device="cuda")))
    return padded
