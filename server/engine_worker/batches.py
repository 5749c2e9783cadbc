"""A batch after the scheduler: packed for the encoder, in flight on the device, and its responses."""

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
from embert.engine.batch import cumulative
from embert.engine.errors import EncoderError
from embert.server.engine_worker.lanes import Slice
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.scheduler import Batch
from embert.server.ipc.channel import TRACE_ID_BYTES, Channel, EncodeRequest, PartialResult, TaskRows, TextRows

log = logging.getLogger(__name__)

BATCHES_OF_A_MODEL = 2  # in flight; an encoder takes no more
UNSENT_MAX = 3  # batches that have ended and whose responses are not sent
AHEAD_S = 0.0015  # the responses of a batch take the host 0.1 to 1.5 ms
# The next batch is submitted this long before the expected end of the running one: the time that submitting takes plus
# the error of the expectation.
LEAD_MIN_S = 0.0005
LEAD_SHARE = 0.15  # of the time left
LEAD_TIME_LEFT_MAX_S = 0.1  # with a longer batch the gap does not matter, and an error would cost more
FULL_LEAD_S = 0.002  # time for interactive requests to arrive, without an idle gap on the device
_ENDED_S = 0.0003  # before its expected end, from when a batch counts as ended: less than its responses take

_ID_BYTES = 4  # int32
_USUAL = (0, True, int(Task.EMBED), -1, 0)  # an encoder's defaults
Send = Callable[..., None]  # SocketServer.send

_ROW_A_TEXT = frozenset((Task.EMBED, Task.CLASSIFY, Task.DECIDE, Task.LABEL_MASS))
_MESSAGE_ROW_BYTES = 1 << 26  # sparse vectors of one batch can be larger than a message may be


def pack(slices: list[Slice]) -> PackedBatch:
    """Lay the texts of the slices end to end. The work is per slice, in plain Python: most have one text."""
    ids: list[bytes] = []
    ends = [0]
    tokens = 0
    unusual = typed = sharing = False
    for piece in slices:
        message: EncodeRequest = piece.request.message
        offsets, start, stop = piece.request.offsets, piece.start, piece.stop
        ids.append(message.ids if stop - start == len(offsets) - 1 else _span(message.ids, piece))
        if stop - start == 1:
            ends.append(tokens + piece.tokens)
        else:
            shift = tokens - offsets[start]
            ends += [shift + end for end in offsets[start + 1 : stop + 1]]
            sharing = sharing or piece.request.prefix > 0
        tokens += offsets[stop] - offsets[start]
        options = message.dimensions, message.normalize, message.tasks, message.adapter, message.prompt_tokens
        if options != _USUAL:
            unusual = True
        if message.token_types:
            typed = True
    # A bytearray, because torch wants a writable array.
    batch = PackedBatch(np.frombuffer(bytearray().join(ids), np.int32), np.array(ends, np.int32))
    if unusual or typed:
        if any(piece.request.message.queries for piece in slices):
            return _with_queries(batch, slices, typed=typed)
        batch = _with_options(batch, slices, [piece.stop - piece.start for piece in slices], typed=typed)
    return batch.with_prefixes(_prefixes(slices)) if sharing else batch


def _prefixes(slices: list[Slice]) -> npt.NDArray[np.int32]:
    """The prefixes of a batch: the texts of a slice continue its first one."""
    sizes = [piece.stop - piece.start for piece in slices]
    firsts = np.repeat(cumulative(np.array(sizes))[:-1], sizes)
    shared = np.repeat(np.array([piece.request.prefix for piece in slices], np.int32), sizes)
    shared[firsts] = 0
    return np.stack([firsts, shared], 1)


def pair_lengths(lengths: list[int], queries: int) -> tuple[int, list[int], list[int]]:
    """The tokens that all pairs of a request with `queries` have in common, those of each pair, and of its query.

    A pair is a query and a document. `lengths` are those of the sequences (EncodeRequest.queries).
    """
    if queries > 1:
        firsts = lengths[::2]
        return 0, [query + document for query, document in zip(firsts, lengths[1::2], strict=True)], firsts
    query, *documents = lengths
    prefix = query if len(documents) > 1 else 0
    return prefix, [query + document for document in documents], [query] * len(documents)


def _with_queries(batch: PackedBatch, slices: list[Slice], *, typed: bool) -> PackedBatch:
    """Marks the queries of a batch: one before all of a slice's documents, or one before each document."""
    lengths: list[npt.NDArray[np.int32]] = []
    for piece in slices:
        message, start, stop = piece.request.message, piece.start, piece.stop
        own = np.frombuffer(message.lengths, np.int32)
        if message.queries == 1:
            own = np.append(own[:1], own[1 + start : 1 + stop])
        elif message.queries:
            own = own[2 * start : 2 * stop]
        else:
            own = own[start:stop]
        lengths.append(own)
    masks = [np.zeros(len(own), np.bool_) for own in lengths]
    for piece, mask in zip(slices, masks, strict=True):
        if piece.request.message.queries:
            mask[:: 2 if piece.request.message.queries > 1 else len(mask)] = True
    batch = dataclasses.replace(batch, cu_seqlens=cumulative(np.concatenate(lengths)))
    return _with_options(batch, slices, [*map(len, lengths)], typed=typed).with_queries(np.concatenate(masks))


def _span(values: bytes, piece: Slice) -> bytes:
    """The values, int32, of a slice's tokens."""
    offsets, start, stop = piece.request.offsets, piece.start, piece.stop
    first, last = offsets[start], offsets[stop]
    if not piece.request.message.queries:
        return values[_ID_BYTES * first : _ID_BYTES * last]
    shared = piece.request.prefix  # pairs have it in common, and the message has it once
    first, last = first - shared * (start - 1), last - shared * (stop - 1)
    return values[: _ID_BYTES * shared] + values[_ID_BYTES * first : _ID_BYTES * last]


def _with_options(batch: PackedBatch, slices: list[Slice], sizes: list[int], *, typed: bool) -> PackedBatch:
    """The batch with the options of its slices; `sizes` are their sequences."""
    messages: list[EncodeRequest] = [piece.request.message for piece in slices]
    token_types: npt.NDArray[np.int32] | None = None
    if typed:
        types = [
            _span(message.token_types, piece) if message.token_types else bytes(len(_span(message.ids, piece)))
            for message, piece in zip(messages, slices, strict=True)
        ]
        token_types = np.frombuffer(bytearray().join(types), np.int32)

    def of_texts(name: str, default: int, dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
        """The option of each text, or None if all texts have the default."""
        values = [getattr(message, name) for message in messages]
        if all(value == default for value in values):
            return None
        return np.repeat(np.array(values, dtype), sizes)

    return dataclasses.replace(
        batch,
        token_types=token_types,
        dimensions=of_texts("dimensions", 0, np.int32),
        normalize=of_texts("normalize", True, np.bool_),
        tasks=of_texts("tasks", Task.EMBED, np.uint8),
        adapters=of_texts("adapter", -1, np.int8),
        prompt_tokens=of_texts("prompt_tokens", 0, np.int32),
    )


def batch_of(model: Any, slices: list[Slice]) -> Batch:
    tokens, texts = sum(piece.tokens for piece in slices), sum(piece.stop - piece.start for piece in slices)
    counted = sum(
        piece.request.shared + piece.request.counted[piece.stop] - piece.request.counted[piece.start]
        for piece in slices
    )
    return Batch(model, slices, tokens, counted, texts)


def runs_isolated(batch: Batch) -> bool:
    """True for an isolated batch (server/engine_worker/work_queue.py)."""
    return len(batch.slices) == 1 and bool(batch.slices[0].request.message.isolated)


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch on the encoder of its model."""

    batch: Batch
    model: LoadedModel
    ticket: Any  # an EncoderError if submitting failed
    started: float
    slot: int  # in the shared counters
    expected_end: float = 0.0  # of this and all before it
    ended: float = 0.0
    seconds: float = 0.0  # device time
    lead_s: float = 0.0  # from the submission of the next batch to the expected end; 0: none was submitted that way
    rows: dict[Task, TaskOutput] | EncoderError | None = None  # set when it has ended; None: the encoder was lost
    is_low_priority: bool = field(init=False)  # it has no text of an interactive request

    def __post_init__(self) -> None:
        self.is_low_priority = all(piece.request.low_priority for piece in self.batch.slices)

    @property
    def began(self) -> float:
        """When the device was free for it."""
        return self.ended - self.seconds

    @property
    def lets_others_follow(self) -> bool:
        return self.model.submits_ahead and not runs_isolated(self.batch)

    @property
    def expected_s(self) -> float:
        return self.model.throughput.expected_s(self.batch.counted)


class InFlightQueue:
    """The batches on a device, in the order of their submission, and the next step of the device loop.

    Pure: the caller passes all times, which are seconds of its clock.

    A batch of a small model takes the device no longer than its responses take the host. So submission comes first.
    While the device has less than `AHEAD_S` of work left, full batches are submitted before responses are sent, and the
    loop waits for a batch that has already ended in order to submit the next one. This delays the responses of up to
    `UNSENT_MAX` batches until the device runs a longer batch.

    A batch that is submitted ahead delays requests that arrive later. So there is never more than one batch beyond
    `AHEAD_S`, or beyond the running one. While interactive requests of a short text come, a full batch is submitted
    only `FULL_LEAD_S` before the device is expected to need it, because a short text that arrives until then goes
    first. For the same reason, one that low-priority requests lead is submitted as late while any interactive requests
    come. The responses to interactive requests also go before those to low-priority requests.
    """

    def __init__(self) -> None:
        self.in_flight: deque[InFlightBatch] = deque()
        self.unsent: deque[InFlightBatch] = deque()  # ended, responses not sent
        self._free_at = 0.0  # when the device is expected to be idle

    def expect(self, flight: InFlightBatch) -> None:
        """Count a flight that starts, and set its `expected_end`."""
        self._free_at = flight.expected_end = max(self._free_at, flight.started) + flight.expected_s

    def left_s(self, now: float) -> float:
        """Expected remaining device time in seconds. Negative if the batch is overdue."""
        return self._free_at - now

    def note_end(self, flight: InFlightBatch) -> None:
        """Count a flight that has ended and is not in `in_flight` any more."""
        rest_s = flight.ended + sum(other.expected_s for other in self.in_flight)
        # Batches of one model run one after the other. Those of several models may run side by side, so the batches
        # behind this one may have ended, too.
        is_serial = all(other.model is flight.model for other in self.in_flight)
        self._free_at = rest_s if is_serial else min(self._free_at, rest_s)

    def full_models(self) -> frozenset[int]:
        """The numbers of the models whose encoder takes no other batch."""
        numbers = [flight.model.number for flight in self.in_flight]
        return frozenset(number for number in numbers if numbers.count(number) >= BATCHES_OF_A_MODEL)

    @property
    def may_grow(self) -> bool:
        """True if a batch may be submitted behind the last one."""
        last = self.in_flight or self.unsent
        return not last or last[-1].lets_others_follow

    def needs_batch(self, now: float) -> bool:
        """True if the device is about to be idle, so that even a batch that could wait is submitted."""
        return self.left_s(now) < AHEAD_S and (len(self.in_flight) == 1 or bool(self.unsent))

    def lead_s(self, now: float, *, full: Callable[[], bool]) -> float:
        """Seconds before the expected end of the only batch at which to submit the next one; 0: not at all.

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

    def next_unsent(self) -> InFlightBatch | None:
        """The next flight to send responses for: the oldest with interactive requests, otherwise the oldest."""
        return next((flight for flight in self.unsent if not flight.is_low_priority), next(iter(self.unsent), None))

    def waits_before(self, unsent: InFlightBatch, now: float, *, full: Callable[[], bool]) -> bool:
        """True if the oldest flight must end before the responses of `unsent` are sent.

        `full` returns True if a full batch waits.
        """
        if not self.in_flight or len(self.unsent) >= UNSENT_MAX:
            return False
        oldest, responses_s = self.in_flight[0], unsent.model.responses_s
        if unsent.is_low_priority and not oldest.is_low_priority and oldest.expected_end - now < responses_s:
            return True
        return self.left_s(now) < responses_s and oldest.expected_end - now < _ENDED_S and full()


class Responder:
    """Sends rows and errors to the HTTP processes. Only the device loop uses it."""

    def __init__(self, send: Send, drop: Callable[[Hashable], None]) -> None:
        """`drop` removes the waiting texts of a request that has failed."""
        self._send, self._drop = send, drop

    def send_rows(
        self,
        slices: list[Slice],
        rows: Mapping[Task, TaskOutput],
        started: float,
        ended: float,
        most_weights: int,
    ) -> None:
        """Send the rows of each task, in the order of the slices, to the requests that they belong to.

        A row that is not finite fails only its request. A request with more than `most_weights` weights in its sparse
        vectors fails, too: their number is not known before the forward.
        """
        all_finite = {task: bool(np.isfinite(output.values.sum(dtype=np.float64))) for task, output in rows.items()}
        if len(rows) == 1 and all(all_finite.values()):
            ((task, output),) = rows.items()
            if task in _ROW_A_TEXT and not any(piece.request.message.dimensions for piece in slices):
                self._send_text_rows(slices, int(task), output.values, started, ended)
                return
        outgoing: dict[Channel, list[PartialResult]] = {}
        pending_bytes = 0  # of the rows in `outgoing`
        next_row = dict.fromkeys(rows, 0)  # by task
        for piece in slices:
            request, texts = piece.request, piece.stop - piece.start
            message: EncodeRequest = request.message
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
                    failure = PartialResult.failure(message.id, "weights", weights=request.weights)
                    outgoing.setdefault(request.channel, []).append(failure)
                    continue
            part = PartialResult(
                message.id,
                piece.start,
                texts,
                [_message(task, output, message.dimensions) for task, output in parts.items()],
                started - message.admitted,
                ended - started,
            )
            outgoing.setdefault(request.channel, []).append(part)
            pending_bytes += sum(output.values.nbytes for output in parts.values())
            if pending_bytes > _MESSAGE_ROW_BYTES:
                self._send_all(outgoing)
                pending_bytes = 0
        self._send_all(outgoing)

    def _send_text_rows(
        self, slices: list[Slice], task: int, values: npt.NDArray[np.float32], started: float, ended: float
    ) -> None:
        """Send the rows if every text has one whole row of the same task, and all are finite: a message per process."""
        outgoing: dict[Channel, TextRows] = {}
        values_of: dict[Channel, list[memoryview]] = {}  # for few texts, numpy takes longer
        memory = np.ascontiguousarray(values).data.cast("B")
        row_bytes, row = values.shape[1] * values.itemsize, 0
        for piece in slices:
            request, start = piece.request, piece.start
            texts, channel = piece.stop - start, request.channel
            rows = outgoing.get(channel)
            if rows is None:
                rows = outgoing[channel] = TextRows(task, b"", [], [], [], started, ended)
                values_of[channel] = []
            rows.ids.append(request.message.id)
            rows.first_texts.append(start)
            rows.texts.append(texts)
            end = row + texts * row_bytes
            values_of[channel].append(memory[row:end])
            row = end
        for channel, rows in outgoing.items():
            rows.values = b"".join(values_of[channel])
            self._send(channel, [], rows)

    def _send_all(self, outgoing: dict[Channel, list[PartialResult]]) -> None:
        for channel, parts in outgoing.items():
            self._send(channel, parts)
        outgoing.clear()

    def fail(self, slices: list[Slice], error: Exception) -> None:
        """Send an error to these requests. Their other texts need not run."""
        trace_id = slices[0].request.message.trace[:TRACE_ID_BYTES].hex()
        log.error("%d request(s) failed: %s", len(slices), error, extra={"trace_id": trace_id} if trace_id else None)
        for piece in slices:
            request = piece.request
            self._drop(request.key)
            self._send(request.channel, [PartialResult.failure(request.message.id, "backend", str(error))])


def _message(task: Task, rows: TaskOutput, dimensions: int) -> TaskRows:
    values = rows.values[:, :dimensions] if dimensions and task == Task.EMBED else rows.values
    if task in _ROW_A_TEXT:
        return TaskRows(int(task), values.tobytes())
    return TaskRows(
        int(task), values.tobytes(), rows.counts.tobytes(), b"" if rows.indices is None else rows.indices.tobytes()
    )
