"""The header of a safetensors file: names, dtypes, shapes and offsets of its tensors.

Imports no numpy: the supervisor reads headers, and only its children need arrays.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel

# The format's tags → bytes of a number.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
MAX_HEADER_BYTES = 10_000_000  # the format allows ten times as many; 100,000 tensors have less
MAX_DIMENSIONS = 8

Header = dict[str, dict[str, Any]]  # a tensor's name → its dtype, shape and data_offsets, which are checked


def read_header(path: Path) -> Header:
    """Read a file's header and check it against the file's size. Raises BrokenModel naming the file and the reason."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
            size = file.seek(0, 2)
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_header(path, start + text, size)[0]


def parse_header(path: Path, data: Any, size: int) -> tuple[Header, int]:
    """The header that a file's first bytes, or all of them, hold, and where the tensors' data begins.

    `safetensors.torch.save_model` stores one of several tensors that share data, and its metadata map the other names
    to it. The result has those names too.

    `size` is the file's, in bytes; `path` is for messages. Raises BrokenModel.
    """
    if not size:
        raise broken(path, "the file is empty")
    if size < 8:
        raise broken(path, f"it has {size} bytes, too few for a header")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise broken(path, f"its header claims {length} bytes; the limit is {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise broken(path, f"its header claims {length} bytes, the file has {size}")
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise broken(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise broken(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    for name, entry in header.items():
        _check(path, name, entry, size - 8 - length)
    if isinstance(metadata, dict):
        stored = dict(header)
        header |= {
            name: stored[stored_name]
            for name, stored_name in metadata.items()
            if isinstance(stored_name, str) and name not in stored and stored_name in stored
        }
    return header, 8 + length


def broken(path: Path, reason: str) -> BrokenModel:
    """The error for a file that is not a valid safetensors file."""
    return BrokenModel(f"{path} is not a valid safetensors file: {reason}")


def _check(path: Path, name: str, entry: Any, size: int) -> None:
    """Check that a tensor lies inside the `size` bytes of data and has the length that its shape implies."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = isinstance(dtype, str) and len(shape) <= MAX_DIMENSIONS
        valid = valid and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise broken(path, f"its header has no valid entry for {name}")
    if dtype not in ITEM_BYTES:
        raise UnsupportedModel(
            f"{path}: the tensor {name} is stored as {dtype}, which is not supported; supported: "
            f"{', '.join(ITEM_BYTES)}; store the weights as BF16 or F16 instead"
        )
    if stop > size:
        raise broken(path, f"{name} ends at byte {stop} of {size}: the file is truncated")
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise broken(path, f"{name} has {stop - start} bytes, which its shape {shape} and dtype {dtype} contradict")
