"""The payload of a request, and a batch laid end to end for the encoder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import PackedBatch, Task
from embert.server.engine_worker.scheduling import Batch, Slice
from embert.server.ipc.framing import Channel
from embert.server.ipc.messages import EncodeRequest

__all__ = ["Payload", "batch_of", "pack", "runs_isolated"]

_ID_BYTES = 4  # int32


@dataclass(slots=True)
class Payload:
    """The scheduler's payload of a request: its message, and the channel of its answer."""

    reply_to: Channel
    message: EncodeRequest
    weights: int = 0  # of its sparse vectors so far


_USUAL = (0, True, int(Task.EMBED), -1, 0)  # an encoder's defaults


def pack(slices: list[Slice]) -> PackedBatch:
    """Lay the texts of the slices end to end. The work is per slice, in plain Python: most have one text."""
    ids: list[bytes] = []
    ends = [0]
    tokens = 0
    unusual = typed = False
    for piece in slices:
        message: EncodeRequest = piece.request.payload.message
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
    messages: list[EncodeRequest] = [piece.request.payload.message for piece in slices]
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
    return Batch(model, slices, tokens, texts)


def runs_isolated(batch: Batch) -> bool:
    """True for an isolated batch (server/engine_worker/work_queue.py)."""
    return len(batch.slices) == 1 and bool(batch.slices[0].request.payload.message.isolated)
