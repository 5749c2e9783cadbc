"""A pending request, and the rows of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import Encoded, Task, TaskOutput
from embert.engine.batch import cumulative
from embert.engine.tasks import ALL_TASKS
from embert.server.http.request_head import RequestOptions
from embert.server.ipc.messages import EncodeRequest, PartialResult, TaskRows

__all__ = ["TASKS", "Answer", "PendingRequest", "Receive", "TooManyWeights", "rows_of"]

# ASGI's, for those who watch whether the client leaves. None: then the task of the request is cancelled.
Receive = Callable[[], Awaitable[Any]] | None


@dataclass(eq=False)
class TooManyWeights(Exception):
    """The sparse vectors of a request have more weights than an answer may have; not all of them are counted."""

    weights: int


@dataclass(slots=True)
class Answer:
    """The rows of one request, by task, and how long they took."""

    rows: dict[Task, TaskOutput]
    queue_s: float
    inference_s: float
    engine: int = -1  # that ran it, or the last of its texts
    token_ids: npt.NDArray[np.int32] | None = None  # of MULTI's rows

    @property
    def vectors(self) -> npt.NDArray[np.float32]:
        """The rows' values of a request of one task."""
        (rows,) = self.rows.values()
        return rows.values


@dataclass(slots=True, eq=False)
class PendingRequest:
    """An admitted request that has no answer yet."""

    id: int  # changes when an engine is lost
    message: EncodeRequest
    encoded: Encoded
    future: asyncio.Future[Answer]
    receive: Receive
    options: RequestOptions
    engine: int = -1  # the index of the engine that has it; -1: none
    parts: list[tuple[int, dict[Task, TaskOutput]]] = field(default_factory=list)  # of the answer: first text, rows
    texts_left: int = field(init=False)
    inference_s: float = 0.0
    ended_s: float = 0.0  # from its admission to the end of its last batch so far
    last_engine: int = -1  # the engine that it was sent to last
    losses: int = 0  # engines lost while they held it
    watcher: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.texts_left = self.encoded.sequences

    def add(
        self, first_text: int, texts: int, rows: dict[Task, TaskOutput], queue_s: float, inference_s: float
    ) -> Answer | None:
        """Take the rows of some texts; the answer once all are here."""
        self.inference_s += inference_s
        self.ended_s = max(self.ended_s, queue_s + inference_s)
        self.texts_left -= texts
        if self.texts_left or self.parts:
            self.parts.append((first_text, rows))
            if self.texts_left:
                return None
            parts = [rows for _, rows in sorted(self.parts, key=lambda part: part[0])]
            rows = {task: TaskOutput.joined([part[task] for part in parts]) for task in parts[0]}
        # An engine runs one batch at a time, so what is not a batch of this request is its wait for one.
        return Answer(rows, max(0.0, self.ended_s - self.inference_s), self.inference_s, self.last_engine)

    def restart(self, request_id: int) -> None:
        """Forget the parts that a lost engine answered. Late parts carry the old id, so they are ignored."""
        self.id = self.message.id = request_id
        self.parts.clear()
        self.texts_left = self.encoded.sequences


TASKS = {int(task): task for task in ALL_TASKS}  # a look-up costs a tenth of a call of the enumeration


def rows_of(part: PartialResult) -> dict[Task, TaskOutput]:
    """The rows of a part, by task."""
    return {TASKS[message.task]: _rows(message, part.texts) for message in part.rows}


def _rows(message: TaskRows, texts: int) -> TaskOutput:
    values = np.frombuffer(message.values, np.float32)
    if not message.counts:
        return TaskOutput.one_each(values.reshape(texts, -1))
    offsets = cumulative(np.frombuffer(message.counts, np.int32))
    if message.task == Task.SPARSE:
        return TaskOutput(values.reshape(-1, 1), offsets, np.frombuffer(message.indices, np.int32))
    return TaskOutput(values.reshape(int(offsets[-1]), -1), offsets)
