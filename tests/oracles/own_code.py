"""Random weights of models whose code comes with their checkpoints, and the operators of BERT on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch
from safetensors.torch import save_file

from tests.oracles.exact import Ids


class OwnCode:
    """A model folder. Operators compute in the type of their rows, embeddings in one that is asked for."""

    def __init__(self, folder: Path, columns: int) -> None:
        self.folder, self._columns = folder, columns
        self._random = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}

    def save(self, prefix: str = "", more: Mapping[str, torch.Tensor] | None = None) -> None:
        stored = {prefix + name: tensor for name, tensor in self.tensors.items()}
        save_file({**stored, **(more or {})}, self.folder / "model.safetensors", {"format": "pt"})

    def draw(self, name: str, *shape: int) -> torch.Tensor:
        self.tensors[name] = torch.randn(*shape, generator=self._random) * 0.3
        return self.tensors[name]

    def draw_linear(self, name: str, outputs: int, inputs: int, *, bias: bool = True) -> None:
        self.draw(f"{name}.weight", outputs, inputs)
        if bias:
            self.draw(f"{name}.bias", outputs)

    def draw_norm(self, name: str) -> None:
        self.draw(f"{name}.weight", self._columns).add_(1)
        self.draw(f"{name}.bias", self._columns)

    def rows(self, table: str, ids: Ids, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a table of embeddings: int32 [L] → [L, columns]."""
        return self.tensors[f"embeddings.{table}_embeddings.weight"].to(dtype)[torch.from_numpy(ids.astype(np.int64))]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.tensors.get(f"{name}.bias")
        return F.linear(x, self.tensors[f"{name}.weight"].to(x.dtype), None if bias is None else bias.to(x.dtype))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gamma, beta = (self.tensors[f"{name}.{kind}"].to(x.dtype) for kind in ("weight", "bias"))
        return F.layer_norm(x, (self._columns,), gamma, beta, 1e-12)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Queries, keys and values [heads, L, size] → [L, heads · size]. `bias` adds to scores."""
    weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2]) + bias).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)
