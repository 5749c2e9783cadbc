"""nomic-bert, GTE and ModernBERT in torch without padding: rotary positions, gates and windows. See packed_torch.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from benchmarks.rivals.packed_torch import Packed, attention

__all__ = ["PackedRotary"]

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer's modules, and its matrices that are joined: one product for Q, K and V, one for gates and values."""

    kind: str  # of attention, which chooses the rotation
    window: int | None  # keys on each side
    qkv: tuple[torch.Tensor, torch.Tensor | None]
    attention_out: Function
    first_norm: Function  # before attention, or after it
    gates: tuple[torch.Tensor, torch.Tensor | None]
    activation: Function
    down: Function
    second_norm: Function


class PackedRotary(Packed):
    """A NomicBertModel, GteModel or ModernBertModel."""

    def __init__(self, model: Any, pooling: str = "mean") -> None:
        """See Packed."""
        super().__init__(model, pooling)
        self._pre_norm = model.config.model_type == "modernbert"
        self._heads = model.config.num_attention_heads
        window = getattr(model.config, "sliding_window", None)
        self._layers = [
            _modern_layer(layer, window) if self._pre_norm else _post_norm_layer(layer) for layer in model.layers
        ]

    def _rows(self, ids: torch.Tensor, positions: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        x: torch.Tensor = self._model.embeddings(ids[None])[0]
        rotations = {kind: self._rotation(x, positions, kind) for kind in {layer.kind for layer in self._layers}}
        for layer in self._layers:
            attended = self._attention(layer, layer.first_norm(x) if self._pre_norm else x, rotations, cu, longest)
            x = x + attended if self._pre_norm else layer.first_norm(x + attended)
            inner = functional.linear(layer.second_norm(x) if self._pre_norm else x, *layer.gates)
            gates, values = inner.chunk(2, dim=-1)
            out = layer.down(layer.activation(gates) * values)
            x = x + out if self._pre_norm else layer.second_norm(x + out)
        return self._model.final_norm(x) if self._pre_norm else x

    def _attention(
        self,
        layer: Layer,
        x: torch.Tensor,
        rotations: dict[str, tuple[torch.Tensor, torch.Tensor]],
        cu: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        tokens, hidden = x.shape
        q, k, v = functional.linear(x, *layer.qkv).view(tokens, 3, self._heads, -1).unbind(1)
        q, k = (_turned(each, *rotations[layer.kind]) for each in (q, k))
        return layer.attention_out(attention(q, k, v, cu, longest, layer.window).reshape(tokens, hidden))

    def _rotation(self, x: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, [T, 1, size]."""
        arguments = (kind,) if kind else ()
        cos, sin = self._model.rotary_emb(x, positions[None], *arguments)
        return cos[0, :, None], sin[0, :, None]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _post_norm_layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        "",
        None,
        _joined(attention.q_proj, attention.k_proj, attention.v_proj),
        attention.o_proj,
        layer.post_attention_layernorm,
        _joined(mlp.gate_proj, mlp.up_proj),
        mlp.act_fn,
        mlp.down_proj,
        layer.post_mlp_layernorm,
    )


def _modern_layer(layer: Any, window: int | None) -> Layer:
    return Layer(
        layer.attention_type,
        window if layer.attention_type == "sliding_attention" else None,
        _joined(layer.attn.Wqkv),
        layer.attn.Wo,
        layer.attn_norm,
        _joined(layer.mlp.Wi),
        layer.mlp.act,
        layer.mlp.Wo,
        layer.mlp_norm,
    )


def _joined(*parts: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([part.weight for part in parts]).detach()
    return weight, None if parts[0].bias is None else torch.cat([part.bias for part in parts]).detach()
