"""Where a block goes in a file, and how it gets there: by whichever process has time, in any order.

The output says where each block goes, in the order of the input. The file's system knows nothing of processes: once
`pwrite` has returned, the bytes are the file's, and an fsync by any process that has the file open makes them last. So
whoever writes says that it has, and the output then counts the block as its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.server.bulk.output.durable import PIECE_BYTES, write_at

__all__ = ["Place", "write_bytes", "write_rows"]


class Place(NamedTuple):
    """Where a block goes."""

    descriptor: int  # of the open file, in the process that writes
    position: int  # bytes
    path: Path  # for people


def write_bytes(place: Place, content: memoryview) -> None:
    """Write a block's bytes as they are. Raises BulkError."""
    write_at(place.descriptor, content, place.position, place.path)


def write_rows(place: Place, values: npt.NDArray[np.float32], numbers: npt.NDArray[np.intp]) -> None:
    """Write rows of equal length in the order of their `numbers`: values[numbers]. Raises BulkError.

    A few at a time, so that a processor's cache has them when they are written.
    """
    row_bytes = values.itemsize * values.shape[1]
    most = max(1, PIECE_BYTES // row_bytes)
    rows = np.empty((min(most, len(numbers)), values.shape[1]), values.dtype)
    for first in range(0, len(numbers), most):
        some = numbers[first : first + most]
        piece = rows[: len(some)]
        values.take(some, axis=0, out=piece, mode="clip")  # "raise", the default, would copy once more
        content = piece.reshape(-1).view(np.uint8).data
        write_at(place.descriptor, content, place.position + first * row_bytes, place.path)
