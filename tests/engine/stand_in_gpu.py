"""Stands in for the extension `embert.engine._cuda` where there is no GPU: the same calls, computed by the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.weights import EMBEDDING_WEIGHTS, LAYER_LINEAR, LAYER_NORMS
from embert.engine.encoders.torch.encoder import TorchEncoder
from embert.engine.heads.description import NO_HEADS
from embert.engine.heads.embedding import DenseLayer, LayerNorm
from embert.engine.model import Model
from embert.engine.models.tensor_names import TensorNames, WeightMapping
from embert.engine.tasks import Task

Floats = npt.NDArray[np.float32]


NORM_PARTS = {"gamma": "weight", "beta": "bias"}

# A task's bit, values, offsets, indices.
Output = tuple[int, Floats, npt.NDArray[np.int32] | None, npt.NDArray[np.int32] | None]


class Names:
    """An enum of the extension: a value is its own name."""

    def __getitem__(self, name: str) -> str:
        return name


class LayerAttention(NamedTuple):
    window: int
    rotary_dim: int
    table: int
    head_columns: int
    kv_heads: int
    taps: int
    after: int


class DenseShape(NamedTuple):
    inputs: int
    outputs: int
    activation: str


class SpladeKind(NamedTuple):
    activation: str
    epsilon: float
    logs: int
    tied: bool


def task_heads() -> SimpleNamespace:
    """TaskHeads with the extension's defaults."""
    empty: dict[str, list[DenseShape]] = {"dense": [], "classifier": [], "multi": []}
    flags = {"token_weights": False, "token_logits": False, "token_norm": False, "label_mass": False}
    return SimpleNamespace(**empty, **flags, splade=None, tied_vocabulary=True)


class Refused(RuntimeError):
    """Raised as by the extension."""


class Lost(RuntimeError):
    """Raised as by the extension."""


class StandInGpu:
    """The extension. `spoil` changes pooled vectors, as broken kernels would."""

    Refused, Lost = Refused, Lost
    EncoderConfig = EncoderOptions = SimpleNamespace
    TaskHeads = staticmethod(task_heads)
    LayerAttention, DenseShape, SpladeKind = LayerAttention, DenseShape, SpladeKind
    DType = Activation = HeadActivation = Pooling = Names()

    def __init__(
        self,
        model: Model,
        *,
        capability: int = 90,
        gemm: str = "hopper",
        spoil: Callable[[Floats], Floats] | None = None,
    ) -> None:
        self.model, self.gemm, self.spoil = model, gemm, spoil
        self.capability = capability
        self.encoders: list[StandInEncoder] = []
        self.tickets = 0

    def device_count(self) -> int:
        return 1

    def device_info(self, index: int) -> tuple[str, int, int]:
        """Name, compute capability, bytes."""
        assert index == 0
        return "A GPU", self.capability, 1 << 34

    def make_encoder(self, config: SimpleNamespace, options: SimpleNamespace) -> StandInEncoder:
        """Make an encoder, and keep it in `encoders`."""
        self.encoders.append(StandInEncoder(self, config, options))
        return self.encoders[-1]


class StandInEncoder:
    folds, memory = True, (0, 0, 0)

    def __init__(self, gpu: StandInGpu, config: SimpleNamespace, options: SimpleNamespace) -> None:
        self.gpu, self.config, self.options, self.gemm = gpu, config, options, gpu.gemm
        self.heads = config.task_heads
        self.loaded: dict[tuple[str, int], npt.NDArray[Any]] = {}  # by name and layer, as stored
        self.batches: list[tuple[Any, ...]] = []
        self.attended: Any = None  # of the last batch; only recorded
        self.fails: list[Exception] = []  # what the next submissions raise
        self._outputs: dict[int, list[Output]] = {}
        self._layers = dataclasses.replace(gpu.model, pooling="mean", after_pooling=(), heads=NO_HEADS, embeds=True)
        if gpu.model.config.adapters is None:
            self._cpu = TorchEncoder(self._layers, max_batch_tokens=1 << 20)

    def load(self, name: str, layer: int, data: npt.NDArray[np.uint8], shape: list[int], dtype: str) -> None:
        assert (name, layer) not in self.loaded
        stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}[dtype]
        self.loaded[name, layer] = data.view(stored).reshape(shape).copy()

    def start(self) -> str:
        """Start. LayerNorms are folded. With adapters, what was loaded decides which one this encoder has."""
        if self.gpu.model.config.adapters is not None:
            self._cpu = self._of_what_was_loaded()
        return ""

    def _of_what_was_loaded(self) -> TorchEncoder:
        """The CPU encoder of the tensors that were loaded, under BERT's names."""
        tensors = {}
        for (ours, layer), array in self.loaded.items():
            part, _, kind = ours.partition(".")
            if layer < 0 and ours in EMBEDDING_WEIGHTS:
                tensors[EMBEDDING_WEIGHTS[ours]] = array
            elif part in LAYER_LINEAR and kind in ("weight", "bias"):
                tensors[f"encoder.layer.{layer}.{LAYER_LINEAR[part]}.{kind}"] = array
            elif part in LAYER_NORMS:
                tensors[f"encoder.layer.{layer}.{LAYER_NORMS[part]}.{NORM_PARTS[kind]}"] = array
        config = dataclasses.replace(self._layers.config, adapters=None, tensors=TensorNames((WeightMapping(),)))
        with TemporaryDirectory() as folder:
            save_file(tensors, Path(folder, "model.safetensors"))
            layers = dataclasses.replace(self._layers, folder=Path(folder), transformer="", config=config)
            return TorchEncoder(layers, max_batch_tokens=1 << 20)

    def submit(
        self,
        ids: Any,
        cu_seqlens: Any,
        types: Any,
        positions: Any,
        dims: Any,
        norm: Any,
        tasks: Any = None,
        prefixes: Any = None,
        spans: Any = None,
        rows: Any = None,
        attended: Any = None,
    ) -> int:
        """Compute at once. Positions are only recorded, because the CPU encoder finds its own.

        Refused, as by the extension: more tokens than it was made for, and a third batch in flight.
        """
        if len(ids) > self.options.max_tokens:
            raise Refused(f"a batch of {len(ids)} tokens, at most {self.options.max_tokens}")
        if len(self._outputs) == 2:
            raise Refused("two batches are in flight already")
        if self.fails:
            raise self.fails.pop()
        self.attended = attended
        self.batches.append((ids, cu_seqlens, types, positions, dims, norm, tasks))
        # One sequence at a time: as on a GPU, its bits do not depend on the others.
        assert prefixes is None, "the CPU encoder runs texts one by one"
        batch = PackedBatch(ids, cu_seqlens, types)
        texts = [self._cpu.encode(batch.take(np.array([i])), Task.TOKENS) for i in range(batch.sequences)]
        wanted = [Task.EMBED] * len(texts) if tasks is None else [Task(int(each)) for each in tasks]
        outputs: list[Output] = []
        for task in (task for task in Task if any(task in each for each in wanted)):
            if task == Task.SPARSE and self.heads.splade is not None:
                outputs.append(self._pairs([text for text, each in zip(texts, wanted, strict=True) if task in each]))
                continue
            if task == Task.CLASSIFY and spans is not None:
                vectors = self._rows(Task.MULTI, np.concatenate(texts))[rows]
                outputs.append(
                    (int(task), np.stack([_parts(vectors, span, int(spans[:, 1].max())) for span in spans]), None, None)
                )
                continue
            values = np.concatenate(
                [self._rows(task, text) for text, each in zip(texts, wanted, strict=True) if task in each]
            )
            if task == Task.EMBED and self.gpu.spoil is not None:
                values = self.gpu.spoil(values)
            outputs.append((int(task), values, None, None))
        self.gpu.tickets += 1
        self._outputs[self.gpu.tickets] = outputs
        return self.gpu.tickets

    def wait(self, ticket: int) -> list[Output]:
        """The outputs. Each ticket is valid once."""
        if ticket not in self._outputs:
            raise Refused("this ticket is not in flight")
        return self._outputs.pop(ticket)

    def _rows(self, task: Task, states: Floats) -> Floats:
        """The rows of one text; neither cut nor of length 1, but for MULTI."""
        if task == Task.TOKENS:
            return states
        if task == Task.EMBED:
            pool = {
                "mean": lambda x: x.mean(0),
                "cls": lambda x: x[0],
                "max": lambda x: x.max(0),
                "last-token": lambda x: x[-1],
            }
            return self._linear("dense", pool[self.config.pooling](states)[None])
        if task == Task.CLASSIFY:
            return self._linear("classifier", states[:1])
        if task == Task.LABEL_MASS:
            name = "word" if self.heads.tied_vocabulary else "vocabulary.weight"
            logits = states[-1:].astype(np.float64) @ self.loaded[name, -1].T
            return np.logaddexp.reduce(logits, axis=1, keepdims=True).astype(np.float32)
        if task == Task.SPARSE:
            weight, bias = (self.loaded[f"token_weights.{part}", -1] for part in ("weight", "bias"))
            weights: Floats = np.maximum(states @ weight.T + bias, np.float32(0))
            return weights
        vectors = self._linear("multi", states)
        if self.heads.token_logits:
            return vectors
        unit: Floats = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def _pairs(self, texts: list[Floats]) -> Output:
        _, epsilon, logs, tied = self.heads.splade  # the activation: gelu
        weights = {name.removeprefix("splade."): array for (name, _), array in self.loaded.items()}
        decoder = weights["word"] if tied else weights["decoder.weight"]
        transform = DenseLayer(weights["transform.weight"], weights["transform.bias"], "identity")
        values, indices, offsets = [], [], [0]
        for states in texts:
            rows = torch.nn.functional.gelu(torch.from_numpy(transform(states))).numpy()
            rows = rows - rows.mean(1, keepdims=True)
            rows = rows / np.sqrt((rows**2).mean(1, keepdims=True) + epsilon) * weights["transform.gamma"]
            logits = (rows + weights["transform.beta"]) @ decoder.T + weights["decoder.bias"]
            largest = np.maximum(logits.max(0), 0)
            for _ in range(logs):
                largest = np.log1p(largest)
            (found,) = np.nonzero(largest)
            values.append(largest[found])
            indices.append(found)
            offsets.append(offsets[-1] + len(found))
        pairs = np.concatenate(values)[:, None].astype(np.float32)
        return int(Task.SPARSE), pairs, np.array(offsets, np.int32), np.concatenate(indices).astype(np.int32)

    def _linear(self, head: str, x: Floats) -> Floats:
        for index, (_, _, activation) in enumerate(getattr(self.heads, head)):
            x = DenseLayer(self.loaded[f"{head}.weight", index], self.loaded[f"{head}.bias", index], activation)(x)
            if head == "multi" and index == 0 and self.heads.token_norm:
                gamma, beta = self.loaded["multi.gamma", -1], self.loaded["multi.beta", -1]
                x = LayerNorm(gamma, beta, self.config.epsilon)(x)
        return x


def _parts(vectors: Floats, span: list[int], most: int) -> Floats:
    """The parts of a document's score: of 32 vectors of its query each, and zeros."""
    query, asks, document, count = span
    parts = np.zeros(max(-(-most // 32), 1), np.float32)
    products = vectors[query : query + asks] @ vectors[document : document + count].T
    for first in range(0, asks, 32):
        parts[first // 32] = products[first : first + 32].max(1, initial=-np.inf).sum()
    return parts
