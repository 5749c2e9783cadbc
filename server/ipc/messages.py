"""What travels between API processes and engine processes (server/ipc/framing.py), as msgpack arrays.

One message in each direction a loop tick, whatever the number of requests in it. Arrays travel as little-endian bytes.
Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "EMBED",
    "TOKENS",
    "EncodeRequest",
    "Part",
    "Results",
    "Status",
    "Submit",
    "decode_results",
    "decode_submit",
    "encode",
]

EMBED, TOKENS = 0, 1  # engine.Task, as a number


class EncodeRequest(msgspec.Struct, array_like=True):
    """All texts of one HTTP request."""

    id: int  # unique in the server
    task: int  # EMBED or TOKENS
    ids: bytes  # int32 [T], all sequences end to end
    lengths: bytes  # int32 [n]
    dimensions: int  # 0 = all
    normalize: bool
    deadline: float
    admitted: float
    bulk: bool = False  # runs in what others leave
    alone: bool = False  # an engine was lost while it ran this: nobody else is to be in its batch


class Submit(msgspec.Struct, array_like=True):
    """API process → engine."""

    requests: list[EncodeRequest]
    cancelled: list[int]  # ids whose client has left


class Part(msgspec.Struct, array_like=True):
    """Some consecutive texts of one request, answered. A failed request gets one part, with `error`, and no more."""

    id: int
    first_text: int
    texts: int
    vectors: bytes  # float32 [texts, dimensions], or [their tokens, hidden_size]
    queue_s: float
    inference_s: float
    error: str = ""  # "backend", "deadline" (has passed) or "hopeless" (cannot be met)
    message: str = ""


class Status(msgspec.Struct, array_like=True):
    """How the engine is; with every message and every second."""

    index: int
    last_success: float  # end of the last forward that worked
    queue_tokens: int
    tokens_per_s: float  # that it works a queue off with


class Results(msgspec.Struct, array_like=True):
    """Engine → API process."""

    status: Status
    parts: list[Part]


_encoder = msgspec.msgpack.Encoder()
_submit = msgspec.msgpack.Decoder(Submit)
_results = msgspec.msgpack.Decoder(Results)


def encode(message: Submit | Results) -> bytes:
    """To bytes; thread-safe."""
    return _encoder.encode(message)


def decode_submit(data: bytes | memoryview) -> Submit:
    """From bytes."""
    return _submit.decode(data)


def decode_results(data: bytes | memoryview) -> Results:
    """From bytes."""
    return _results.decode(data)
