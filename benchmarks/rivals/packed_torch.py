"""Encoders in torch without padding, with varlen flash attention: what a good engineer builds in an afternoon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from embert.engine.batch import PackedBatch

__all__ = ["Packed", "PackedBert", "attention"]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, window: int | None = None
) -> torch.Tensor:
    """Return the context of packed queries, keys and values [T, heads, size]; `window` keys on each side, or all."""
    context: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, longest, longest, 0.0, False, False, window_size_left=window, window_size_right=window
    )[0]
    return context


class Packed(ABC):
    """A transformers model's weights, run on packed batches; its vectors are normalized."""

    def __init__(self, model: Any, pooling: str = "mean") -> None:
        """`pooling` is "mean" or "cls"."""
        self._model = model
        self._pooling = pooling

    def graph(self, batch: PackedBatch, *, compiled: bool) -> tuple[Callable[[], object], npt.NDArray[np.float32]]:
        """Capture the forward of this batch; return its replay, and its vectors, float32 [B, width]."""
        lengths = np.diff(batch.cu_seqlens)
        positions = np.concatenate([np.arange(n) for n in lengths])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        ids, places, owners, cu, counts = (
            torch.tensor(array, device="cuda")
            for array in (batch.ids.astype(np.int64), positions, rows, batch.cu_seqlens, lengths)
        )
        longest = int(lengths.max())
        forward = self._forward
        if compiled:
            torch._dynamo.reset()
            forward = torch.compile(self._forward, mode="max-autotune-no-cudagraphs", dynamic=False)

        def run() -> torch.Tensor:
            return forward(ids, places, owners, cu, counts, longest)

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            vectors = run()
        graph.replay()
        answer = vectors.float().cpu().numpy()

        def replay() -> object:
            graph.replay()
            return ids, places, owners, cu, counts, vectors  # kept alive: the graph holds only their addresses

        return replay, answer

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        owners: torch.Tensor,
        cu: torch.Tensor,
        counts: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        x = self._rows(ids, positions, cu, longest)
        if self._pooling == "cls":
            return functional.normalize(x[cu[:-1]].float(), dim=1)
        sums = torch.zeros(len(counts), x.shape[1], device=x.device).index_add_(0, owners, x.float())
        return functional.normalize(sums / counts[:, None], dim=1)

    @abstractmethod
    def _rows(self, ids: torch.Tensor, positions: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the last hidden states of the tokens, [T, hidden]."""


class PackedBert(Packed):
    """A BertModel."""

    def __init__(self, model: Any, pooling: str = "mean") -> None:
        """See Packed."""
        super().__init__(model, pooling)
        self._layers = []
        for layer in model.encoder.layer:
            attention = layer.attention.self
            parts = (attention.query, attention.key, attention.value)
            self._layers.append(
                (
                    torch.cat([p.weight for p in parts]).detach(),
                    torch.cat([p.bias for p in parts]).detach(),
                    layer.attention.output,
                    layer.intermediate.dense,
                    layer.output,
                )
            )
        self._heads = model.config.num_attention_heads

    def _rows(self, ids: torch.Tensor, positions: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        embeddings = self._model.embeddings
        x: torch.Tensor = embeddings.word_embeddings(ids) + embeddings.position_embeddings(positions)
        x = embeddings.LayerNorm(x + embeddings.token_type_embeddings.weight[0])
        tokens, hidden = x.shape
        for qkv_weight, qkv_bias, attention_out, inner, out in self._layers:
            q, k, v = functional.linear(x, qkv_weight, qkv_bias).view(tokens, 3, self._heads, -1).unbind(1)
            context = attention(q, k, v, cu, longest)
            x = attention_out.LayerNorm(attention_out.dense(context.reshape(tokens, hidden)) + x)
            x = out.LayerNorm(out.dense(functional.gelu(inner(x))) + x)
        return x
