"""What the scheduler carries along of a request, and a batch of it laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine import PackedBatch
from embert.server.ipc.framing import Channel
from embert.server.worker.scheduler import Slice

__all__ = ["Payload", "pack"]


@dataclass(slots=True)
class Payload:
    """One request's texts, what is wanted of their vectors, and where those go."""

    reply_to: Channel
    id: int
    ids: npt.NDArray[np.int32]
    dimensions: int
    normalize: bool
    admitted: float
    alone: bool = False


def pack(slices: list[Slice]) -> PackedBatch:
    """Lay the slices' texts end to end; per slice, not per text."""
    ids = [
        piece.request.payload.ids[piece.request.offsets[piece.start] : piece.request.offsets[piece.stop]]
        for piece in slices
    ]
    sizes = [piece.stop - piece.start for piece in slices]
    cu_seqlens = np.zeros(sum(sizes) + 1, np.int32)
    row = tokens = 0
    for piece, size in zip(slices, sizes, strict=True):
        offsets = piece.request.offsets[piece.start + 1 : piece.stop + 1]
        cu_seqlens[row + 1 : row + 1 + size] = offsets
        cu_seqlens[row + 1 : row + 1 + size] += tokens - piece.request.offsets[piece.start]
        tokens += piece.tokens
        row += size
    payloads: list[Payload] = [piece.request.payload for piece in slices]
    dimensions = [payload.dimensions for payload in payloads]
    normalize = [payload.normalize for payload in payloads]
    return PackedBatch(
        np.concatenate(ids) if len(ids) > 1 else ids[0],
        cu_seqlens,
        dimensions=np.repeat(np.array(dimensions, np.int32), sizes) if any(dimensions) else None,
        normalize=np.repeat(np.array(normalize, np.bool_), sizes) if not all(normalize) else None,
    )
