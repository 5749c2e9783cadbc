"""The payload of a request, and a batch laid end to end for the encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import PackedBatch, Task
from embert.server.ipc.framing import Channel
from embert.server.observability.tracing.records import Member
from embert.server.worker.scheduling import Batch, Slice

__all__ = ["Payload", "batch_of", "pack", "runs_alone", "sampled"]


@dataclass(slots=True)
class Payload:
    """What the scheduler carries along for a request: its texts, what is wanted of their vectors, where those go."""

    reply_to: Channel
    id: int
    ids: npt.NDArray[np.int32]  # [T]
    token_types: npt.NDArray[np.int32] | None  # [T]
    tasks: Task  # of each text
    dimensions: int  # 0 = all
    normalize: bool
    admitted: float
    alone: bool = False
    adapter: int = -1  # of each text; -1: none
    weights: int = 0  # of its sparse vectors so far
    trace: bytes = b""  # of a sampled request: RequestTrace.context
    prompt_tokens: int = 0  # first ones of each text, that pooling leaves out


def pack(slices: list[Slice]) -> PackedBatch:
    """Lay the texts of the slices end to end. The work is per slice, not per text."""
    spans = [slice(piece.request.offsets[piece.start], piece.request.offsets[piece.stop]) for piece in slices]
    payloads: list[Payload] = [piece.request.payload for piece in slices]
    ids = [payload.ids[span] for payload, span in zip(payloads, spans, strict=True)]
    token_types: npt.NDArray[np.int32] | None = None
    if any(payload.token_types is not None for payload in payloads):
        types = [
            np.zeros(piece.tokens, np.int32) if payload.token_types is None else payload.token_types[span]
            for piece, payload, span in zip(slices, payloads, spans, strict=True)
        ]
        token_types = np.concatenate(types)
    sizes = [piece.stop - piece.start for piece in slices]
    cu_seqlens = np.zeros(sum(sizes) + 1, np.int32)
    row = tokens = 0
    for piece, size in zip(slices, sizes, strict=True):
        offsets = piece.request.offsets[piece.start + 1 : piece.stop + 1]
        cu_seqlens[row + 1 : row + 1 + size] = offsets
        cu_seqlens[row + 1 : row + 1 + size] += tokens - piece.request.offsets[piece.start]
        tokens += piece.tokens
        row += size
    dimensions = [payload.dimensions for payload in payloads]
    normalize = [payload.normalize for payload in payloads]
    tasks = [payload.tasks for payload in payloads]
    adapters = [payload.adapter for payload in payloads]
    prompt_tokens = [payload.prompt_tokens for payload in payloads]
    return PackedBatch(
        np.concatenate(ids) if len(ids) > 1 else ids[0],
        cu_seqlens,
        token_types,
        dimensions=np.repeat(np.array(dimensions, np.int32), sizes) if any(dimensions) else None,
        normalize=np.repeat(np.array(normalize, np.bool_), sizes) if not all(normalize) else None,
        tasks=np.repeat(np.array(tasks, np.uint8), sizes) if any(task != Task.EMBED for task in tasks) else None,
        adapters=np.repeat(np.array(adapters, np.int8), sizes) if any(each >= 0 for each in adapters) else None,
        prompt_tokens=np.repeat(np.array(prompt_tokens, np.int32), sizes) if any(prompt_tokens) else None,
    )


def batch_of(model: Any, slices: list[Slice]) -> Batch:
    """A batch of these slices."""
    tokens, texts = sum(piece.tokens for piece in slices), sum(piece.stop - piece.start for piece in slices)
    return Batch(model, slices, tokens, texts)


def sampled(slices: list[Slice]) -> list[Member]:
    """What traces tell of these slices: those of sampled requests."""
    return [
        Member(payload.trace, piece.stop - piece.start, piece.tokens, 0.0 if piece.start else payload.admitted)
        for piece in slices
        if (payload := piece.request.payload).trace
    ]


def runs_alone(batch: Batch) -> bool:
    """True for a solo batch (server/worker/work_queue.py)."""
    return len(batch.slices) == 1 and bool(batch.slices[0].request.payload.alone)
