"""Heads on a CPU: the last hidden states of some sequences to the rows of one task."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.batch import TaskOutput, cumulative
from embert.engine.encoders.cpu import kernels
from embert.engine.encoders.cpu.kernels import Activation
from embert.engine.encoders.cpu.linear import Linear, make_linear
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.cpu.transformer import as_torch
from embert.engine.heads import description
from embert.engine.heads.pooling import POOLINGS
from embert.engine.heads.token_rows import pooled_rows, token_weight_rows
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.tasks import Task
from embert.engine.weights.checkpoint import Checkpoint

# Poolings that take one row of each sequence: the last layer then computes only these rows after its attention.
ONE_ROW = ("cls", "last-token")


def one_row_each(groups: Sequence[Group], pooling: str) -> torch.Tensor:
    """The rows that a pooling of ONE_ROW takes, one a sequence: int64 [n]."""
    rows = [
        torch.arange(n) * length + start + (0 if pooling == "cls" else length - 1) for start, n, length, _ in groups
    ]
    return torch.cat(rows)


def pooled(
    hidden: torch.Tensor,
    groups: Sequence[Group],
    pooling: str,
    *,
    own_kernels: bool = False,
    prompt_tokens: npt.NDArray[np.integer] | None = None,
) -> torch.Tensor:
    """[T, hidden] → float32 [n, hidden · modes] for the groups' n sequences, by `Model.pooling`.

    `own_kernels` take float32. `prompt_tokens` [n] are not pooled.
    """
    if pooling not in POOLINGS or prompt_tokens is not None:
        counts = [group.sequences for group in groups]
        lengths = np.repeat(np.array([group.length for group in groups], np.int32), counts)
        return torch.from_numpy(pooled_rows(hidden.float().numpy(), cumulative(lengths), pooling, prompt_tokens))
    if pooling in ONE_ROW:
        return hidden[one_row_each(groups, pooling)].float()
    if own_kernels and pooling == "mean":
        return kernels.means(hidden, groups)
    rows = [_pool(hidden, group, pooling) for group in groups]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _pool(hidden: torch.Tensor, group: Group, pooling: str) -> torch.Tensor:
    start, n, length, _ = group
    rows = hidden[start : start + n * length].view(n, length, -1)
    return rows.mean(1, dtype=torch.float32) if pooling == "mean" else rows.amax(1).float()


# Columns of SPLADE's logits that are computed at once, for all tokens of a run: 2 MB of float32 for most runs.
SPLADE_COLUMNS = 1024

# What a linear layer here computes as part of its product; other activations follow it.
FUSED = {"identity": "none", "relu": "relu", "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Hidden:
    """The last hidden states of n sequences of T tokens in all."""

    rows: torch.Tensor  # [T, hidden], in the layers' dtype
    ids: npt.NDArray[np.int64]  # [T]
    groups: Sequence[Group]  # of all n sequences, in order
    prompt_tokens: npt.NDArray[np.int64] | None = None  # [n]: first ones, that are not pooled

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence: int32 [n]."""
        counts = [group.sequences for group in self.groups]
        return np.repeat(np.array([group.length for group in self.groups], np.int32), counts)

    def of(self, chosen: npt.NDArray[np.bool_]) -> Hidden:
        """The hidden states of the sequences where `chosen` [n] is true."""
        if chosen.all():
            return self
        (tokens,) = np.nonzero(np.repeat(chosen, self.lengths))
        groups, start = [], 0
        bounds = np.cumsum([0, *(group.sequences for group in self.groups)])
        for group, (first, last) in zip(self.groups, itertools.pairwise(bounds), strict=True):
            if n := int(np.count_nonzero(chosen[first:last])):
                groups.append(Group(start, n, group.length, group.keys))
                start += n * group.length
        prompt_tokens = None if self.prompt_tokens is None else self.prompt_tokens[chosen]
        return Hidden(self.rows[torch.from_numpy(tokens)], self.ids[tokens], groups, prompt_tokens)


class Head(Protocol):
    """Called by several threads at a time, each in inference mode."""

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """The rows of these sequences, in their order."""
        ...


def load_heads(model: Model, checkpoint: Checkpoint, dtype: torch.dtype, *, own_kernels: bool) -> dict[Task, Head]:
    """A head for each of the model's tasks. Raises BrokenModel."""
    heads: dict[Task, Head] = {}
    if model.embeds:
        heads |= {Task.EMBED: Pooled(model.pooling, own_kernels=own_kernels), Task.TOKENS: LastHidden()}
    classifier, sparse, multi_vector = model.heads.classifier, model.heads.sparse, model.heads.multi_vector
    if classifier is not None:
        heads[Task.CLASSIFY] = Logits(classifier, checkpoint, own_kernels=own_kernels)
    if model.heads.token_classifier is not None:
        heads[Task.TOKEN_CLASSES] = TokenLogits(
            model.heads.token_classifier, checkpoint, torch.float32, own_kernels=own_kernels
        )
    if isinstance(sparse, description.Splade):
        heads[Task.SPARSE] = Splade(sparse, model.config, checkpoint, dtype, own_kernels=own_kernels)
    elif sparse is not None:
        heads[Task.SPARSE] = TokenWeights(sparse, checkpoint)
    if multi_vector is not None:
        heads[Task.MULTI] = MultiVectors(multi_vector, checkpoint, dtype, own_kernels=own_kernels)
    return heads


class Pooled:
    """EMBED before what follows pooling, which `EmbeddingHead` does for all sequences at once."""

    def __init__(self, pooling: str, *, own_kernels: bool) -> None:
        self._pooling, self._own_kernels = pooling, own_kernels

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """[n, hidden · modes]."""
        rows = pooled(
            hidden.rows, hidden.groups, self._pooling, own_kernels=self._own_kernels, prompt_tokens=hidden.prompt_tokens
        )
        return TaskOutput.one_each(rows.numpy())


class Logits:
    """CLASSIFY: linear layers on one row of a sequence, in float32."""

    def __init__(self, head: description.Classifier, checkpoint: Checkpoint, *, own_kernels: bool) -> None:
        self._layers = [_Layer(layer, checkpoint, torch.float32, own_kernels=own_kernels) for layer in head.layers]
        self._pooling, self._padding_id = head.pooling, head.padding_id

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """[n, labels]."""
        layers = self._layers
        if self._pooling == "late":
            first, *layers = layers
            x = pooled(first(hidden.rows.float()), hidden.groups, "mean")
        elif self._padding_id is None:
            x = pooled(hidden.rows, hidden.groups, self._pooling)
        else:
            x = hidden.rows[_last_tokens(hidden, self._padding_id)].float()
        for layer in layers:
            x = layer(x)
        return TaskOutput.one_each(x.numpy())


class LastHidden:
    """TOKENS: the hidden states themselves."""

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """[T, hidden]."""
        return TaskOutput(hidden.rows.float().numpy(), cumulative(hidden.lengths))


class TokenLogits:
    """TOKEN_CLASSES: linear layers on every token."""

    def __init__(
        self,
        head: description.MultiVector | description.TokenClassifier,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        own_kernels: bool,
    ) -> None:
        self._layers = [_Layer(layer, checkpoint, dtype, own_kernels=own_kernels) for layer in head.layers]
        self._dtype = dtype

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """[T, columns]."""
        return TaskOutput(self._rows(hidden).numpy(), cumulative(hidden.lengths))

    def _rows(self, hidden: Hidden) -> torch.Tensor:
        x = hidden.rows.to(self._dtype)
        for layer in self._layers:
            x = layer(x)
        return x.float()


class MultiVectors(TokenLogits):
    """MULTI: linear layers on every token, then length 1."""

    def _rows(self, hidden: Hidden) -> torch.Tensor:
        return F.normalize(super()._rows(hidden), dim=1)


class TokenWeights:
    """SPARSE of bge-m3: one number a token."""

    def __init__(self, head: description.TokenWeights, checkpoint: Checkpoint) -> None:
        weight, bias = checkpoint.layer(head.layer)
        self._weight = as_torch(weight).float()
        self._bias = None if bias is None else as_torch(bias).float()
        self._special_ids = head.special_ids

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """Pairs of token ids and weights."""
        weights = F.linear(hidden.rows.float(), self._weight, self._bias).relu_()[:, 0].numpy()
        return token_weight_rows(hidden.ids, cumulative(hidden.lengths), weights, self._special_ids)


def _last_tokens(hidden: Hidden, padding_id: int) -> torch.Tensor:
    """The row of each sequence's last token that is not padding, of its first token where all are: int64 [n]."""
    stops = np.cumsum(hidden.lengths)
    rows = []
    for start, stop in zip(stops - hidden.lengths, stops, strict=True):
        (counted,) = np.nonzero(hidden.ids[start:stop] != padding_id)
        rows.append(start + (counted[-1] if len(counted) else 0))
    return torch.tensor(rows, dtype=torch.int64)


class Splade:
    """SPARSE of a masked language model: log(1 + relu(logits)), the maximum over a text's tokens.

    The logits of all tokens never exist: they are computed for some columns of the vocabulary at a time. relu and the
    logarithm grow with their argument, so they follow the maximum.
    """

    def __init__(
        self,
        head: description.Splade,
        config: EncoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        own_kernels: bool,
    ) -> None:
        vocabulary = config.vocab_size
        self._transform = _Layer(head.transform, checkpoint, dtype, own_kernels=own_kernels)
        self._norm, self._twice = _Norm(head.norm, head.transform.outputs, checkpoint), head.twice
        self._most = head.most
        stored = checkpoint.of_head(head.decoder, (vocabulary, head.transform.outputs)) if head.decoder else None
        weight = as_torch(checkpoint.tied_decoder() if stored is None else stored)
        bias = as_torch(checkpoint.of_head(head.bias, (vocabulary,))) if head.bias else torch.zeros(vocabulary)
        self._columns: list[Linear] = []
        for first in range(0, vocabulary, SPLADE_COLUMNS):
            part = slice(first, first + SPLADE_COLUMNS)
            self._columns.append(make_linear(weight[part].to(dtype), bias[part].to(dtype), own_kernels=own_kernels))

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """Pairs of token ids and weights."""
        x = self._norm(self._transform(hidden.rows))
        owners, indices, values = [], [], []
        for number, columns in enumerate(self._columns):
            largest = pooled(columns(x), hidden.groups, "max").relu_()
            nonzero = largest.nonzero()  # by sequences, then columns; a value that is not a number is kept, to be seen
            values.append(largest[nonzero[:, 0], nonzero[:, 1]])
            # A text of an untrained model has a pair for most of the vocabulary, so each takes no more than it must.
            owners.append(nonzero[:, 0].to(torch.int32))
            indices.append((nonzero[:, 1] + number * SPLADE_COLUMNS).to(torch.int32))
        weights = torch.cat(values).log1p_()
        if self._twice:
            weights.log1p_()
        owner, index = torch.cat(owners).numpy(), torch.cat(indices).numpy()
        order = np.argsort(owner, kind="stable")  # the indices of a sequence ascend already
        offsets = cumulative(np.bincount(owner, minlength=len(hidden.lengths)).astype(np.int32))
        rows = TaskOutput(weights.numpy()[order].reshape(-1, 1), offsets, index[order])
        return rows if self._most is None else rows.largest(self._most)


class _Layer:
    """norm(activation(x · weightᵀ + bias)) on any number of rows, in the layers' dtype."""

    def __init__(
        self, layer: description.Layer, checkpoint: Checkpoint, dtype: torch.dtype, *, own_kernels: bool
    ) -> None:
        stored, stored_bias = checkpoint.layer(layer)
        bias = torch.zeros(layer.outputs) if stored_bias is None else as_torch(stored_bias)
        fused = FUSED.get(layer.activation, "none")
        self._linear = make_linear(
            as_torch(stored).to(dtype), bias.to(dtype), cast("Activation", fused), own_kernels=own_kernels
        )
        self._after = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}.get(layer.activation)
        self._norm = None if layer.norm is None else _Norm(layer.norm, layer.outputs, checkpoint, layer.file)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] → [T, out]."""
        y = self._linear(x)
        y = y if self._after is None else self._after(y)
        return y if self._norm is None else self._norm(y)


class _Norm:
    """LayerNorm on any number of rows, in their dtype; its own tensors are float32."""

    def __init__(self, norm: description.Norm, columns: int, checkpoint: Checkpoint, file: str = "") -> None:
        gamma, beta = checkpoint.norm(norm, columns, file)
        self._gamma = as_torch(gamma).float()
        self._beta = None if beta is None else as_torch(beta).float()
        self._eps = norm.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, columns] → [T, columns]."""
        return F.layer_norm(x, x.shape[1:], self._gamma, self._beta, self._eps)
