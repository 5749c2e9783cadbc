"""The CUDA encoder: numpy in, numpy out; the extension `embert.engine._cuda` (csrc/) does the work. Needs no torch."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.encoders.base import Encoder
from embert.engine.encoders.cuda import shapes
from embert.engine.encoders.cuda.adapters import (
    AdapterSlice,
    adapter_tensors,
    describe_adapter,
    encoders_of,
    join,
    parts_of,
)
from embert.engine.encoders.cuda.heads import (
    DeviceLogits,
    HostClassifier,
    HostEmbedding,
    Layout,
    captured_tasks,
    decider_tensors,
    head_tensors,
    vocabulary_tensors,
    without_padding,
)
from embert.engine.encoders.cuda.weights import select_dtype
from embert.engine.encoders.positions import padding_positions
from embert.engine.encoders.self_test import mismatch, self_test_ids, vector_of
from embert.engine.errors import EncoderError, EncoderLost, HeadMisfit, Misfit, UnsupportedModel
from embert.engine.heads.description import LabelDecider
from embert.engine.heads.embedding import EmbeddingHead
from embert.engine.heads.late_interaction import Scoring, attended_tokens
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.tasks import NO_TASK, Sharing, Task
from embert.engine.weights.checkpoint import Checkpoint

DEFAULT_MAX_BATCH_TOKENS = 16384

LEAST_CAPABILITY = 80  # 8.0, Ampere


def unavailable_reason() -> str | None:
    """Reason if no CUDA encoder can run here, in half a sentence; None if one can."""
    try:
        cuda = _extension()
    except ImportError as error:
        if getattr(error, "name", None) == "embert.engine._cuda":
            return "built without CUDA"
        return f"the CUDA extension cannot be loaded: {error}"
    try:
        devices = cuda.device_count()
    except cuda.Refused as error:
        return f"CUDA cannot be used: {error}"
    if devices == 0:
        return "no NVIDIA GPU was found"
    reasons = [_incapable(*cuda.device_info(index)[:2]) for index in range(devices)]
    return reasons[0] if all(reasons) else None


def _incapable(name: str, capability: int) -> str | None:
    """Reason if this GPU cannot run the CUDA encoder; None if it can."""
    if capability >= LEAST_CAPABILITY:
        return None
    has, needs = (f"{version // 10}.{version % 10}" for version in (capability, LEAST_CAPABILITY))
    return f"{name} has compute capability {has}; the CUDA encoder needs {needs} or newer"


@dataclass(frozen=True, slots=True)
class InFlightSlice:
    """A batch in flight on one encoder of the extension, or a part of one, and how its rows are read."""

    number: int
    part: AdapterSlice
    layout: Layout
    host_batch: PackedBatch | None = None  # of a batch whose embeddings the host computes
    scoring: Scoring | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch in flight: of one adapter, or a part for each."""

    flights: tuple[InFlightSlice, ...]


class CudaEncoder(Encoder):
    """An encoder on one NVIDIA GPU: packed, FP16 by default, two batches in flight. See `encoders.base.Encoder`.

    `dtype` is "auto" (float16, or bfloat16 where float16 does not hold the model), "float16", "bfloat16" or "float32"
    (no TF32), or "int8": the layers' products of rotated integers, all else in float16 (csrc/EPILOGUES.md); for models
    like BERT, and for compute capability 9.0 unless `gemm` is "cublaslt". `gemm` is "auto", "hopper" (our own kernels,
    for compute capability 9.0) or "cublaslt": the portable path for any GPU, whose attention does without Hopper's
    instructions and whose LayerNorms are separate kernels.
    `fold` lets the matrix products compute LayerNorms where they can; `fold_refusal` says why a model's weights do not
    allow it, else it is empty. `graphs` captures CUDA graphs of small batches at start.

    A model with adapters has its weights on the GPU once for each adapter and once without (adapters.py). A batch takes
    one forward for each adapter in it. Each encoder of the extension runs at most one part of a batch, so two
    batches in flight are never more than it takes.

    A new encoder must first compute a known vector (self_test.py). Raises UnsupportedModel if the device or the model
    cannot run, BrokenModel for weights that cannot be read, EncoderLost if the device fails.
    """

    name = "cuda"

    def __init__(
        self,
        model: Model,
        *,
        device: str = "cuda:0",
        dtype: str = "auto",
        max_batch_tokens: int | None = None,
        gemm: str = "auto",
        fold: bool = True,
        graphs: bool = True,
    ) -> None:
        self._cuda, self._device_index = _open_device(device)
        self.device = f"cuda:{self._device_index}"
        self.device_name, self.compute_capability, _ = self._cuda.device_info(self._device_index)
        shapes.check_layers(model)
        shapes.check_heads(model)
        self.hidden_size = model.config.hidden_size
        self._model = model
        self._has = model.tasks | (Task.LABEL_MASS if isinstance(model.heads.decider, LabelDecider) else NO_TASK)
        self.width = model.width
        self._budget = DEFAULT_MAX_BATCH_TOKENS if max_batch_tokens is None else max_batch_tokens
        # A longer text is a separate batch.
        self.max_batch_tokens = self._budget
        if max_batch_tokens is None or model.late_interaction is not None:
            self.max_batch_tokens = max(self._budget, model.undivided_tokens)
        self._checkpoint = Checkpoint.open(model)
        self._config = model.config
        self.dtype, dtype_reason = select_dtype(dtype, model, self._checkpoint)
        self._host_classifier = (
            HostClassifier(model, self._checkpoint) if shapes.classifies_on_the_host(model) else None
        )
        self._host_embedding = HostEmbedding(model) if shapes.embeds_on_the_host(model) else None
        self._device_logits = DeviceLogits.of(model)
        self._scores, self._scores_on_the_host = model.late_interaction, shapes.scores_on_the_host(model)
        head = model.heads.multi_vector
        self._unattended = None if head is None else head.unattended
        classifier = model.heads.classifier
        self._padding_id = None if classifier is None else classifier.padding_id
        self.sharing = Sharing(
            shapes.shares_tasks(model),
            self._padding_id,
            step=8,  # of the extension's kernels (csrc/ops/attention_work.h)
            least_text=33,  # shorter texts take other kernels
            least_saved=128,  # a small batch without prefixes runs as a graph, which saves the host a millisecond
        )
        self._gemm, self._fold, self._graphs = gemm, fold, int(captured_tasks(model)) if graphs else 0
        self._encoders: list[Any] = []  # the extension's: without an adapter, then with each
        self.fold_refusal = ""
        try:
            dtype_reason = self._build(requested=dtype) or dtype_reason
        except self._cuda.Refused as error:
            raise UnsupportedModel(f"{model.model_id} on {self.device}: {error}") from error
        except self._cuda.Lost as error:
            raise EncoderLost(f"{model.model_id} on {self.device}: {error}") from error
        del self._checkpoint  # its files are read
        self.choice = self._describe(dtype_reason)

    def _build(self, *, requested: str) -> str:
        """Build encoders that pass the self test, in bfloat16 where "auto" finds that float16 does not hold the model.

        Returns the reason for bfloat16, or an empty string. Raises UnsupportedModel if the self test fails.
        """
        dtype_reason = ""
        try:
            failure = self._build_encoders()
            retry = failure is not None and self._config.pre_norm  # rows are sums over all layers
        except Misfit as misfit:
            failure, retry = str(misfit), True
        except HeadMisfit as misfit:
            if requested != "auto":
                raise
            failure, retry = misfit.reason, True
        if retry and requested == "auto" and self.dtype == "float16":
            self.dtype, dtype_reason = "bfloat16", f"in float16 {failure}"
            failure = self._build_encoders()
        if failure is not None:
            raise UnsupportedModel(
                f"{self._model.model_id} on {self.device} in {self.dtype}: {failure}; this build's kernels do not fit "
                f"this GPU, or {self.dtype} does not hold this model"
            )
        return dtype_reason

    def _build_encoders(self) -> str | None:
        """Build and test one encoder without an adapter and one for each. Returns the failure of the self test."""
        self._encoders, self.fold_refusal = [], ""
        for adapter in encoders_of(self._config):
            encoder, refusal = self._build_encoder(adapter, fold=self._fold)
            if refusal and self.dtype == "int8":
                raise UnsupportedModel(f"{self._model.model_id} on {self.device} in int8: {refusal}")
            if refusal:
                self.fold_refusal = self.fold_refusal or refusal
                encoder = None  # frees its memory before the next encoder allocates
                encoder, _ = self._build_encoder(adapter, fold=False)
            self._encoders.append(encoder)
            failure = self._self_test(encoder, adapter)
            if failure is not None:
                return f"{describe_adapter(self._config, adapter)} {failure}".lstrip()
        return None

    def _build_encoder(self, adapter: int, *, fold: bool) -> tuple[Any, str]:
        """Build an encoder with its weights. Returns it and the reason if LayerNorms cannot be folded."""
        options = self._cuda.EncoderOptions()
        options.device = self._device_index
        options.max_tokens = self.max_batch_tokens
        options.gemm = self._gemm
        options.cublaslt_library = _cublaslt_library()
        options.fold = fold
        options.graphs = self._graphs
        arguments = [shapes.describe(self._cuda, self._model, self.dtype), options]
        if (decider := shapes.marker_decider(self._model)) is not None:
            arguments.append(shapes.describe_decider(self._cuda, decider, self.dtype))
        encoder = self._cuda.make_encoder(*arguments)
        return encoder, self._load(encoder, adapter)

    def _load(self, encoder: Any, adapter: int) -> str:
        """Upload all weights as they are stored (the device converts), and start the encoder.

        Weights to which an adapter adds are added up in float32. Returns the reason if LayerNorms cannot be folded.
        """
        alive = []  # the arrays that the extension reads until it has started
        tensors = adapter_tensors(self._config, self._checkpoint, adapter, self.dtype)
        heads = ((*head, "float32") for head in head_tensors(self._model, self._checkpoint, self.dtype))
        decider = decider_tensors(self._model, self._checkpoint, self.dtype)
        vocabulary = vocabulary_tensors(self._model, self._checkpoint, self.dtype)
        for name, index, array, stored in itertools.chain(tensors, heads, decider, vocabulary):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            alive.append(data)
            encoder.load(name, index, data, list(array.shape), self._cuda.DType[stored])
        return str(encoder.start())

    def _describe(self, dtype_reason: str) -> str:
        """Return the kernels in use for the start-up log."""
        choice = f"{self.gemm} matrix products, LayerNorm {self.layernorm}"
        if self.dtype == "int8":
            choice = f"{self.gemm} matrix products in int8, the rest in float16"
        if self.fold_refusal:
            choice += f" ({self.fold_refusal})"
        if self.gemm != "hopper":
            choice += ", a text's last bits may depend on its batch"
        if dtype_reason:
            choice += f"; {self.dtype} because {dtype_reason}"
        if self._host_embedding is not None:
            choice += f"; computed on the host, after the GPU: {shapes.on_the_host(self._model)}"
        return choice

    @property
    def batch_tokens(self) -> int:
        return self._budget

    @property
    def gemm(self) -> str:
        """Kernels of the matrix products: "hopper" or "cublaslt"."""
        return str(self._encoders[0].gemm)

    @property
    def layernorm(self) -> str:
        """Place of LayerNorm: "folded" into the matrix products, or "separate" (see `fold_refusal`).

        "partly folded" where the weights with some adapter do not allow it.
        """
        folds = {bool(encoder.folds) for encoder in self._encoders}
        return "partly folded" if len(folds) > 1 else "folded" if folds == {True} else "separate"

    @property
    def memory(self) -> tuple[int, int, int]:
        """Bytes of weights, bytes of activations and staging, bytes taken from the device in all."""
        uses = [encoder.memory for encoder in self._encoders]
        weights, activations = (sum(int(use[i]) for use in uses) for i in range(2))
        return weights, activations, int(uses[0][2])  # the first one's begins before all others

    def submit(self, batch: PackedBatch) -> Ticket:
        """Start a forward and return a ticket for `wait`. The arrays may be reused as soon as it returns.

        Raises EncoderError for a batch that the extension refuses, EncoderLost if the device has failed.
        """
        batch.check(self._has, self.width, len(encoders_of(self._config)) - 1, self.sharing.tasks)
        if self._padding_id is not None:
            batch = without_padding(batch, self._padding_id)
        flights: list[InFlightSlice] = []
        try:
            for part in parts_of(batch):
                device_batch, host_batch, host = part.batch, None, self._host_embedding
                if host is not None:
                    device_batch, host_batch = host.device_batch(device_batch), host.host_batch(device_batch)
                if self._device_logits is not None:
                    device_batch = self._device_logits.device_batch(device_batch)
                scoring = Scoring.of(device_batch, self._scores)
                on_device = None if self._scores_on_the_host else scoring
                if scoring is not on_device:
                    device_batch = device_batch.with_tasks(Task.MULTI)
                layout = Layout.of(device_batch, self._model)
                number = self._start(part, device_batch, on_device)
                flights.append(InFlightSlice(number, part, layout, host_batch, scoring))
        except EncoderError:
            _, failure = self._collect(flights)  # their slots are needed again
            if isinstance(failure, EncoderLost):
                raise failure from None
            raise
        return Ticket(tuple(flights))

    def _start(self, part: AdapterSlice, batch: PackedBatch, scoring: Scoring | None) -> int:
        """Submit a part's batch to the extension. Returns the extension's number for it."""
        config = self._config
        tasks, normalize = batch.tasks, batch.normalize
        if self._host_classifier is not None:
            tasks, normalize = self._host_classifier.device_tasks(tasks), np.zeros(batch.sequences, np.bool_)
        try:
            return int(
                self._encoder_of(part).submit(
                    _contiguous(batch.ids, np.int32),
                    _contiguous(batch.cu_seqlens, np.int32),
                    _contiguous(batch.token_types, np.int32),
                    _padding_positions(batch, config),
                    _contiguous(batch.dimensions, np.int32),
                    _contiguous(normalize, np.bool_),
                    _contiguous(tasks, np.uint8),
                    _contiguous(batch.prefixes, np.int32),
                    None if scoring is None else _contiguous(scoring.spans, np.int32),
                    None if scoring is None else scoring.rows,
                    attended_tokens(batch, self._unattended),
                )
            )
        except (self._cuda.Refused, self._cuda.Lost) as error:
            raise self._translate(error) from error

    def wait(self, ticket: Ticket) -> dict[Task, TaskOutput]:
        """Return the rows of each task that a sequence of the batch wants.

        Raises EncoderError if this forward failed, EncoderLost if no later one can work either.
        """
        outputs, failure = self._collect(ticket.flights)
        if failure is not None:
            raise failure
        return join([flight.part for flight in ticket.flights], outputs)

    def _collect(self, flights: Sequence[InFlightSlice]) -> tuple[list[dict[Task, TaskOutput]], EncoderError | None]:
        """Wait for all flights, even if some fail: their results, and the worst failure."""
        outputs: list[dict[Task, TaskOutput]] = []
        failure: EncoderError | None = None
        for flight in flights:
            try:
                results = self._encoder_of(flight.part).wait(flight.number)
            except (self._cuda.Refused, self._cuda.Lost) as error:
                problem = self._translate(error)
                problem.__cause__ = error
                if failure is None or isinstance(problem, EncoderLost):
                    failure = problem
                continue
            rows = {Task(bit): flight.layout.rows(Task(bit), *arrays) for bit, *arrays in results}
            if self._device_logits is not None:
                rows = self._device_logits.finish(rows)
            if self._host_classifier is not None:
                rows = self._host_classifier.finish(rows)
            if self._host_embedding is not None and flight.host_batch is not None:
                rows = self._host_embedding.finish(rows, flight.host_batch)
            if flight.scoring is not None:
                rows = flight.scoring.finish(rows)
            outputs.append(rows)
        return outputs, failure

    def close(self) -> None:
        """Release the device's memory. The encoder cannot be used afterwards."""
        self._encoders = []

    def _encoder_of(self, part: AdapterSlice) -> Any:
        if not self._encoders:
            raise EncoderError(f"{self.device} ({self.device_name}): the encoder is closed")
        return self._encoders[part.adapter + 1]

    def _self_test(self, encoder: Any, adapter: int) -> str | None:
        """Run the self test: a text by itself, and first and last of a full batch. Returns the failure, or None.

        Both batches are needed, because few rows and many rows take different kernels.
        """
        model = self._model
        ids = self_test_ids(model.config)[: self.max_batch_tokens]
        pooled = vector_of(ids, model.config, self._checkpoint, shapes.device_pooling(model), adapter)
        modules = () if shapes.embeds_on_the_host(model) else model.after_pooling
        expected = EmbeddingHead(model.folder, modules)(pooled[None], None, np.zeros(1, np.bool_))[0]
        for lengths in _self_test_batches(len(ids), model.config.max_positions, self.max_batch_tokens):
            cu_seqlens = cumulative(np.array(lengths, np.int32))
            token_ids = np.arange(cu_seqlens[-1], dtype=np.int64) * 7919 % model.config.vocab_size
            batch = PackedBatch(token_ids.astype(np.int32), cu_seqlens)
            batch.ids[: len(ids)] = batch.ids[-len(ids) :] = ids
            normalize = np.zeros(len(lengths), np.bool_)
            ticket = encoder.submit(batch.ids, cu_seqlens, None, None, None, normalize, None)
            ((_, vectors, _, _),) = encoder.wait(ticket)
            for vector in vectors[[0, -1]]:
                wrong = mismatch(vector, expected, self.dtype)
                if wrong is not None:
                    return f"the self test in a batch of {cu_seqlens[-1]} tokens fails: {wrong}"
            if model.config.pre_norm and not np.isfinite(vectors).all():
                return f"a text of a batch of {cu_seqlens[-1]} tokens has a vector that is not finite"
        return None

    def _translate(self, error: Exception) -> EncoderError:
        kind = EncoderLost if isinstance(error, self._cuda.Lost) else EncoderError
        return kind(f"{self.device} ({self.device_name}): {error}")


def _self_test_batches(length: int, longest: int, tokens: int) -> list[list[int]]:
    """Lengths of the texts of two batches: one self-test text, and two of them around as many long ones as fit."""
    fillers = (tokens - 2 * length) // longest
    return [[length], [length, *[longest] * fillers, length]] if tokens >= 2 * length else [[length]]


def _padding_positions(batch: PackedBatch, config: EncoderConfig) -> npt.NDArray[np.int32] | None:
    cu_seqlens = batch.cu_seqlens
    if config.padding_id is None or len(batch.ids) != cu_seqlens[-1] or (np.diff(cu_seqlens) < 1).any():
        return None  # the extension reports the error
    return padding_positions(batch.ids, cu_seqlens, config.padding_id, config.max_positions)


def _extension() -> Any:
    return importlib.import_module("embert.engine._cuda")


def _open_device(device: str) -> tuple[Any, int]:
    """Return the extension and the index of a device that can run the encoder, or raise UnsupportedModel."""
    reason = unavailable_reason()
    if reason is None:
        cuda = _extension()
        index = _device_index(device, cuda.device_count())
        reason = _incapable(*cuda.device_info(index)[:2])
        if reason is None:
            return cuda, index
    raise UnsupportedModel(f"device {device} cannot be used: {reason}")


def _device_index(device: str, count: int) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise UnsupportedModel(f"device {device!r} is not a CUDA device; write cuda or cuda:N")
    index = int(number or 0)
    if index >= count:
        raise UnsupportedModel(
            f"device {device} cannot be used: this machine has {count} NVIDIA GPU{'s' * (count != 1)}"
        )
    return index


def _contiguous(array: npt.NDArray[Any] | None, dtype: type[np.generic]) -> npt.NDArray[Any] | None:
    return None if array is None else np.ascontiguousarray(array, dtype=dtype)


def _cublaslt_library() -> str:
    """The path of the nvidia-cublas wheel's cuBLASLt; empty, for the loader's own search, if it is not installed."""
    try:
        roots = importlib.import_module("nvidia").__path__
    except ImportError:
        return ""
    libraries = [path for root in roots for path in sorted(Path(root).glob("*/lib/libcublasLt.so.*"))]
    return str(libraries[-1]) if libraries else ""
