"""What a model's heads compute: frozen descriptions, read from its files. Encoders load their tensors and run them.

Imports no numpy: the supervisor reads descriptions, and computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from embert.engine.tasks import NO_TASK, Task

__all__ = ["NO_HEADS", "Classifier", "Heads", "Layer", "MultiVector", "Splade", "TokenWeights"]


@dataclass(frozen=True, slots=True)
class Layer:
    """activation(x · weightᵀ + bias). Its tensors are `name`.weight [outputs, inputs] and `name`.bias [outputs]."""

    name: str
    file: str  # inside the model's folder; empty: the file of the encoder's own weights
    inputs: int
    outputs: int
    bias: bool
    activation: str  # "identity", "tanh", "relu", "sigmoid", "gelu" (with erf), "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The logits of a sequence, from its first token's row. One label: a score, such as a reranker's."""

    layers: tuple[Layer, ...]
    labels: tuple[str, ...]
    activation: str  # what makes scores of logits: "sigmoid" (each by itself), "softmax", "identity"


@dataclass(frozen=True, slots=True)
class Splade:
    """Weights of the whole vocabulary: the masked language model's logits, relu, log(1 + x), maximum over tokens."""

    transform: Layer
    norm: str  # LayerNorm after the transform: its tensors are `norm`.weight and `norm`.bias
    norm_eps: float
    decoder: str  # the tensor [vocabulary, hidden]; empty: the word table, tied
    bias: str  # the tensor [vocabulary]
    twice: bool = False  # log(1 + log(1 + x))


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """bge-m3's sparse vectors: relu(w · h + b) for each token, maximum for each token id, special tokens left out."""

    layer: Layer  # one output


@dataclass(frozen=True, slots=True)
class MultiVector:
    """A vector for each token: linear layers, then length 1."""

    layers: tuple[Layer, ...]
    skips_first: bool = False  # the first token has no vector
    query_prompt: str = ""  # put before a query
    document_prompt: str = ""  # put before a document
    query_length: int | None = None  # tokens of a query at most; None: the model's
    document_length: int | None = None  # likewise
    skipped: tuple[str, ...] = ()  # tokens that have no vector in documents, such as punctuation

    @property
    def columns(self) -> int:
        """Columns of a vector."""
        return self.layers[-1].outputs


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one model besides pooling."""

    classifier: Classifier | None = None
    sparse: Splade | TokenWeights | None = None
    multi_vector: MultiVector | None = None

    @property
    def tasks(self) -> Task:
        """The tasks that they are for."""
        tasks = NO_TASK
        heads = {Task.CLASSIFY: self.classifier, Task.SPARSE: self.sparse, Task.MULTI: self.multi_vector}
        for task, head in heads.items():
            if head is not None:
                tasks |= task
        return tasks


NO_HEADS = Heads()
