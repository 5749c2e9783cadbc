"""Encoders in torch without padding, with varlen flash attention: what a good engineer builds in an afternoon.

PackedRotary is nomic-bert, GTE and ModernBERT: rotary positions, gates and windows. PackedDecoder is Qwen3, Gemma 3
and EmbeddingGemma 2: RMSNorm, also of each head's queries and keys, grouped-query attention, causal or in both
directions, and inputs of layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from embert.engine.batch import PackedBatch

FLASH_COLUMNS = 256  # of the widest heads that flash attention takes


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu: torch.Tensor,
    longest: int,
    window: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the context of packed queries [T, heads, size] and of keys and values, whose heads may be fewer.

    A token sees `window` keys on each side, or all; with `causal` none after itself. `scale` multiplies scores, by
    default 1 / sqrt(size).
    """
    if not q.is_cuda:
        return _attention_on_the_cpu(q, k, v, cu, window, causal, scale)
    if q.shape[-1] > FLASH_COLUMNS:
        if causal or window is not None:
            raise ValueError("wide heads have no mask here")
        q, k, v = (each.expand(-1, q.shape[1], -1)[None] if each.shape[1] == 1 else each[None] for each in (q, k, v))
        mixed: torch.Tensor = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, cu, cu, longest, longest, 0.0, 0, scale=scale
        )[0]
        return mixed[0]
    right = 0 if causal else window
    context: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, longest, longest, 0.0, causal, False, scale=scale,
        window_size_left=window, window_size_right=None if window is None else right,
    )[0]  # fmt: skip
    return context


def _attention_on_the_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu: torch.Tensor,
    window: int | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The same, one text after the other, so that tests need no GPU."""
    contexts = []
    for start, end in pairwise(cu.tolist()):
        queries, keys, values = (each[start:end].transpose(0, 1)[None] for each in (q, k, v))
        ones = torch.ones(end - start, end - start, dtype=torch.bool)
        seen = ones.tril() if causal else ones
        if window is not None:
            seen = seen.tril(window).triu(-window)
        context = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        contexts.append(context[0].transpose(0, 1))
    return torch.cat(contexts)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Packed(ABC):
    """A transformers model's weights, run on packed batches; its vectors are normalized."""

    def __init__(self, model: Any, pooling: str = "mean") -> None:
        """`pooling` is "mean", "cls" or "last-token"."""
        self._model = model
        self._pooling = pooling

    def graph(self, batch: PackedBatch, *, compiled: bool) -> tuple[Callable[[], object], npt.NDArray[np.float32]]:
        """Capture the forward of this batch; return its replay, and its vectors, float32 [B, width]."""
        inputs = self._inputs(batch, "cuda")
        longest = int(np.diff(batch.cu_seqlens).max())
        forward = self._forward
        if compiled:
            torch._dynamo.reset()
            forward = torch.compile(self._forward, mode="max-autotune-no-cudagraphs", dynamic=False)

        def run() -> torch.Tensor:
            return forward(*inputs, longest)

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            vectors = run()
        graph.replay()
        response = vectors.float().cpu().numpy()

        def replay() -> object:
            graph.replay()
            return inputs, vectors  # kept alive: the graph holds only their addresses

        return replay, response

    def vectors(self, batch: PackedBatch) -> npt.NDArray[np.float32]:
        """Return the vectors of a batch, float32 [B, width], computed where the model's weights are."""
        inputs = self._inputs(batch, self._model.device)
        return self._forward(*inputs, int(np.diff(batch.cu_seqlens).max())).float().cpu().numpy()

    def _inputs(self, batch: PackedBatch, device: Any) -> Inputs:
        """Return the arguments of `_forward` but the last."""
        lengths = np.diff(batch.cu_seqlens)
        positions = np.concatenate([np.arange(n) for n in lengths])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        arrays = (batch.ids.astype(np.int64), positions, rows, batch.cu_seqlens, lengths)
        ids, places, owners, cu, counts = (torch.tensor(array, device=device) for array in arrays)
        return ids, places, owners, cu, counts

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
        if self._pooling == "last-token":
            return functional.normalize(x[cu[1:] - 1].float(), dim=1)
        sums = torch.zeros(len(counts), x.shape[1], device=x.device).index_add_(0, owners, x.float())
        return functional.normalize(sums / counts[:, None], dim=1)

    @abstractmethod
    def _rows(self, ids: torch.Tensor, positions: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the last hidden states of the tokens, [T, hidden]."""


class PackedBert(Packed):
    """A BertModel."""

    def __init__(self, model: Any, pooling: str = "mean") -> None:
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


Norm = tuple[torch.Tensor, float]  # gamma, epsilon


@dataclass(frozen=True)
class DecoderLayer:
    """The same of a decoder's layer. Gemma 3 also has norms after attention and after the feed-forward network.

    EmbeddingGemma 2's layers differ in the number and size of their heads. It also normalizes values, and multiplies an
    additional input of each layer by a gate.
    """

    kind: str  # of attention, which chooses the rotation; empty: there is one only
    window: int | None  # keys on each side, or before a token in causal layers
    first_norm: Norm
    qkv: tuple[torch.Tensor, torch.Tensor | None]
    query_norm: Norm
    key_norm: Norm
    attention_out: Function
    attention_norm: Norm | None
    second_norm: Norm
    gates: tuple[torch.Tensor, torch.Tensor | None]
    activation: Function
    down: Function
    last_norm: Norm | None
    shared: int  # heads of keys and values
    size: int  # columns of a head
    value_epsilon: float | None  # of a norm of values
    input: tuple[Function, Function, Norm] | None  # the gate and the projection of the layer's input, and its norm
    scale: Any  # of the layer's result


class PackedDecoder(Packed):
    """A Qwen3Model, Gemma3TextModel or EmbeddingGemma2Model."""

    def __init__(self, model: Any, pooling: str = "last-token") -> None:
        model = getattr(model, "language_model", model)
        super().__init__(model, pooling)
        kind = model.config.model_type
        self._heads, self._types = model.config.num_attention_heads, getattr(model.config, "layer_types", None)
        gemma, self._inputs_of_layers = kind.startswith(("gemma", "embedding_gemma")), getattr(model, "ple", None)
        bidirectional = self._inputs_of_layers is not None or (gemma and model.config.use_bidirectional_attention)
        self._causal, self._scale = not bidirectional, model.layers[0].self_attn.scaling
        self._layers = [
            _decoder_layer(layer, gemma, self._types[i] if gemma and self._types else "")
            for i, layer in enumerate(model.layers)
        ]
        self._final_norm = _rms_norm(model.norm)

    def _rows(self, ids: torch.Tensor, positions: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
        x: torch.Tensor = self._model.embed_tokens(ids)
        rotations = {
            kind: [each[0, :, None] for each in self._model.rotary_emb(x, positions[None], *([kind] if kind else []))]
            for kind in {layer.kind for layer in self._layers}
        }
        inputs = self._layer_inputs(x)
        for layer, given in zip(self._layers, inputs, strict=True):
            qkv = functional.linear(_normed(x, layer.first_norm), *layer.qkv).view(len(x), -1, layer.size)
            q, k, v = torch.split(qkv, [self._heads, layer.shared, layer.shared], dim=1)
            if layer.value_epsilon is not None:
                v = functional.rms_norm(v, v.shape[-1:], None, layer.value_epsilon)
            q = _turned(_normed(q, layer.query_norm), *rotations[layer.kind])
            k = _turned(_normed(k, layer.key_norm), *rotations[layer.kind])
            context = attention(q, k, v, cu, longest, layer.window, causal=self._causal, scale=self._scale)
            x = x + _normed(layer.attention_out(context.reshape(len(x), -1)), layer.attention_norm)
            gates, values = functional.linear(_normed(x, layer.second_norm), *layer.gates).chunk(2, dim=-1)
            x = x + _normed(layer.down(layer.activation(gates) * values), layer.last_norm)
            if layer.input is not None and given is not None:
                gate, project, norm = layer.input
                x = (x + _normed(project(layer.activation(gate(x)) * given), norm)) * layer.scale
        x = _normed(x, self._final_norm)
        return x if self._inputs_of_layers is None else self._model.embedding_projection(x)

    def _layer_inputs(self, x: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """The input of each layer, made of the embeddings by one product; None where the model has none."""
        made = self._inputs_of_layers
        if made is None:
            return [None] * len(self._layers)
        rows = made.per_layer_model_projection(x) * made.per_layer_model_projection_scale
        normed = _normed(rows.view(len(x), len(self._layers), -1), _rms_norm(made.per_layer_projection_norm))
        return normed.unbind(1)


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return x if norm is None else functional.rms_norm(x, x.shape[-1:], *norm)


def _rms_norm(module: Any) -> Norm:
    """The weight and epsilon of a norm; Gemma 3's are stored without their one."""
    if type(module).__name__.startswith("Gemma3"):
        return (module.weight + 1).detach(), module.eps
    return module.weight.detach(), module.eps if hasattr(module, "eps") else module.variance_epsilon


def _decoder_layer(layer: Any, gemma: bool, kind: str) -> DecoderLayer:
    attention, mlp, block = layer.self_attn, layer.mlp, getattr(layer, "ple_block", None)
    after = layer.post_attention_layernorm  # in Gemma 3 the result's, in Qwen3 the next input's
    return DecoderLayer(
        kind,
        attention.sliding_window - 1 if attention.sliding_window else None,
        _rms_norm(layer.input_layernorm),
        _joined(attention.q_proj, attention.k_proj, attention.v_proj),
        _rms_norm(attention.q_norm),
        _rms_norm(attention.k_norm),
        attention.o_proj,
        _rms_norm(after) if gemma else None,
        _rms_norm(layer.pre_feedforward_layernorm if gemma else after),
        _joined(mlp.gate_proj, mlp.up_proj),
        mlp.act_fn,
        mlp.down_proj,
        _rms_norm(layer.post_feedforward_layernorm) if gemma else None,
        attention.k_proj.out_features // attention.head_dim,
        attention.head_dim,
        attention.v_norm.eps if block else None,
        block and (block.per_layer_input_gate, block.per_layer_projection, _rms_norm(block.post_per_layer_input_norm)),
        layer.layer_scalar if block else None,
    )


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
