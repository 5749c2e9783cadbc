"""Messages between API processes and engine processes, as msgpack arrays (server/ipc/framing.py carries them).

A process sends at most one message per loop tick in each direction, for any number of requests in it. Arrays
travel as little-endian bytes. Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "SPAN_ID_BYTES",
    "TRACE_ID_BYTES",
    "EncodeRequest",
    "EngineStatus",
    "PartialResult",
    "Results",
    "Submit",
    "TaskRows",
    "TextRows",
    "decode_results",
    "decode_submit",
    "encode",
]

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8  # of EncodeRequest.trace


class EncodeRequest(msgspec.Struct, array_like=True):
    """All texts of one HTTP request."""

    id: int  # unique in the server
    tasks: int  # engine.Task: what each of its texts wants
    ids: bytes  # int32 [T], all sequences end to end
    lengths: bytes  # int32 [n]
    token_types: bytes  # int32 [T]; empty: all 0
    dimensions: int  # 0 = all
    normalize: bool
    deadline: float
    admitted: float
    low_priority: bool = False  # runs in the capacity that other requests leave
    isolated: bool = False  # an engine was lost while it ran this: it needs a batch of its own
    adapter: int = -1  # the model's that runs on all of its texts; -1: none
    model: int = 0  # its number
    trace: bytes = b""  # of a sampled request: trace id, id of its span, `tracestate`
    prompt_tokens: int = 0  # first tokens of each text, that pooling leaves out


class Submit(msgspec.Struct, array_like=True):
    """API process → engine."""

    requests: list[EncodeRequest]
    cancelled: list[int]  # ids of requests whose client has disconnected


class TaskRows(msgspec.Struct, array_like=True):
    """The rows of one task for the texts of a part: see embert.engine.batch."""

    task: int
    values: bytes  # float32 [rows, columns]
    counts: bytes = b""  # int32 [texts]: the rows of each; empty: one each
    indices: bytes = b""  # int32 [rows], only of sparse vectors


class PartialResult(msgspec.Struct, array_like=True):
    """The answer to consecutive texts of one request. A failed request gets one part, with `error`, and no more."""

    id: int
    first_text: int
    texts: int
    rows: list[TaskRows]
    queue_s: float
    inference_s: float
    # "backend", "deadline" (has passed), "cannot_meet_deadline" (the queue takes longer) or "weights" (of sparse
    # vectors, more than an answer may have)
    error: str = ""
    message: str = ""  # of "weights": how many there are at least


class TextRows(msgspec.Struct, array_like=True):
    """The answers of one batch to the requests of one API process, where each text has one row of the same task.

    Most batches are like this. Lists run over the slices of the batch, `values` over their texts, in the same order.
    """

    task: int
    values: bytes  # float32 [texts, columns]
    ids: list[int]  # of the slices' requests
    first_texts: list[int]
    texts: list[int]
    queue_s: list[float]
    inference_s: float


class EngineStatus(msgspec.Struct, array_like=True):
    """The engine's state; sent with every message and every second."""

    index: int
    last_success: float  # end of the last forward that worked
    queue_tokens: int
    tokens_per_s: list[float]  # by number of the model, measured while a queue of it waits; 0: not known, or not here


class Results(msgspec.Struct, array_like=True):
    """Engine → API process."""

    status: EngineStatus
    parts: list[PartialResult]
    rows: TextRows | None = None


_encoder = msgspec.msgpack.Encoder()
_submit = msgspec.msgpack.Decoder(Submit)
_results = msgspec.msgpack.Decoder(Results)


def encode(message: Submit | Results) -> bytes:
    """To bytes; thread-safe."""
    return _encoder.encode(message)


def decode_submit(data: bytes | memoryview) -> Submit:
    """From bytes. Raises msgspec.MsgspecError for what is no Submit."""
    return _submit.decode(data)


def decode_results(data: bytes | memoryview) -> Results:
    """From bytes. Raises msgspec.MsgspecError for what is no Results."""
    return _results.decode(data)
