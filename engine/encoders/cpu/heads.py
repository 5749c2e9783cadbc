"""Heads on a CPU: the last hidden states of some sequences to the rows of one task."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from embert.engine.batch import TaskOutput, cumulative
from embert.engine.encoders.cpu.operators import Operators
from embert.engine.encoders.cpu.positions import Positions
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.cpu.transformer import Layer, read_norm
from embert.engine.files.safetensors_file import Tensor
from embert.engine.heads import description
from embert.engine.heads.embedding import normalize_rows
from embert.engine.heads.token_rows import pool_rows, token_weight_rows
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import FINAL_NORM, TOKEN_TYPE_EMBEDDINGS
from embert.engine.tasks import Task
from embert.engine.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]

# Poolings that take one row of each sequence: the last layer then computes only these rows after its attention.
ONE_ROW = ("cls", "last-token")


def one_row_each(groups: Sequence[Group], pooling: str) -> npt.NDArray[np.int64]:
    """The rows that a pooling of ONE_ROW takes, one a sequence: int64 [n]."""
    rows = [np.arange(n) * length + start + (0 if pooling == "cls" else length - 1) for start, n, length, *_ in groups]
    return np.concatenate(rows)


def pool_groups(
    hidden: Floats,
    groups: Sequence[Group],
    pooling: str,
    operators: Operators,
    prompt_tokens: npt.NDArray[np.integer] | None = None,
) -> Floats:
    """[T, hidden] → float32 [n, hidden · modes] for the groups' n sequences, by `Model.pooling`.

    `prompt_tokens` [n] are not pooled.
    """
    if prompt_tokens is None and pooling == "mean":
        return operators.means(hidden, groups)
    if prompt_tokens is None and pooling == "max":
        rows = [hidden[start : start + n * length].reshape(n, length, -1).max(1) for start, n, length, *_ in groups]
        return np.concatenate(rows)
    return pool_rows(hidden, cumulative(lengths_of(groups)), pooling, prompt_tokens)


def lengths_of(groups: Sequence[Group]) -> npt.NDArray[np.int32]:
    """Tokens of each sequence: int32 [n]."""
    return np.repeat(np.array([group.length for group in groups], np.int32), [group.sequences for group in groups])


# Columns of a vocabulary's logits that are computed at once, for all tokens of a run: 2 MB of float32 for most runs.
VOCABULARY_COLUMNS = 1024


def _in_columns(matrix: Tensor, bias: Floats | None, operators: Operators) -> list[Callable[[Floats], Floats]]:
    """The products with some rows of a vocabulary's matrix each."""
    parts = [slice(first, first + VOCABULARY_COLUMNS) for first in range(0, len(matrix.array), VOCABULARY_COLUMNS)]
    weights = ((part, Tensor(matrix.array[part], matrix.dtype).float32()) for part in parts)
    return [operators.head_linear(weight, None if bias is None else bias[part], "identity") for part, weight in weights]


@dataclass(frozen=True, slots=True)
class Hidden:
    """The last hidden states of n sequences of T tokens in all."""

    rows: Floats  # [T, hidden]
    ids: npt.NDArray[np.int64]  # [T]
    groups: Sequence[Group]  # of all n sequences, in order
    prompt_tokens: npt.NDArray[np.int64] | None = None  # [n]: first ones, that are not pooled
    token_types: npt.NDArray[np.int64] | None = None  # [T]; None: all 0

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        return lengths_of(self.groups)

    def of(self, mask: npt.NDArray[np.bool_]) -> Hidden:
        """The hidden states of the sequences where `mask` [n] is true."""
        if mask.all():
            return self
        (tokens,) = np.nonzero(np.repeat(mask, self.lengths))
        groups, start = [], 0
        bounds = np.cumsum([0, *(group.sequences for group in self.groups)])
        for group, (first, last) in zip(self.groups, itertools.pairwise(bounds), strict=True):
            if n := int(np.count_nonzero(mask[first:last])):
                groups.append(Group(start, n, group.length, group.keys))
                start += n * group.length
        prompt_tokens = None if self.prompt_tokens is None else self.prompt_tokens[mask]
        types = None if self.token_types is None else self.token_types[tokens]
        return Hidden(self.rows[tokens], self.ids[tokens], groups, prompt_tokens, types)


class Head(Protocol):
    """Called by several threads at a time."""

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """The rows of these sequences, in their order."""
        ...


def load_heads(model: Model, checkpoint: Checkpoint, operators: Operators) -> dict[Task, Head]:
    """A head for each of the model's tasks. Raises BrokenModel."""
    heads: dict[Task, Head] = {}
    if model.embeds:
        heads |= {Task.EMBED: Pool(model.pooling, operators), Task.TOKENS: LastHidden()}
    classifier, sparse, multi_vector = model.heads.classifier, model.heads.sparse, model.heads.multi_vector
    if classifier is not None:
        heads[Task.CLASSIFY] = Logits(classifier, checkpoint, operators)
    if model.heads.token_classifier is not None:
        heads[Task.TOKEN_CLASSES] = TokenLogits(model.heads.token_classifier, checkpoint, operators)
    if isinstance(sparse, description.Splade):
        heads[Task.SPARSE] = Splade(sparse, model.config, checkpoint, operators)
    elif sparse is not None:
        heads[Task.SPARSE] = TokenWeights(sparse, checkpoint, operators)
    decider = model.heads.decider
    if isinstance(decider, description.LabelDecider):
        heads[Task.DECIDE] = Logits(decider.classifier, checkpoint, operators)
        heads[Task.LABEL_MASS] = VocabularyMass(decider.vocabulary, checkpoint, operators)
    elif decider is not None:
        heads[Task.DECIDE] = MarkerLogits(decider, model, checkpoint, operators)
    if multi_vector is not None:
        heads[Task.MULTI] = MultiVectors(multi_vector, checkpoint, operators)
    return heads


class Pool:
    """EMBED before what follows pooling, which `EmbeddingHead` does for all sequences at once."""

    def __init__(self, pooling: str, operators: Operators) -> None:
        self._pooling, self._operators = pooling, operators

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """Pooled rows of n sequences: [n, hidden · modes]."""
        rows = pool_groups(hidden.rows, hidden.groups, self._pooling, self._operators, hidden.prompt_tokens)
        return TaskOutput.one_each(rows)


class Logits:
    """CLASSIFY: linear layers on one row of a sequence."""

    def __init__(self, head: description.Classifier, checkpoint: Checkpoint, operators: Operators) -> None:
        self._layers = [_Layer(layer, checkpoint, operators) for layer in head.layers]
        self._pooling, self._padding_id, self._operators = head.pooling, head.padding_id, operators

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """Logits of n sequences: [n, labels]."""
        layers = self._layers
        if self._pooling == "late":
            first, *layers = layers
            x = pool_groups(first(hidden.rows), hidden.groups, "mean", self._operators)
        elif self._padding_id is None:
            x = pool_groups(hidden.rows, hidden.groups, self._pooling, self._operators)
        else:
            x = hidden.rows[_last_tokens(hidden, self._padding_id)]
        for layer in layers:
            x = layer(x)
        return TaskOutput.one_each(x)


class VocabularyMass:
    """LABEL_MASS: the logits of the whole vocabulary are computed for some columns at a time, and only summed up.

    Most servers are never asked for it, so the matrix is read at the first request, and kept.
    """

    def __init__(self, layer: description.Layer, checkpoint: Checkpoint, operators: Operators) -> None:
        self._matrix, self._operators = checkpoint.vocabulary(layer), operators
        self._lock = threading.Lock()
        self._columns: list[Callable[[Floats], Floats]] = []

    def _read(self) -> list[Callable[[Floats], Floats]]:
        with self._lock:
            if not self._columns:
                self._columns = _in_columns(self._matrix, None, self._operators)
        return self._columns

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """[n, 1], from the last token's row."""
        x = pool_groups(hidden.rows, hidden.groups, "last-token", self._operators)
        largest, total = np.full(len(x), -np.inf), np.zeros(len(x))
        for columns in self._read():
            logits = columns(x).astype(np.float64)
            before, largest = largest, np.maximum(largest, logits.max(1))
            total = total * np.exp(before - largest) + np.exp(logits - largest[:, None]).sum(1)
        return TaskOutput.one_each((largest + np.log(total)).astype(np.float32)[:, None])


class MarkerLogits:
    """DECIDE of a MarkerDecider: its layers on all rows, then a number for each marker."""

    def __init__(
        self, head: description.MarkerDecider, model: Model, checkpoint: Checkpoint, operators: Operators
    ) -> None:
        own = Checkpoint.open(dataclasses.replace(model, config=head.config))
        self._layers = [Layer(head.config, own, number, operators) for number in range(head.config.layers)]
        self._types = own.float32(TOKEN_TYPE_EMBEDDINGS)
        self._norm = operators.head_norm(read_norm(head.config, own, FINAL_NORM))
        self._scorer = [_Layer(layer, checkpoint, operators) for layer in head.scorer]
        self._marker, self._operators = head.marker, operators

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """[n, MARKED_OPTIONS]: zeros behind a sequence's markers."""
        types = np.zeros(len(hidden.ids), np.int64) if hidden.token_types is None else hidden.token_types
        x = self._operators.enter(hidden.rows + self._types[types])
        for layer in self._layers:
            x = layer(self._operators.to_dtype(x), hidden.groups, Positions())
        lengths = hidden.lengths
        (places,) = np.nonzero(hidden.ids == self._marker)
        owners = np.repeat(np.arange(len(lengths)), lengths)[places]
        columns = np.arange(len(places)) - np.searchsorted(owners, owners)
        mask = columns < description.MARKED_OPTIONS
        values = np.zeros((len(lengths), description.MARKED_OPTIONS), np.float32)
        if mask.any():
            rows = self._norm(self._operators.leave(x)[places[mask]])
            for linear in self._scorer:
                rows = linear(rows)
            values[owners[mask], columns[mask]] = rows[:, 0]
        return TaskOutput.one_each(values)


class LastHidden:
    """TOKENS: the hidden states themselves."""

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """The rows of all tokens: [T, hidden]."""
        return TaskOutput(hidden.rows, cumulative(hidden.lengths))


class TokenLogits:
    """TOKEN_CLASSES: linear layers on every token."""

    def __init__(
        self,
        head: description.MultiVector | description.TokenClassifier,
        checkpoint: Checkpoint,
        operators: Operators,
    ) -> None:
        self._layers = [_Layer(layer, checkpoint, operators) for layer in head.layers]

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """Logits of all tokens: [T, columns]."""
        return TaskOutput(self._rows(hidden), cumulative(hidden.lengths))

    def _rows(self, hidden: Hidden) -> Floats:
        x = hidden.rows
        for layer in self._layers:
            x = layer(x)
        return x


class MultiVectors(TokenLogits):
    """MULTI: linear layers on every token, then length 1."""

    def _rows(self, hidden: Hidden) -> Floats:
        return normalize_rows(super()._rows(hidden))


class TokenWeights:
    """SPARSE of bge-m3: one number a token."""

    def __init__(self, head: description.TokenWeights, checkpoint: Checkpoint, operators: Operators) -> None:
        self._linear = operators.head_linear(*checkpoint.layer(head.layer), "relu")
        self._special_ids = head.special_ids

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """Pairs of token ids and weights."""
        weights = self._linear(hidden.rows)[:, 0]
        return token_weight_rows(hidden.ids, cumulative(hidden.lengths), weights, self._special_ids)


def _last_tokens(hidden: Hidden, padding_id: int) -> npt.NDArray[np.int64]:
    """The row of each sequence's last token that is not padding, of its first token where all are: int64 [n]."""
    stops = np.cumsum(hidden.lengths)
    rows = []
    for start, stop in zip(stops - hidden.lengths, stops, strict=True):
        (content,) = np.nonzero(hidden.ids[start:stop] != padding_id)
        rows.append(start + (content[-1] if len(content) else 0))
    return np.array(rows, np.int64)


class Splade:
    """SPARSE of a masked language model: log(1 + relu(logits)), the maximum over a text's tokens.

    The logits of all tokens never exist: they are computed for some columns of the vocabulary at a time. relu and the
    logarithm grow with their argument, so they follow the maximum.
    """

    def __init__(
        self, head: description.Splade, config: EncoderConfig, checkpoint: Checkpoint, operators: Operators
    ) -> None:
        vocabulary, self._operators = config.vocab_size, operators
        self._transform = _Layer(head.transform, checkpoint, operators)
        self._norm = operators.head_norm(checkpoint.norm(head.norm, head.transform.outputs))
        self._twice, self._most = head.twice, head.most
        stored = checkpoint.of_head(head.decoder, (vocabulary, head.transform.outputs)) if head.decoder else None
        stored = checkpoint.tied_decoder() if stored is None else stored
        bias = checkpoint.of_head(head.bias, (vocabulary,)).float32() if head.bias else np.zeros(vocabulary, np.float32)
        self._columns = _in_columns(stored, bias, operators)

    def __call__(self, hidden: Hidden) -> TaskOutput:
        """Pairs of token ids and weights."""
        x = self._norm(self._transform(hidden.rows))
        owners, indices, values = [], [], []
        for number, columns in enumerate(self._columns):
            largest = np.maximum(pool_groups(columns(x), hidden.groups, "max", self._operators), np.float32(0))
            nonzero = largest.nonzero()  # by sequences, then columns; a value that is not a number is kept, to be seen
            values.append(largest[nonzero])
            # A text of an untrained model has a pair for most of the vocabulary, so each takes no more than it must.
            owners.append(nonzero[0].astype(np.int32))
            indices.append((nonzero[1] + number * VOCABULARY_COLUMNS).astype(np.int32))
        weights = np.log1p(np.concatenate(values))
        if self._twice:
            weights = np.log1p(weights)
        owner, index = np.concatenate(owners), np.concatenate(indices)
        order = np.argsort(owner, kind="stable")  # the indices of a sequence ascend already
        offsets = cumulative(np.bincount(owner, minlength=len(hidden.lengths)).astype(np.int32))
        rows = TaskOutput(weights[order].reshape(-1, 1), offsets, index[order])
        return rows if self._most is None else rows.largest(self._most)


class _Layer:
    """norm(activation(x · weightᵀ + bias)) on any number of rows."""

    def __init__(self, layer: description.Layer, checkpoint: Checkpoint, operators: Operators) -> None:
        self._linear = operators.head_linear(*checkpoint.layer(layer), layer.activation)
        self._norm: Callable[[Floats], Floats] | None = None
        if layer.norm is not None:
            self._norm = operators.head_norm(checkpoint.norm(layer.norm, layer.outputs, layer.file))

    def __call__(self, x: Floats) -> Floats:
        """[T, in] → [T, out]."""
        y = self._linear(x)
        return y if self._norm is None else self._norm(y)
