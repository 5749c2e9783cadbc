"""A model's heads for the CUDA extension: tensors for `load`, and the layout of outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.encoders.cuda.shapes import (
    classifies_on_the_host,
    embeds_on_the_host,
    host_head,
    marker_decider,
    own_vocabulary,
    padded_labels,
    pools_on_the_host,
)
from embert.engine.encoders.cuda.weights import STORED_DTYPES, layer_tensors, misfit
from embert.engine.errors import EncoderError, HeadMisfit
from embert.engine.heads.description import MARKED_OPTIONS, Layer, Splade, TokenClassifier, TokenWeights
from embert.engine.heads.embedding import DenseLayer, EmbeddingHead, LayerNorm, load_modules, through
from embert.engine.heads.token_rows import pool_rows, token_weight_rows
from embert.engine.model import Model
from embert.engine.tasks import NO_TASK, Task
from embert.engine.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

TOKEN_TASKS = (Task.TOKENS, Task.SPARSE, Task.MULTI)  # the extension returns a row a token
LARGEST_FLOAT16 = 65504.0
ROWS = 8  # that a head on the host multiplies at once


def captured_tasks(model: Model) -> Task:
    """The tasks whose small batches get a CUDA graph each: those that a model's requests usually want."""
    if classifies_on_the_host(model):
        return Task.EMBED
    if marker_decider(model) is not None:
        return Task.CLASSIFY
    return model.tasks & (Task.CLASSIFY if pools_on_the_host(model) else Task.EMBED | Task.CLASSIFY)


def decider_tensors(model: Model, checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[str, int, Any, str]]:
    """Tensors of the layers that make decisions, as `layer_tensors` yields them; none for other models.

    Raises BrokenModel, and UnsupportedModel for those that `dtype` does not hold.
    """
    decider = marker_decider(model)
    if decider is None:
        return
    own = Checkpoint.open(dataclasses.replace(model, config=decider.config))
    for name, layer, array, stored in layer_tensors(decider.config, own):
        yield f"decider.{name}", layer, array, stored
    hidden, scores = _layers(checkpoint, decider.scorer)
    _check_float16(model, dtype, "decision", hidden.weight)
    for name, index, values in _name_layers("decider.multi", [hidden]):
        yield name, index, values, "float32"
    for name, _, values in _name_layers("decider.token_weights", [scores]):
        yield name, -1, values, "float32"


def head_tensors(model: Model, checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[str, int, Floats]]:
    """The heads' tensors: the extension's name, its index, the values.

    Raises BrokenModel for tensors that are missing or of another shape, UnsupportedModel for those that `dtype` does
    not hold.
    """
    heads = model.heads
    if not embeds_on_the_host(model):
        modules = load_modules(model.folder, model.after_pooling)
        yield from _name_layers("dense", [module for module in modules if isinstance(module, DenseLayer)])
    if heads.classifier is not None and not classifies_on_the_host(model):
        yield from _name_layers("classifier", _layers(checkpoint, heads.classifier.layers))
    if heads.multi_vector is not None:
        layers = _layers(checkpoint, heads.multi_vector.layers)
        for layer in layers:
            _check_float16(model, dtype, "multi-vector", layer.weight)
        yield from _name_layers("multi", layers)
    if heads.token_classifier is not None:
        yield from _token_classifier_tensors(model, checkpoint, dtype, heads.token_classifier)
    if isinstance(heads.sparse, TokenWeights):
        layers = _layers(checkpoint, (heads.sparse.layer,))
        yield from ((name, -1, values) for name, _, values in _name_layers("token_weights", layers))
    if isinstance(heads.sparse, Splade):
        for name, values in _splade_tensors(model, checkpoint, heads.sparse).items():
            if name.endswith(".weight"):
                _check_float16(model, dtype, "sparse", values)
            yield f"splade.{name}", -1, values


def vocabulary_tensors(model: Model, checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[str, int, Any, str]]:
    """The language model's matrix as it is stored, with its type, where the device does not have it as the word table.

    Raises as `head_tensors` does.
    """
    layer = own_vocabulary(model)
    if layer is None:
        return
    tensor = checkpoint.vocabulary(layer)
    reason = misfit(tensor, f"{checkpoint.path}: {layer.name}.weight")
    if reason is not None and dtype in ("float16", "int8"):
        raise HeadMisfit(model.model_id, f"its language model's matrix {reason}")
    if tensor.dtype in STORED_DTYPES:
        yield "vocabulary.weight", -1, tensor.array, STORED_DTYPES[tensor.dtype]
    else:
        yield "vocabulary.weight", -1, tensor.float32(), "float32"


def _token_classifier_tensors(
    model: Model, checkpoint: Checkpoint, dtype: str, head: TokenClassifier
) -> Iterator[tuple[str, int, Floats]]:
    """The layers as multi-vector layers, with rows of zeros behind the labels', and the norm between two."""
    *_, last = layers = _layers(checkpoint, head.layers)
    for layer in layers:
        _check_float16(model, dtype, "token classification", layer.weight)
    more = padded_labels(len(last.weight)) - len(last.weight)
    bias = np.zeros(len(last.weight), np.float32) if last.bias is None else last.bias
    last_layer = DenseLayer(np.pad(last.weight, ((0, more), (0, 0))), np.pad(bias, (0, more)), last.activation, None)
    yield from _name_layers("multi", [*layers[:-1], last_layer])
    for norm in (layer.norm for layer in layers if layer.norm is not None):
        yield "multi.gamma", -1, norm.gamma
        yield "multi.beta", -1, np.zeros_like(norm.gamma) if norm.beta is None else norm.beta


def _replace(tasks: npt.NDArray[np.uint8], task: Task, other: Task) -> npt.NDArray[np.uint8]:
    """The tasks [B] of sequences, with `other` instead of `task`."""
    rest = tasks & ~np.uint8(task)
    return np.where(tasks & np.uint8(task), rest | np.uint8(other), rest).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class DeviceLogits:
    """A task that has another name on the device, and may have more columns there."""

    task: Task
    on_device: Task
    columns: int

    @classmethod
    def of(cls, model: Model) -> DeviceLogits | None:
        """Token classes are MULTI's rows, and decisions by markers CLASSIFY's; None if a model has neither."""
        if (head := model.heads.token_classifier) is not None:
            return cls(Task.TOKEN_CLASSES, Task.MULTI, len(head.labels))
        if marker_decider(model) is not None:
            return cls(Task.DECIDE, Task.CLASSIFY, MARKED_OPTIONS)
        return None

    def device_batch(self, batch: PackedBatch) -> PackedBatch:
        if batch.tasks is None:
            return batch
        return dataclasses.replace(batch, tasks=_replace(batch.tasks, self.task, self.on_device))

    def finish(self, rows: dict[Task, TaskOutput]) -> dict[Task, TaskOutput]:
        """The rows of each task under the model's own name."""
        found = rows.pop(self.on_device, None)
        if found is None:
            return rows
        return rows | {self.task: TaskOutput(found.values[:, : self.columns], found.offsets)}


def _layers(checkpoint: Checkpoint, layers: Sequence[Layer]) -> list[DenseLayer]:
    result = []
    for layer in layers:
        own = layer.norm
        norm = None if own is None else LayerNorm(*checkpoint.norm(own, layer.outputs, layer.file))
        result.append(DenseLayer(*checkpoint.layer(layer), layer.activation, norm))
    return result


def _splade_tensors(model: Model, checkpoint: Checkpoint, head: Splade) -> dict[str, Floats]:
    (transform,) = _layers(checkpoint, (head.transform,))
    hidden, vocabulary = head.transform.outputs, model.config.vocab_size
    gamma, beta, _ = checkpoint.norm(head.norm, hidden)
    bias = checkpoint.of_head(head.bias, (vocabulary,)).float32() if head.bias else np.zeros(vocabulary, np.float32)
    tensors = {
        "transform.weight": transform.weight,
        "transform.bias": np.zeros(hidden, np.float32) if transform.bias is None else transform.bias,
        "transform.gamma": gamma,
        "transform.beta": beta,
        "decoder.bias": bias,
    }
    if head.decoder:
        tensors["decoder.weight"] = checkpoint.of_head(head.decoder, (vocabulary, hidden)).float32()
    elif model.config.adapters is not None or model.lora is not None:
        tensors["decoder.weight"] = checkpoint.tied_decoder().float32()
    return tensors


def _check_float16(model: Model, dtype: str, head: str, weight: Floats) -> None:
    """Matrices of these heads are kept in the encoder's type; those of the others are not."""
    largest = float(np.abs(weight).max())
    if dtype in ("float16", "int8") and largest > LARGEST_FLOAT16:
        reason = f"its {head} head has an element of {largest:.4g}, and float16 ends at {LARGEST_FLOAT16:.0f}"
        raise HeadMisfit(model.model_id, reason)


def _name_layers(head: str, layers: Sequence[DenseLayer]) -> Iterator[tuple[str, int, Floats]]:
    for index, layer in enumerate(layers):
        yield f"{head}.weight", index, layer.weight
        yield f"{head}.bias", index, np.zeros(len(layer.weight), np.float32) if layer.bias is None else layer.bias


def without_padding(batch: PackedBatch, padding_id: int) -> PackedBatch:
    """The batch, whose sequences that want CLASSIFY end with their last token that is not padding; the first one stays.

    For causal models whose classification head reads that token: no row depends on later tokens. Raises EncoderError
    where such a sequence wants something else, too.
    """
    cu_seqlens = batch.cu_seqlens
    if len(batch.ids) != cu_seqlens[-1] or (np.diff(cu_seqlens) < 1).any():
        return batch  # the extension reports the error
    sequences = batch.sequences_of(Task.CLASSIFY)
    padding = sequences[batch.ids[cu_seqlens[sequences + 1] - 1] == padding_id]
    if not len(padding):
        return batch
    lengths, mask = np.diff(cu_seqlens), np.ones(len(batch.ids), np.bool_)
    for sequence in padding:
        if batch.tasks is None or batch.tasks[sequence] != Task.CLASSIFY:
            raise EncoderError(
                f"sequence {sequence} ends with padding tokens ({padding_id}), which CLASSIFY does not count, and "
                "wants another task, too"
            )
        start, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        (content,) = np.nonzero(batch.ids[start:end] != padding_id)
        lengths[sequence] = content[-1] + 1 if len(content) else 1
        mask[start + lengths[sequence] : end] = False
    types = None if batch.token_types is None else batch.token_types[mask]
    return dataclasses.replace(batch, ids=batch.ids[mask], cu_seqlens=cumulative(lengths), token_types=types)


class HostClassifier:
    """A head of classes or decisions on the rows that the extension pools: a few megaflops a text, in numpy."""

    def __init__(self, model: Model, checkpoint: Checkpoint) -> None:
        """Raises BrokenModel for tensors that are missing or of another shape."""
        head = host_head(model)
        self._layers = [] if head is None else _layers(checkpoint, head.layers)
        self._task = Task.CLASSIFY if model.heads.decider is None else Task.DECIDE

    def device_tasks(self, tasks: npt.NDArray[np.uint8] | None) -> npt.NDArray[np.uint8] | None:
        """The tasks [B] of a batch, with pooled rows instead of logits."""
        return None if tasks is None else _replace(tasks, self._task, Task.EMBED)

    def finish(self, rows: dict[Task, TaskOutput]) -> dict[Task, TaskOutput]:
        """The rows of each task, with logits float32 [n, labels] instead of pooled rows [n, hidden]."""
        pooled = rows.pop(Task.EMBED, None)
        if pooled is None:
            return rows
        return rows | {self._task: TaskOutput.one_each(through(self._layers, pooled.values, ROWS))}


class HostEmbedding:
    """Computes on the host what follows the last layer or the pooling, if the extension has no kernel for it."""

    def __init__(self, model: Model) -> None:
        """Raises BrokenModel for tensors that are missing or of another shape."""
        self._pooling = model.pooling if pools_on_the_host(model) else ""
        self._width = model.width
        self._head = EmbeddingHead(model.folder, model.after_pooling, rows=ROWS)

    def device_batch(self, batch: PackedBatch) -> PackedBatch:
        """The batch that the extension runs instead: TOKENS rows for EMBED, or unprocessed pooled rows."""
        tasks = batch.tasks
        if self._pooling and batch.sequences:
            tasks = np.full(batch.sequences, Task.EMBED, np.uint8) if tasks is None else tasks
            tasks = _replace(tasks, Task.EMBED, Task.TOKENS)
        return dataclasses.replace(batch, tasks=tasks, dimensions=None, normalize=np.zeros(batch.sequences, np.bool_))

    @staticmethod
    def host_batch(batch: PackedBatch) -> PackedBatch:
        """Part of a batch that `finish` needs: a copy, because its arrays may be reused once it is submitted."""
        arrays = {name: getattr(batch, name) for name in ("tasks", "dimensions", "normalize", "prompt_tokens")}
        copies = {name: None if array is None else array.copy() for name, array in arrays.items()}
        return PackedBatch(np.empty(0, np.int32), batch.cu_seqlens.copy(), **copies)

    def finish(self, rows: dict[Task, TaskOutput], batch: PackedBatch) -> dict[Task, TaskOutput]:
        """The rows of each task, with EMBED's. `rows` are those of `device_batch`; `batch` is that of `host_batch`."""
        wanting = batch.sequences_of(Task.EMBED)
        if not len(wanting):
            return (
                rows if batch.sequences else {Task.EMBED: TaskOutput.one_each(np.empty((0, self._width), np.float32))}
            )
        dimensions = None if batch.dimensions is None else batch.dimensions[wanting]
        normalize = None if batch.normalize is None else batch.normalize[wanting]
        if not self._pooling:
            return rows | {Task.EMBED: TaskOutput.one_each(self._head(rows[Task.EMBED].values, dimensions, normalize))}
        states, others = rows.pop(Task.TOKENS), batch.sequences_of(Task.TOKENS)
        sequences = np.union1d(wanting, others)
        own = states.take(np.searchsorted(sequences, wanting))
        prompt_tokens = None if batch.prompt_tokens is None else batch.prompt_tokens[wanting]
        pooled = pool_rows(own.values, own.offsets, self._pooling, prompt_tokens)
        if len(others):
            rows = rows | {Task.TOKENS: states.take(np.searchsorted(sequences, others))}
        return rows | {Task.EMBED: TaskOutput.one_each(self._head(pooled, dimensions, normalize))}


@dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of output rows to sequences, and the data of the batch that reading them needs."""

    offsets: dict[Task, Ints]  # of tasks with a row a token: [n + 1]
    ids: Ints | None  # of the tokens whose weights are wanted
    left_out: tuple[int, ...]  # ids that are in no sparse vector
    most: int | None = None  # weights of a sparse vector

    @classmethod
    def of(cls, batch: PackedBatch, model: Model) -> Layout:
        if batch.wanted & (Task.TOKENS | Task.SPARSE | Task.MULTI) == NO_TASK:
            return cls({}, None, ())
        lengths = np.diff(batch.cu_seqlens)
        wanting = {task: batch.sequences_of(task) for task in TOKEN_TASKS if task in batch.wanted}
        ids = None
        if Task.SPARSE in batch.wanted:
            wants = np.zeros(batch.sequences, np.bool_)
            wants[wanting[Task.SPARSE]] = True
            ids = batch.ids[np.repeat(wants, lengths)]
        left_out: tuple[int, ...] = getattr(model.heads.sparse, "special_ids", ())
        most: int | None = getattr(model.heads.sparse, "most", None)
        return cls({task: cumulative(lengths[rows]) for task, rows in wanting.items()}, ids, left_out, most)

    def rows(self, task: Task, values: Floats, offsets: Ints | None, indices: Ints | None) -> TaskOutput:
        """Rows of a task from the extension's result."""
        if offsets is not None:
            rows = TaskOutput(values, offsets, indices)
            return rows if self.most is None or task != Task.SPARSE else rows.largest(self.most)
        if task == Task.SPARSE and self.ids is not None:
            return token_weight_rows(self.ids, self.offsets[task], values[:, 0], self.left_out)
        if task in self.offsets:
            return TaskOutput(values, self.offsets[task])
        return TaskOutput.one_each(values)
