"""Turns the vectors of a batch into answers, and sends each to the API process that asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping

import numpy as np
import numpy.typing as npt

from embert.engine import Task, TaskOutput
from embert.engine.errors import EncoderError
from embert.server.engine_worker.batching import Payload
from embert.server.engine_worker.scheduling import Slice
from embert.server.ipc.framing import Channel
from embert.server.ipc.messages import TRACE_ID_BYTES, PartialResult, TaskRows, TextRows

__all__ = ["Responder"]

log = logging.getLogger(__name__)

Send = Callable[..., None]  # SocketServer.send

_ROW_A_TEXT = frozenset((Task.EMBED, Task.CLASSIFY))
_SENT_AT_ONCE = 1 << 26  # bytes of rows; sparse vectors of one batch can be more than a message may hold


class Responder:
    """Only the device loop uses it."""

    def __init__(self, send: Send, drop: Callable[[Hashable], None]) -> None:
        """`drop` removes the waiting texts of a request that has failed."""
        self._send, self._drop = send, drop

    def answer(
        self, slices: list[Slice], rows: Mapping[Task, TaskOutput], started: float, ended: float, most_weights: int
    ) -> None:
        """Send the rows of each task, in the order of the slices, to the requests that they belong to.

        A row that is not finite fails its request, and no other. A request gets no more weights of sparse vectors than
        `most_weights`: their number is not known before the forward.
        """
        all_finite = {task: bool(np.isfinite(output.values.sum(dtype=np.float64))) for task, output in rows.items()}
        if len(rows) == 1 and all(all_finite.values()):
            ((task, output),) = rows.items()
            if task in _ROW_A_TEXT and not any(piece.request.payload.message.dimensions for piece in slices):
                self._answer_rows(slices, int(task), output.values, started, ended)
                return
        outgoing: dict[Channel, list[PartialResult]] = {}
        pending_bytes = 0  # of the rows in `outgoing`
        next_row = dict.fromkeys(rows, 0)  # by task
        for piece in slices:
            payload: Payload = piece.request.payload
            message = payload.message
            texts = piece.stop - piece.start
            parts: dict[Task, TaskOutput] = {}
            for task, output in rows.items():
                if int(task) & message.tasks:
                    parts[task] = output.slice(next_row[task], next_row[task] + texts)
                    next_row[task] += texts
            if not all(all_finite[task] or np.isfinite(output.values).all() for task, output in parts.items()):
                self.fail([piece], EncoderError("the encoder returned a vector that is not finite"))
                continue
            if Task.SPARSE in parts and _count_weights(payload, parts[Task.SPARSE]) > most_weights:
                self._drop(piece.request.key)
                outgoing.setdefault(payload.reply_to, []).append(
                    PartialResult(message.id, piece.start, texts, [], 0.0, 0.0, "weights", str(payload.weights))
                )
                continue
            part = PartialResult(
                message.id,
                piece.start,
                texts,
                [_message(task, output, message.dimensions) for task, output in parts.items()],
                started - message.admitted,
                ended - started,
            )
            outgoing.setdefault(payload.reply_to, []).append(part)
            pending_bytes += sum(output.values.nbytes for output in parts.values())
            if pending_bytes > _SENT_AT_ONCE:
                self._send_all(outgoing)
                pending_bytes = 0
        self._send_all(outgoing)

    def _answer_rows(
        self, slices: list[Slice], task: int, values: npt.NDArray[np.float32], started: float, ended: float
    ) -> None:
        """`answer` where every text has one whole row of the same task, and all are finite: one message a process."""
        outgoing: dict[Channel, TextRows] = {}
        pieces_of: dict[Channel, list[memoryview]] = {}  # of the values: for few texts, numpy takes longer
        memory = np.ascontiguousarray(values).data.cast("B")
        row_bytes, row = values.shape[1] * values.itemsize, 0
        for piece in slices:
            payload: Payload = piece.request.payload
            message, start = payload.message, piece.start
            texts = piece.stop - start
            answers = outgoing.get(payload.reply_to)
            if answers is None:
                answers = outgoing[payload.reply_to] = TextRows(task, b"", [], [], [], [], ended - started)
                pieces_of[payload.reply_to] = []
            answers.ids.append(message.id)
            answers.first_texts.append(start)
            answers.texts.append(texts)
            answers.queue_s.append(started - message.admitted)
            pieces_of[payload.reply_to].append(memory[row : row + texts * row_bytes])
            row += texts * row_bytes
        for channel, answers in outgoing.items():
            answers.values = b"".join(pieces_of[channel])
            self._send(channel, [], answers)

    def _send_all(self, outgoing: dict[Channel, list[PartialResult]]) -> None:
        for channel, parts in outgoing.items():
            self._send(channel, parts)
        outgoing.clear()

    def fail(self, slices: list[Slice], error: Exception) -> None:
        """Answer these requests with an error. Their other texts need not run."""
        trace_id = slices[0].request.payload.message.trace[:TRACE_ID_BYTES].hex()
        log.error("%d request(s) failed: %s", len(slices), error, extra={"trace_id": trace_id} if trace_id else None)
        for piece in slices:
            payload: Payload = piece.request.payload
            self._drop(piece.request.key)
            part = PartialResult(
                payload.message.id, piece.start, piece.stop - piece.start, [], 0.0, 0.0, "backend", str(error)
            )
            self._send(payload.reply_to, [part])


def _count_weights(payload: Payload, rows: TaskOutput) -> int:
    payload.weights += len(rows.values)
    return payload.weights


def _message(task: Task, rows: TaskOutput, dimensions: int) -> TaskRows:
    values = rows.values[:, :dimensions] if dimensions and task == Task.EMBED else rows.values
    if task in _ROW_A_TEXT:
        return TaskRows(int(task), values.tobytes())
    return TaskRows(
        int(task), values.tobytes(), rows.counts.tobytes(), b"" if rows.indices is None else rows.indices.tobytes()
    )
