"""Frozen descriptions of a model's heads, read from its files. Encoders load their tensors and run them.

Imports no numpy: the supervisor reads descriptions, and computes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.tasks import NO_TASK, Task

MARKED_OPTIONS = 255  # columns of the logits of a MarkerDecider
OPTION_BUCKETS = ((2, "2"), (5, "3-5"), (10, "6-10"), (MARKED_OPTIONS, "11+"))  # most options, and the name


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm. Its tensors are `name`.weight and `name`.bias, of as many values as its rows have columns."""

    name: str
    eps: float
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Layer:
    """norm(activation(x · weightᵀ + bias)). Its tensors are `name`.weight [outputs, inputs] and `name`.bias [outputs].

    Without a name they are called weight and bias.
    """

    name: str
    file: str  # inside the model's folder; empty: the file of the encoder's own weights
    inputs: int
    outputs: int
    bias: bool
    activation: str  # "identity", "tanh", "relu", "sigmoid", "silu", "gelu" (with erf), "gelu_tanh"
    norm: Norm | None = None  # its tensors are in the same file
    difference: tuple[int, int | None] | None = None  # of one output: its weight is this row of the tensor, less that
    rows: tuple[int, ...] = ()  # rows of a language model's matrix, one for each output


@dataclass(frozen=True, slots=True)
class Classifier:
    """The logits of a sequence, from one row of it. One label: a score, such as a reranker's.

    With pooling "late" the first layer takes all rows, and the next one the mean of what it makes of them.
    """

    layers: tuple[Layer, ...]
    labels: tuple[str, ...]
    activation: str  # from logits to scores: "sigmoid" (each by itself), "softmax", "identity"
    pooling: str = "cls"  # the row: the first token's, the "mean" of all, the "last-token"'s, or "late"
    padding_id: int | None = None  # with "last-token": tokens of this id at the end do not count; None: all count
    entailment: int | None = None  # the number of the label that says that a second text follows from the first


@dataclass(frozen=True, slots=True)
class TokenClassifier:
    """The logits of each token, from its last hidden state. Scores are their softmax."""

    layers: tuple[Layer, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LabelDecider:
    """Decisions of a language model: its logits of labels as the first token of its reply, from the last token."""

    classifier: Classifier  # of the labels, each of them a token, such as A and B
    vocabulary: Layer  # the whole matrix


@dataclass(frozen=True, slots=True)
class MarkerDecider:
    """Laya's decisions: a marker precedes each option, and layers after the encoder turn the markers' rows into logits.

    A sequence is the question, its options and the state. Its token types are the question's type: a choice, a score or
    a predicate.
    """

    config: EncoderConfig  # of the layers; its last norm precedes the scorer
    scorer: tuple[Layer, Layer]
    marker: int  # ids of tokens
    first: int
    separator: int
    marker_text: str
    most_tokens: int  # of a sequence
    question_tokens: int  # of the question and its options
    temperatures: Mapping[str, float]  # that logits are divided by, by type and "type:options"

    def temperature(self, kind: str, options: int) -> float:
        """The temperature of a question of `kind`, which has this number of options."""
        size = next(name for most, name in OPTION_BUCKETS if options <= most)
        return self.temperatures.get(f"{kind}:{size}", self.temperatures.get(kind, 1.0))


@dataclass(frozen=True, slots=True)
class Splade:
    """Weights of the whole vocabulary: the masked language model's logits, relu, log(1 + x), maximum over tokens."""

    transform: Layer  # from the hidden states' columns to the word table's
    norm: Norm  # after the transform
    decoder: str  # the tensor [vocabulary, columns of the word table]; empty: the word table itself, tied
    bias: str  # the tensor [vocabulary]; empty: none
    twice: bool = False  # log(1 + log(1 + x))
    most: int | None = None  # weights of a vector, the largest ones; None: all


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """bge-m3's sparse vectors: relu(w · h + b) for each token, maximum for each token id, without special tokens."""

    layer: Layer  # one output
    special_ids: tuple[int, ...]  # of the tokens that are skipped


@dataclass(frozen=True, slots=True)
class Expansion:
    """ColBERT's query expansion: a token put after a shorter query as often as needed. Its rows are rows of the query.

    Where the added tokens are not attended to, no row has their keys, not even their own, so the query's own rows are
    those of the query only. They are known by their ids: the run of `token` that ends a sequence (a query's own text
    ends with another special token).
    """

    token: int  # its id, mostly [MASK]'s
    length: int  # tokens of an expanded query
    attended: bool


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """Similar vectors of a text are replaced by their mean: sentence-transformers' HierarchicalTokenPooling."""

    factor: float  # vectors before for each one after; at least 1, which leaves them as they are
    protected: int  # first vectors that are left as they are
    normalize: bool  # vectors have length 1 afterwards


@dataclass(frozen=True, slots=True)
class Role:
    """Settings of queries, or of documents."""

    prompt: str = ""  # put before a text
    length: int | None = None  # tokens at most, special tokens included; None: the model's max_input_length
    expansion: Expansion | None = None
    skipped: tuple[int, ...] = ()  # ids whose tokens have no vector, such as punctuation
    only: tuple[int, ...] = ()  # ids whose tokens alone have one; empty: all others
    pooling: TokenPooling | None = None


@dataclass(frozen=True, slots=True)
class MultiVector:
    """A vector for each token: linear layers, then length 1."""

    layers: tuple[Layer, ...]
    skips_first: bool = False  # the first token has no vector
    query: Role = Role()
    document: Role = Role()
    mean_of_query: bool = False  # a score is the mean over a query's vectors, not their sum

    def role(self, is_query: bool) -> Role:
        """Return the role of queries or of documents."""
        return self.query if is_query else self.document

    def within(self, usual: int) -> MultiVector:
        """The same, with a length of `usual` tokens for queries or documents without one."""
        query, document = (
            dataclasses.replace(role, length=role.length or usual) for role in (self.query, self.document)
        )
        return dataclasses.replace(self, query=query, document=document)

    @property
    def longest(self) -> int:
        """The most tokens of a query or a document. Call it on what `within` returns."""
        expansion = self.query.expansion.length if self.query.expansion else 0
        return max(expansion, self.query.length or 0, self.document.length or 0)

    @property
    def longest_pair(self) -> int:
        """The most tokens of a query and a document. Call it on what `within` returns."""
        expansion = self.query.expansion.length if self.query.expansion else 0
        return max(expansion, self.query.length or 0) + (self.document.length or 0)

    @property
    def pools(self) -> bool:
        """True if similar vectors of a query or of a document are replaced by their mean."""
        return self.query.pooling is not None or self.document.pooling is not None

    @property
    def unattended(self) -> int | None:
        """The id of tokens that are added to queries and not attended to; None where there are none."""
        expansion = self.query.expansion
        return None if expansion is None or expansion.attended else expansion.token

    @property
    def columns(self) -> int:
        return self.layers[-1].outputs


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one model in addition to pooling."""

    classifier: Classifier | None = None
    sparse: Splade | TokenWeights | None = None
    multi_vector: MultiVector | None = None
    token_classifier: TokenClassifier | None = None
    decider: LabelDecider | MarkerDecider | None = None

    @property
    def tasks(self) -> Task:
        tasks = NO_TASK
        heads = {
            Task.CLASSIFY: self.classifier,
            Task.SPARSE: self.sparse,
            Task.MULTI: self.multi_vector,
            Task.TOKEN_CLASSES: self.token_classifier,
            Task.DECIDE: self.decider,
        }
        for task, head in heads.items():
            if head is not None:
                tasks |= task
        return tasks


NO_HEADS = Heads()
