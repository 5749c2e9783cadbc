"""An encoder that fails to order: `--encoder tests.server.stand_in:create`.

Vectors are cheap, but a text's own: they depend on its ids and on nothing else. The first id after [CLS] of any text of
a batch is an order (token ids are sent as they are, so tests write them), and the environment has standing ones:

    STAND_IN_LOAD_S        seconds that loading takes
    STAND_IN_LOAD_FILE     while this file exists, loading does not end
    STAND_IN_LOAD          error | missing (a file) | memory | exit | hang: how loading fails
    STAND_IN_EXIT_FILE     while this file exists, loading ends the process
    STAND_IN_LOAD_MODEL    the end of the id of the only model that the variables above are about; default: any model
    STAND_IN_DEVICE        the device it says it runs on; default: cpu. `cuda` is cuda:N where it is told to run on x:N
    STAND_IN_WARM_S        seconds that a full batch takes while loading: a hundred times as long counts as hung
    STAND_IN_S             seconds that every forward takes after loading
    STAND_IN_TOKENS_PER_S  tokens a second, while loading too
    STAND_IN_ORDERS        no: ids are nothing but ids, for requests that nobody has written
    STAND_IN_HOLD_FILE     while this file exists, no forward ends
    STAND_IN_HELD_FILE     while this file exists, no forward with the order HELD ends
    STAND_IN_CRASH_FILE    while this file exists, every forward ends the process
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import Encoder, PackedBatch, Task, TaskOutput
from embert.engine.errors import BrokenModel, EncoderError, EncoderLost
from embert.engine.heads.late_interaction import Scoring
from embert.engine.model import Model

# Ids that are orders. All are [unused…] in BERT's vocabulary: no text has them.
FAIL = 10  # EncoderError
NAN = 11  # vectors that are not finite, for this text only
LOSE = 12  # EncoderLost
CRASH = 13  # the process ends at once, as after a segmentation fault
HANG = 14  # never comes back
HUNGRY = 15  # wants more memory than there is
HELD = 16  # makes a file `runs` next to STAND_IN_HELD_FILE, and waits while that exists
SLEEP = 20  # SLEEP + n: n tenths of a second, n up to 60

WIDTH = 384


class StandIn(Encoder):
    name = "stand-in"
    device_name = "nothing"
    dtype = "float32"
    choice = ""

    def __init__(self, model: Model, *, device: str, dtype: str, max_batch_tokens: int | None) -> None:
        if model.model_id.endswith(os.environ.get("STAND_IN_LOAD_MODEL", "")):
            _load()
        self.device = os.environ.get("STAND_IN_DEVICE", "cpu")
        if self.device == "cuda":
            self.device += ":" + device.partition(":")[2]
        self.width = model.width
        self.hidden_size = model.config.hidden_size
        heads = model.heads
        self._scores = model.late_interaction
        self._columns = {
            Task.EMBED: self.width,
            Task.TOKENS: self.hidden_size,
            Task.CLASSIFY: len(heads.classifier.labels) if heads.classifier else 0,
            Task.MULTI: heads.multi_vector.columns if heads.multi_vector else 0,
            Task.SPARSE: 1,
            Task.TOKEN_CLASSES: len(heads.token_classifier.labels) if heads.token_classifier else 0,
        }
        self.max_batch_tokens = max_batch_tokens or 16384
        self._tokens_per_s = float(os.environ.get("STAND_IN_TOKENS_PER_S", "inf"))
        self._warm_s = float(os.environ.get("STAND_IN_WARM_S", "0"))
        self._delay_s = float(os.environ.get("STAND_IN_S", "0"))
        self._obeys = os.environ.get("STAND_IN_ORDERS") != "no"
        self._hold_file = _file("STAND_IN_HOLD_FILE")
        self._held_file = _file("STAND_IN_HELD_FILE")
        self._crash_file = _file("STAND_IN_CRASH_FILE")

    def submit(self, batch: PackedBatch) -> Any:
        return batch

    def wait(self, ticket: Any) -> dict[Task, TaskOutput]:
        batch: PackedBatch = ticket
        starts, stops = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        orders = [
            int(batch.ids[start + 1]) if self._obeys and stop - start > 1 else 0
            for start, stop in zip(starts, stops, strict=True)
        ]
        time.sleep(batch.tokens / self._tokens_per_s)
        warming = batch.sequences and not batch.ids.any()
        if warming:
            time.sleep(self._warm_s if batch.tokens > 1 else 0)
        else:
            time.sleep(self._delay_s + sum((order - SLEEP) / 10 for order in orders if SLEEP < order <= SLEEP + 60))
        _wait_while_there_is(self._hold_file)
        if HELD in orders:
            self._held_file.with_name("runs").touch()
            _wait_while_there_is(self._held_file)
        if CRASH in orders or self._crash_file.exists():
            os._exit(139)
        if HANG in orders:
            time.sleep(3600)
        if HUNGRY in orders:
            np.empty(1 << 50)
        if LOSE in orders:
            raise EncoderLost("the stand-in was told to be lost")
        if FAIL in orders:
            raise EncoderError("the stand-in was told to fail")
        scoring = Scoring.of(batch, self._scores)
        if scoring is not None:
            batch = batch.with_tasks(Task.MULTI)
        response = {}
        for task in batch.wanted:
            rows = [self._rows(task, batch, int(index)) for index in batch.sequences_of(task)]
            for index, row in zip(batch.sequences_of(task), rows, strict=True):
                if orders[index] == NAN:
                    row.values[0, row.values.shape[1] // 2] = np.nan
            response[task] = TaskOutput.concatenate(rows)
        return response if scoring is None else scoring.finish(response)

    def _rows(self, task: Task, batch: PackedBatch, index: int) -> TaskOutput:
        """The rows of one sequence."""
        ids = batch.ids[batch.cu_seqlens[index] : batch.cu_seqlens[index + 1]]
        columns = self._columns[task]
        if task == Task.SPARSE:
            indices, counts = np.unique(ids, return_counts=True)
            values = counts.astype(np.float32)[:, None] / np.float32(2)
            return TaskOutput(values, np.array([0, len(indices)], np.int32), indices.astype(np.int32))
        if task in (Task.TOKENS, Task.MULTI, Task.TOKEN_CLASSES):
            values = token_vectors(ids.tolist(), columns, unit=task == Task.MULTI)
            return TaskOutput(values, np.array([0, len(ids)], np.int32))
        row = _vector(ids, columns)
        if task == Task.EMBED:
            if batch.dimensions is not None and batch.dimensions[index]:
                row[batch.dimensions[index] :] = 0
            row /= np.linalg.norm(row)
        return TaskOutput.one_each(row[None])

    def close(self) -> None:
        pass


def _load() -> None:
    time.sleep(float(os.environ.get("STAND_IN_LOAD_S", "0")))
    _wait_while_there_is(_file("STAND_IN_LOAD_FILE"))
    match os.environ.get("STAND_IN_LOAD"):
        case "error":
            raise BrokenModel("the stand-in was told not to load")
        case "missing":
            raise FileNotFoundError("weights vanished")
        case "memory":
            raise MemoryError
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(3600)
    if _file("STAND_IN_EXIT_FILE").exists():
        os._exit(3)


def _file(variable: str) -> Path:
    return Path(os.environ.get(variable, "/nonexistent"))


def _wait_while_there_is(file: Path) -> None:
    while file.exists():
        time.sleep(0.01)


def _vector(ids: npt.NDArray[Any], width: int) -> npt.NDArray[np.float32]:
    seed = int(np.dot(ids.astype(np.int64), np.arange(1, len(ids) + 1)))
    phases = np.arange(width, dtype=np.float32) + np.float32(seed % 10_007)
    row: npt.NDArray[np.float32] = np.sin(phases * np.float32(0.37)) + np.float32(1e-3)
    return row


def expected(ids: list[int]) -> npt.NDArray[np.float32]:
    """The vector of one text given as ids, float32 [384]."""
    row = _vector(np.array(ids), WIDTH)
    response: npt.NDArray[np.float32] = row / np.linalg.norm(row)
    return response


def token_vectors(ids: list[int], columns: int, *, unit: bool = True) -> npt.NDArray[np.float32]:
    """A vector for each id, float32 [n, columns]: multi-vectors, or with `unit` false hidden states."""
    values = np.stack([_vector(np.array([id_]), columns) for id_ in ids])
    return values / np.linalg.norm(values, axis=1, keepdims=True) if unit else values


def create(model: Model, *, device: str, dtype: str, max_batch_tokens: int | None) -> Encoder:
    return StandIn(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens)
