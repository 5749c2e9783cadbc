"""A batch after the scheduler: packed for the encoder, in flight on the device, answered."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import PackedBatch, Task, TaskOutput
from embert.engine.errors import EncoderError
from embert.server.engine_worker.lanes import Slice
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.scheduler import Batch
from embert.server.ipc.channel import TRACE_ID_BYTES, Channel, EncodeRequest, PartialResult, TaskRows, TextRows

__all__ = ["InFlightBatch", "InFlightQueue", "Responder", "batch_of", "pack"]

log = logging.getLogger(__name__)

BATCHES_OF_A_MODEL = 2  # in flight; an encoder takes no more
UNANSWERED_MAX = 3
AHEAD_S = 0.0015  # an answer takes the host 0.1 to 1.5 ms
# The next batch is submitted this long before the expected end of the running one: the time that submitting takes plus
# the error of the expectation.
LEAD_MIN_S = 0.0005
LEAD_SHARE = 0.15  # of the time left
LEAD_TIME_LEFT_MAX_S = 0.1  # beside a longer batch the gap does not matter, and an error would cost more
FULL_LEAD_S = 0.002  # time for interactive requests to arrive, without an idle gap on the device
_ENDED_S = 0.0003  # from so long before its expected end on, a batch counts as ended: less than an answer takes

_ID_BYTES = 4  # int32
_USUAL = (0, True, int(Task.EMBED), -1, 0)  # an encoder's defaults
Send = Callable[..., None]  # SocketServer.send

_ROW_A_TEXT = frozenset((Task.EMBED, Task.CLASSIFY))
_SENT_AT_ONCE = 1 << 26  # bytes of rows; sparse vectors of one batch can be more than a message may hold


def pack(slices: list[Slice]) -> PackedBatch:
    """Lay the texts of the slices end to end. The work is per slice, in plain Python: most have one text."""
    ids: list[bytes] = []
    ends = [0]
    tokens = 0
    unusual = typed = False
    for piece in slices:
        message: EncodeRequest = piece.request.payload
        offsets, start, stop = piece.request.offsets, piece.start, piece.stop
        ids.append(message.ids if stop - start == len(offsets) - 1 else _span(message.ids, piece))
        if stop - start == 1:
            ends.append(tokens + piece.tokens)
        else:
            shift = tokens - offsets[start]
            ends += [shift + end for end in offsets[start + 1 : stop + 1]]
        tokens += piece.tokens
        options = message.dimensions, message.normalize, message.tasks, message.adapter, message.prompt_tokens
        if options != _USUAL:
            unusual = True
        if message.token_types:
            typed = True
    # A bytearray, because torch wants a writable array.
    batch = PackedBatch(np.frombuffer(bytearray().join(ids), np.int32), np.array(ends, np.int32))
    return _with_options(batch, slices, typed=typed) if unusual or typed else batch


def _span(values: bytes, piece: Slice) -> bytes:
    """The int32 of a slice's tokens, of those of its request."""
    offsets = piece.request.offsets
    return values[_ID_BYTES * offsets[piece.start] : _ID_BYTES * offsets[piece.stop]]


def _with_options(batch: PackedBatch, slices: list[Slice], *, typed: bool) -> PackedBatch:
    messages: list[EncodeRequest] = [piece.request.payload for piece in slices]
    sizes = [piece.stop - piece.start for piece in slices]
    token_types: npt.NDArray[np.int32] | None = None
    if typed:
        types = [
            _span(message.token_types, piece) if message.token_types else bytes(_ID_BYTES * piece.tokens)
            for message, piece in zip(messages, slices, strict=True)
        ]
        token_types = np.frombuffer(bytearray().join(types), np.int32)
    dimensions = [message.dimensions for message in messages]
    normalize = [message.normalize for message in messages]
    tasks = [message.tasks for message in messages]
    adapters = [message.adapter for message in messages]
    prompt_tokens = [message.prompt_tokens for message in messages]
    return dataclasses.replace(
        batch,
        token_types=token_types,
        dimensions=np.repeat(np.array(dimensions, np.int32), sizes) if any(dimensions) else None,
        normalize=np.repeat(np.array(normalize, np.bool_), sizes) if not all(normalize) else None,
        tasks=np.repeat(np.array(tasks, np.uint8), sizes) if any(task != Task.EMBED for task in tasks) else None,
        adapters=np.repeat(np.array(adapters, np.int8), sizes) if any(adapter >= 0 for adapter in adapters) else None,
        prompt_tokens=np.repeat(np.array(prompt_tokens, np.int32), sizes) if any(prompt_tokens) else None,
    )


def batch_of(model: Any, slices: list[Slice]) -> Batch:
    """A batch of these slices."""
    tokens, texts = sum(piece.tokens for piece in slices), sum(piece.stop - piece.start for piece in slices)
    counted = sum(piece.request.counted[piece.stop] - piece.request.counted[piece.start] for piece in slices)
    return Batch(model, slices, tokens, counted, texts)


def runs_isolated(batch: Batch) -> bool:
    """True for an isolated batch (server/engine_worker/work_queue.py)."""
    return len(batch.slices) == 1 and bool(batch.slices[0].request.payload.isolated)


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch on the encoder of its model."""

    batch: Batch
    model: LoadedModel
    ticket: Any  # an EncoderError when submitting failed
    started: float
    slot: int  # in the shared counters
    expected_end: float = 0.0  # of this and all before it
    ended: float = 0.0
    seconds: float = 0.0  # of the device's time
    lead_s: float = 0.0  # from the submission of what waited to the expected end; 0: none was submitted that way
    rows: dict[Task, TaskOutput] | EncoderError | None = None  # set when it has ended; None: the encoder was lost
    is_low_priority: bool = field(init=False)  # no interactive request has a text in it

    def __post_init__(self) -> None:
        self.is_low_priority = all(piece.request.low_priority for piece in self.batch.slices)

    @property
    def began(self) -> float:
        """When the device was free for it."""
        return self.ended - self.seconds

    @property
    def lets_others_follow(self) -> bool:
        """Whether a batch may be submitted behind it."""
        return self.model.submits_ahead and not runs_isolated(self.batch)

    @property
    def expected_s(self) -> float:
        """Of the device's time."""
        return self.model.throughput.expected_s(self.batch.counted)


class InFlightQueue:
    """The batches on a device, in the order of their submission, and the next step of the device loop.

    Pure: the caller passes all times, which are seconds of its clock.

    A batch of a small model takes the device no longer than its answer takes the host. So submission comes first. While
    the device has less than `AHEAD_S` of work left, full batches are submitted before answers are made, and the loop
    waits for a batch that has already ended in order to submit the next one. Up to `UNANSWERED_MAX` answers are delayed
    by that; they are made while the device runs a longer batch.

    A batch that is submitted ahead delays requests that arrive later. So there is never more than one batch beyond
    `AHEAD_S`, or beyond the running one. While interactive requests of a short text come, a full batch is submitted
    only `FULL_LEAD_S` before the device is expected to need it, because a short text that arrives until then goes
    first. For the same reason, one that low-priority requests lead is submitted as late while any interactive requests
    come. The answers of interactive requests also go before those of low-priority requests.
    """

    def __init__(self) -> None:
        self.in_flight: deque[InFlightBatch] = deque()
        self.unanswered: deque[InFlightBatch] = deque()
        self._free_at = 0.0  # when the device is expected to be idle

    def expect(self, flight: InFlightBatch) -> None:
        """Count a flight that starts: sets its `expected_end`."""
        self._free_at = flight.expected_end = max(self._free_at, flight.started) + flight.expected_s

    def left_s(self, now: float) -> float:
        """How long the device is expected to be busy; negative when it should have ended."""
        return self._free_at - now

    def note_end(self, flight: InFlightBatch) -> None:
        """A flight has ended; it is not in `in_flight` any more."""
        rest_s = flight.ended + sum(other.expected_s for other in self.in_flight)
        # Batches of one model run one after the other. Those of several models may run side by side, so what is behind
        # this one may have ended, too.
        is_serial = all(other.model is flight.model for other in self.in_flight)
        self._free_at = rest_s if is_serial else min(self._free_at, rest_s)

    def full_models(self) -> frozenset[int]:
        """The numbers of the models whose encoder takes no other batch."""
        numbers = [flight.model.number for flight in self.in_flight]
        return frozenset(number for number in numbers if numbers.count(number) >= BATCHES_OF_A_MODEL)

    @property
    def may_grow(self) -> bool:
        """Whether a batch may be submitted behind the last one."""
        last = self.in_flight or self.unanswered
        return not last or last[-1].lets_others_follow

    def needs_batch(self, now: float) -> bool:
        """True if the device is about to be idle, so that even a batch that could wait is submitted."""
        return self.left_s(now) < AHEAD_S and (len(self.in_flight) == 1 or bool(self.unanswered))

    def lead_s(self, now: float, *, full: Callable[[], bool]) -> float:
        """How long before its expected end a batch is to be submitted behind the only one; 0: not at all.

        `full` returns True if a full batch waits.
        """
        if len(self.in_flight) != 1 or not self.may_grow:
            return 0.0
        left_s = self.left_s(now)
        if left_s >= LEAD_TIME_LEFT_MAX_S:
            return 0.0
        if full():
            return max(0.0, min(left_s, FULL_LEAD_S))
        return max(LEAD_MIN_S, LEAD_SHARE * left_s) if left_s > 2 * LEAD_MIN_S else 0.0

    def next_answer(self) -> InFlightBatch | None:
        """Which flight is answered next: the oldest with interactive requests, or else the oldest."""
        return next(
            (flight for flight in self.unanswered if not flight.is_low_priority), next(iter(self.unanswered), None)
        )

    def waits_before(self, answer: InFlightBatch, now: float, *, more_waits: Callable[[], bool]) -> bool:
        """Whether the oldest flight is waited for before `answer` is made.

        `more_waits`: whether a full batch could follow.
        """
        if not self.in_flight or len(self.unanswered) >= UNANSWERED_MAX:
            return False
        oldest, answer_s = self.in_flight[0], answer.model.answer_s
        if answer.is_low_priority and not oldest.is_low_priority and oldest.expected_end - now < answer_s:
            return True
        return self.left_s(now) < answer_s and oldest.expected_end - now < _ENDED_S and more_waits()


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
            if task in _ROW_A_TEXT and not any(piece.request.payload.dimensions for piece in slices):
                self._answer_rows(slices, int(task), output.values, started, ended)
                return
        outgoing: dict[Channel, list[PartialResult]] = {}
        pending_bytes = 0  # of the rows in `outgoing`
        next_row = dict.fromkeys(rows, 0)  # by task
        for piece in slices:
            request, texts = piece.request, piece.stop - piece.start
            message: EncodeRequest = request.payload
            parts: dict[Task, TaskOutput] = {}
            for task, output in rows.items():
                if int(task) & message.tasks:
                    parts[task] = output.slice(next_row[task], next_row[task] + texts)
                    next_row[task] += texts
            if not all(all_finite[task] or np.isfinite(output.values).all() for task, output in parts.items()):
                self.fail([piece], EncoderError("the encoder returned a vector that is not finite"))
                continue
            if Task.SPARSE in parts:
                request.weights += len(parts[Task.SPARSE].values)
                if request.weights > most_weights:
                    self._drop(request.key)
                    outgoing.setdefault(request.reply_to, []).append(
                        PartialResult(message.id, piece.start, texts, [], 0.0, 0.0, "weights", str(request.weights))
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
            outgoing.setdefault(request.reply_to, []).append(part)
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
            request, start = piece.request, piece.start
            texts, channel = piece.stop - start, request.reply_to
            answers = outgoing.get(channel)
            if answers is None:
                answers = outgoing[channel] = TextRows(task, b"", [], [], [], started, ended)
                pieces_of[channel] = []
            answers.ids.append(request.payload.id)
            answers.first_texts.append(start)
            answers.texts.append(texts)
            end = row + texts * row_bytes
            pieces_of[channel].append(memory[row:end])
            row = end
        for channel, answers in outgoing.items():
            answers.values = b"".join(pieces_of[channel])
            self._send(channel, [], answers)

    def _send_all(self, outgoing: dict[Channel, list[PartialResult]]) -> None:
        for channel, parts in outgoing.items():
            self._send(channel, parts)
        outgoing.clear()

    def fail(self, slices: list[Slice], error: Exception) -> None:
        """Answer these requests with an error. Their other texts need not run."""
        trace_id = slices[0].request.payload.trace[:TRACE_ID_BYTES].hex()
        log.error("%d request(s) failed: %s", len(slices), error, extra={"trace_id": trace_id} if trace_id else None)
        for piece in slices:
            request = piece.request
            self._drop(request.key)
            part = PartialResult(
                request.payload.id, piece.start, piece.stop - piece.start, [], 0.0, 0.0, "backend", str(error)
            )
            self._send(request.reply_to, [part])


def _message(task: Task, rows: TaskOutput, dimensions: int) -> TaskRows:
    values = rows.values[:, :dimensions] if dimensions and task == Task.EMBED else rows.values
    if task in _ROW_A_TEXT:
        return TaskRows(int(task), values.tobytes())
    return TaskRows(
        int(task), values.tobytes(), rows.counts.tobytes(), b"" if rows.indices is None else rows.indices.tobytes()
    )
