"""BERT's layers on packed sequences, in torch, on a CPU.

Hidden states of a batch are one [T, hidden] matrix, so embeddings, linear layers and LayerNorms never see padding.
Attention sees sequences too: they come sorted by length, so those of equal length lie side by side and are one batched
product [n · heads, L, L].

Where kernels are made for a number of rows, the matrix has a few rows more, which belong to no sequence: see
torch_linear.kernel_rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.checkpoint import PADDING_POSITION, RELATIVE, Checkpoint
from embert.engine.config import EncoderConfig
from embert.engine.encoders.torch_linear import Activation, Linear, kernel_rows, make_linear, packed_works
from embert.engine.encoders.torch_positions import RelativePositions

__all__ = ["Bert", "Group"]

Group = tuple[int, int, int]  # first token, number of sequences, length of each

# Attention scores held at once; more are computed in turn, so that they stay in the cores' own caches.
MAX_SCORE_BYTES = 2 << 20

# In bfloat16: sequences of more tokens than the first are rounded up to a multiple of the second.
SHORT_LENGTH, LENGTH_STEP = 64, 16

NORMS = ("attention.output.LayerNorm", "output.LayerNorm")


class Bert:
    """The embeddings and layers of one model, in one dtype; but LayerNorms' gammas and betas in float32 always.

    MiniLM-L6 in bfloat16, 64 passages: 0.65 % off float32 instead of 0.89 %, in the same time.
    """

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._words = _tensor(checkpoint, "embeddings.word_embeddings.weight")
        positions = _tensor(checkpoint, "embeddings.position_embeddings.weight").float()
        if config.padding_id is not None:  # the row after those of texts
            positions = torch.cat([positions, _tensor(checkpoint, PADDING_POSITION).float()])
        self._types = _tensor(checkpoint, "embeddings.token_type_embeddings.weight").float()
        # Nearly every batch has token type 0 throughout, so that row is added beforehand; other types by difference.
        self._positions = positions + self._types[0]
        self._norm = _norm(checkpoint, "embeddings.LayerNorm")
        self._relative: RelativePositions | None = None
        if config.relative_buckets:
            longest = -(-config.max_positions // LENGTH_STEP) * LENGTH_STEP
            self._relative = RelativePositions(_tensor(checkpoint, RELATIVE), longest, dtype)
        weight = _tensor(checkpoint, "encoder.layer.0.intermediate.dense.weight").to(dtype)
        bias = _tensor(checkpoint, "encoder.layer.0.intermediate.dense.bias").to(dtype)
        self.packed = packed_works(weight, bias, cast("Activation", config.activation))
        self._layers = [
            _Layer(config, checkpoint, layer, dtype, self._relative, packed=self.packed)
            for layer in range(config.layers)
        ]

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        groups: Sequence[Group],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last hidden state [T, hidden], in the layers' dtype, or of it the `rows` [n] asked for: [n, hidden].

        `ids`, `positions` and `token_types` are int64 [T], `rows` int64 [n]; `groups` cover all T tokens in order.
        """
        tokens = len(ids)
        if self.packed and (spare := kernel_rows(tokens) - tokens):
            ids, positions = F.pad(ids, (0, spare)), F.pad(positions, (0, spare))
            token_types = None if token_types is None else F.pad(token_types, (0, spare))
        x = F.embedding(ids, self._words).float().add_(F.embedding(positions, self._positions))
        if token_types is not None:
            x += F.embedding(token_types, self._types) - self._types[0]
        x = F.layer_norm(x, x.shape[1:], *self._norm, self._config.layer_norm_eps).to(self._dtype)
        for layer in self._layers[:-1]:
            x = layer(x, groups)
        if rows is None:
            return self._layers[-1](x, groups)[:tokens]
        wanted = len(rows)
        if self.packed:
            rows = F.pad(rows, (0, kernel_rows(wanted) - wanted))
        return self._layers[-1](x, groups, rows)[:wanted]

    @torch.inference_mode()
    def prepare(self, rows: int) -> None:
        """Have the kernels for so many rows made, which are the same in every layer."""
        self._layers[0](torch.zeros(rows, self._config.hidden_size, dtype=self._dtype), ())

    @torch.inference_mode()
    def prepare_attention(self, longest: int) -> None:
        """Have attention's kernels for sequences of up to so many tokens made; in float32 it has none of its own."""
        if self._dtype == torch.float32:
            return
        for length in range(SHORT_LENGTH + 1, longest + 1, LENGTH_STEP):
            qkv = torch.zeros(length, 3 * self._config.hidden_size, dtype=self._dtype)
            _attention(qkv, [(0, 1, length)], self._config.heads, self._relative)


class _Layer:
    def __init__(
        self,
        config: EncoderConfig,
        checkpoint: Checkpoint,
        layer: int,
        dtype: torch.dtype,
        relative: RelativePositions | None,
        *,
        packed: bool,
    ) -> None:
        prefix = f"encoder.layer.{layer}."

        def linear(names: Sequence[str], activation: str = "none") -> Linear:
            """Several layers of the same input are one product."""
            weights = [_tensor(checkpoint, f"{prefix}{name}.weight").float() for name in names]
            biases = [_tensor(checkpoint, f"{prefix}{name}.bias").float() for name in names]
            if names == QKV:
                # softmax(q·kᵀ / √d): the scale goes into the query's weights.
                scale = config.head_size**-0.5
                weights[0], biases[0] = weights[0] * scale, biases[0] * scale
            weight = torch.cat(weights) if len(weights) > 1 else weights[0]
            return make_linear(
                weight.to(dtype), torch.cat(biases).to(dtype), cast("Activation", activation), packed=packed
            )

        self._config = config
        self._relative = relative
        self._qkv = linear(QKV)
        self._projection = linear(("attention.output.dense",))
        self._inner = linear(("intermediate.dense",), config.activation)
        self._outer = linear(("output.dense",))
        self._norms = [_norm(checkpoint, prefix + name) for name in NORMS]

    def __call__(self, x: torch.Tensor, groups: Sequence[Group], rows: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] → [T, hidden], or [n, hidden] with `rows` [n]: after attention no row needs another."""
        eps = self._config.layer_norm_eps
        context = _attention(self._qkv(x), groups, self._config.heads, self._relative)
        if rows is not None:
            context, x = context[rows], x[rows]
        x = F.layer_norm(self._projection(context, x), x.shape[1:], *self._norms[0], eps)
        return F.layer_norm(self._outer(self._inner(x), x), x.shape[1:], *self._norms[1], eps)


QKV = ("attention.self.query", "attention.self.key", "attention.self.value")


def _attention(
    qkv: torch.Tensor, groups: Sequence[Group], heads: int, relative: RelativePositions | None = None
) -> torch.Tensor:
    """[T, 3 · hidden] → [T, hidden]; queries are scaled already. Rows after the last group become 0.

    Batched products and a softmax: at BERT's lengths torch's scaled_dot_product_attention is up to 2.5 times slower on
    a CPU (float32, 512 tokens a sequence: equal).

    Products of bfloat16 have a kernel for every shape, milliseconds to make and 0.7 MB to keep. So short sequences are
    multiplied in float32, where that is no slower; longer ones a sequence at a time, with rows of zeros up to a
    multiple of LENGTH_STEP, whose scores count for nothing.
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    context = qkv.new_empty(tokens, hidden)
    stop = 0
    for start, n, length in groups:
        stop = start + n * length
        given = qkv[start:stop].view(n, length, 3, heads, size).permute(2, 0, 3, 1, 4)
        made = qkv.dtype != torch.float32 and length > SHORT_LENGTH  # for its shape
        rows = -(-length // LENGTH_STEP) * LENGTH_STEP if made else length
        split = torch.empty(3, n, heads, rows, size, dtype=qkv.dtype if made else torch.float32)
        split[:, :, :, :length] = given
        split[:, :, :, length:] = 0
        q, k, v = split.view(3, n * heads, rows, size)
        at_once = max(1, MAX_SCORE_BYTES // (rows * rows * split.element_size()))
        if made or relative is not None:
            # A part of a sequence's heads, or some sequences' whole.
            whole = 1 if made else max(1, at_once // heads)
            at_once = max(part for part in range(1, heads + 1) if heads % part == 0 and part <= at_once) * whole
        mixed = torch.empty_like(q)
        for first in range(0, n * heads, at_once):
            part = slice(first, first + at_once)
            nearness = None
            if relative is not None:
                nearness = relative.of(rows, q.dtype)[first % heads :][:at_once]
            torch.bmm(_weights(q[part], k[part], length, nearness), v[part], out=mixed[part])
        mixed = mixed.view(n, heads, rows, size)[:, :, :length]
        context[start:stop].view(n, length, heads, size).copy_(mixed.transpose(1, 2))
    context[stop:] = 0
    return context


def _weights(q: torch.Tensor, k: torch.Tensor, keys: int, nearness: torch.Tensor | None) -> torch.Tensor:
    scores = torch.bmm(q, k.transpose(1, 2))
    if nearness is not None:
        scores.view(-1, *nearness.shape).add_(nearness)
    scores[:, :, keys:] = -torch.inf
    return scores.softmax(-1)


def _tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A stored tensor as torch sees it: a view of the mapped file."""
    stored = checkpoint.stored(name)
    tensor = torch.from_numpy(stored.array)
    return tensor.view(torch.bfloat16) if stored.dtype == "BF16" else tensor


def _norm(checkpoint: Checkpoint, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _tensor(checkpoint, f"{name}.weight").float(), _tensor(checkpoint, f"{name}.bias").float()
