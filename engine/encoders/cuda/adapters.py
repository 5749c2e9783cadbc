"""Splits batches by adapter, and joins the outputs.

The extension knows no adapters. It has an encoder for each of a model's, with what the adapter adds in its weights, and
one for the model's own weights. So results do not depend on the adapters of other sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.encoders.cuda.weights import layer_tensors, misfit
from embert.engine.errors import Misfit
from embert.engine.files.safetensors_file import Tensor
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.tasks import ALL_TASKS, Task
from embert.engine.weights.checkpoint import Checkpoint

MATRICES = ("word", "position", "type")  # in addition to those that are called ….weight


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    """The sequences of a batch that have one adapter."""

    adapter: int  # -1: none
    sequences: npt.NDArray[np.intp] | None  # their numbers, ascending; None: all
    batch: PackedBatch  # of them

    def sequences_of(self, task: Task) -> npt.NDArray[np.intp]:
        """The numbers of those that want a task."""
        rows = self.batch.sequences_of(task)
        return rows if self.sequences is None else self.sequences[rows]


def encoders_of(config: EncoderConfig) -> range:
    """The adapters that need an encoder each; -1 is none, which every model has."""
    return range(-1, 0 if config.adapters is None else len(config.adapters.names))


def describe_adapter(config: EncoderConfig, adapter: int) -> str:
    """The name of one of these encoders in messages; empty for the model's own weights."""
    return "" if config.adapters is None or adapter < 0 else f"with the adapter {config.adapters.names[adapter]}"


def parts_of(batch: PackedBatch) -> list[AdapterSlice]:
    """A part for each adapter that a sequence has, -1 first. No part is larger than the batch, and none is empty.

    A batch whose prefix sums do not fit its tokens is one part: the extension says what is wrong with it.
    """
    if batch.adapters is None:
        return [AdapterSlice(-1, None, batch)]
    adapters = np.unique(batch.adapters)
    lengths = np.diff(batch.cu_seqlens)
    whole = batch.cu_seqlens[0] == 0 and batch.tokens == len(batch.ids) and (lengths > 0).all()
    if len(adapters) < 2 or not whole:
        return [AdapterSlice(int(adapters[0]) if len(adapters) else -1, None, batch)]
    numbers = [np.flatnonzero(batch.adapters == adapter) for adapter in adapters]
    return [
        AdapterSlice(int(adapter), sequences, batch.take(sequences))
        for adapter, sequences in zip(adapters, numbers, strict=True)
    ]


def join(slices: Sequence[AdapterSlice], outputs: Sequence[dict[Task, TaskOutput]]) -> dict[Task, TaskOutput]:
    """Join the outputs of a batch's slices: the sequences of each task in the batch's order."""
    if len(slices) == 1:
        return outputs[0]
    rows = {}
    for task in ALL_TASKS:
        with_task = [(each, output[task]) for each, output in zip(slices, outputs, strict=True) if task in output]
        if with_task:
            order = np.argsort(np.concatenate([each.sequences_of(task) for each, _ in with_task]))
            rows[task] = TaskOutput.concatenate([output for _, output in with_task]).take(order)
    return rows


def adapter_tensors(
    config: EncoderConfig, checkpoint: Checkpoint, adapter: int, dtype: str
) -> Iterator[tuple[str, int, Any, str]]:
    """Yields `layer_tensors` with the additions of an adapter.

    Raises Misfit for a matrix that float16 does not hold then, BrokenModel for one that is not finite.
    """
    tensors = layer_tensors(config, checkpoint.with_adapter(adapter), dtype == "int8")
    if adapter < 0 or dtype != "float16":
        return tensors
    return _fit(tensors, f"{checkpoint.path}", describe_adapter(config, adapter))


def _fit(tensors: Iterable[tuple[str, int, Any, str]], path: str, adapter: str) -> Iterator[tuple[str, int, Any, str]]:
    for name, layer, array, stored in tensors:
        if stored == "float32" and (name.endswith(".weight") or name in MATRICES):
            label = f"{name} of layer {layer} {adapter}" if layer >= 0 else f"{name} {adapter}"
            reason = misfit(Tensor(array, "F32"), f"{path}: {label}")
            if reason is not None:
                raise Misfit(f"{label} {reason}")
        yield name, layer, array, stored
