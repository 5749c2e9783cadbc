"""The encoder of static embeddings: rows of a table, and the mean of each text's rows, in numpy on one thread.

A row is a kilobyte, and adding it takes less time than reading it, so that kernels would gain little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.encoders.base import Encoder
from embert.engine.errors import BrokenModel, EncoderError, UnsupportedModel
from embert.engine.files.safetensors_file import FLOATS, SafetensorsFile, Tensor
from embert.engine.heads.embedding import EmbeddingHead
from embert.engine.host import cpu_name, keep_freed_memory
from embert.engine.model import Model
from embert.engine.models.static import MAPPING, WEIGHTS, table_name
from embert.engine.tasks import Task

Floats = npt.NDArray[np.float32]

BATCH_TOKENS = 16_384
CHUNK_TOKENS = 512
DENSE_ROWS = 8  # that modules after the mean multiply at once; OpenBLAS with AVX2 sums 12 rows in another order


class StaticEncoder(Encoder):
    """Encoder of static embeddings on a CPU. `submit` only copies; `wait` does the work."""

    name = "static"
    device = "cpu"
    dtype = "float32"
    choice = "static embeddings have no layers: rows of a table, and their mean"

    def __init__(
        self, model: Model, *, device: str = "cpu", dtype: str = "auto", max_batch_tokens: int | None = None
    ) -> None:
        """Map the table. Raises UnsupportedModel for another device or dtype, BrokenModel."""
        if device != "cpu":
            raise UnsupportedModel(f"{model.model_id} has static embeddings, which run on device cpu, not {device}")
        if dtype not in ("auto", self.dtype):
            raise UnsupportedModel(f"dtype {dtype} is not supported for static embeddings; supported: {self.dtype}")
        self.device_name = cpu_name()
        self.width, self.hidden_size = model.width, model.config.hidden_size
        self._budget = max_batch_tokens or BATCH_TOKENS
        self.max_batch_tokens = max(self._budget, model.max_input_length)
        self._has, self._vocabulary = model.tasks, model.config.vocab_size
        keep_freed_memory()
        file = SafetensorsFile(model.weights_folder / "model.safetensors")
        self._table = _floats(file, table_name(file.path, file.names), ("I8",))
        self._mapping = _rows_of_tokens(file, len(self._table)) if MAPPING in file else None
        self._weights = _floats(file, WEIGHTS) if WEIGHTS in file else None
        if self._weights is not None and not np.isfinite(self._weights).all():
            token = int(np.argmin(np.isfinite(self._weights)))
            raise BrokenModel(f"{file.path}: {WEIGHTS} of token {token} is not finite: {self._weights[token]}")
        self._embedding = EmbeddingHead(model.folder, model.after_pooling, rows=DENSE_ROWS)

    @property
    def batch_tokens(self) -> int:
        return min(self.max_batch_tokens, self._budget)

    def submit(self, batch: PackedBatch) -> PackedBatch:
        """Take a batch; its arrays may be reused.

        Raises ValueError if it has more than max_batch_tokens tokens, EncoderError for ids, dimensions and tasks that
        the model does not have.
        """
        if batch.tokens > self.max_batch_tokens:
            raise ValueError(
                f"a batch of {batch.tokens} tokens is over this encoder's limit of {self.max_batch_tokens}"
            )
        batch.check(self._has, self.width, 0)
        if batch.tokens and not 0 <= batch.ids.min() <= batch.ids.max() < self._vocabulary:
            raise EncoderError(f"a token id is not from 0 to {self._vocabulary - 1}")
        return batch.take(np.arange(batch.sequences))

    def wait(self, ticket: PackedBatch) -> dict[Task, TaskOutput]:
        rows = dict[Task, TaskOutput]()
        if Task.EMBED in ticket.wanted:
            batch = ticket if ticket.tasks is None else ticket.take(ticket.sequences_of(Task.EMBED))
            rows[Task.EMBED] = TaskOutput.one_each(
                self._embedding(self._means(batch), batch.dimensions, batch.normalize)
            )
        if Task.TOKENS in ticket.wanted:
            batch = ticket.take(ticket.sequences_of(Task.TOKENS))
            rows[Task.TOKENS] = TaskOutput(self._rows(batch.ids), batch.cu_seqlens)
        return rows

    def close(self) -> None:
        del self._table, self._embedding

    def _rows(self, ids: npt.NDArray[np.int32]) -> Floats:
        """The rows of tokens: int32 [...] → float32 [..., columns]."""
        rows = self._table.take(ids if self._mapping is None else self._mapping[ids], 0)
        if self._weights is not None:
            rows *= self._weights[ids][..., None]
        return rows

    def _means(self, batch: PackedBatch) -> Floats:
        """The mean of each sequence's rows: float32 [B, columns]. Sequences of equal length are added together."""
        starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
        sums = np.zeros((len(lengths), self.hidden_size), np.float32)
        order = np.argsort(lengths, kind="stable")
        for equal in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1) if len(order) else ():
            length = int(lengths[equal[0]])
            together = max(1, CHUNK_TOKENS // length)
            for chunk in np.split(equal, range(together, len(equal), together)):
                for first in range(0, length, CHUNK_TOKENS):
                    positions = np.arange(first, min(first + CHUNK_TOKENS, length))
                    sums[chunk] += self._rows(batch.ids[starts[chunk][:, None] + positions]).sum(1)
        sums /= lengths[:, None].astype(np.float32)
        return sums


def _floats(file: SafetensorsFile, name: str, others: tuple[str, ...] = ()) -> Floats:
    """A tensor in float32. Raises BrokenModel for a dtype that is neither a float nor one of `others`."""
    tensor = file.tensor(name)
    _check_dtype(file.path, name, tensor, (*FLOATS, *others))
    return tensor.float32()


def _rows_of_tokens(file: SafetensorsFile, rows: int) -> npt.NDArray[Any]:
    """The row of the table for each token. Raises BrokenModel for one that the table does not have."""
    tensor = file.tensor(MAPPING)
    _check_dtype(file.path, MAPPING, tensor, ("I64", "I32", "I16"))
    wrong = np.flatnonzero((tensor.array < 0) | (tensor.array >= rows))
    if len(wrong):
        found = tensor.array[wrong[0]]
        raise BrokenModel(f"{file.path}: {MAPPING} of token {wrong[0]} must be 0 to {rows - 1}, found {found}")
    return tensor.array


def _check_dtype(path: Path, name: str, tensor: Tensor, supported: tuple[str, ...]) -> None:
    if tensor.dtype not in supported:
        raise BrokenModel(f"{path}: {name} has dtype {tensor.dtype}, expected one of {', '.join(supported)}")
